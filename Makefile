# make venv    make or reuse .venv with everything development needs
# make demo    train on handwritten digits with 2 ranks
# make test    all tests
# make check   style, types, and the rules of the house
# make kernel  the shared-memory kernel under ThreadSanitizer and AddressSanitizer
# make bench   step time and gradient memory beside torch's DDP

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready

.PHONY: help venv demo test check kernel bench
help:
	@sed -n 's/^# make/make/p' Makefile

venv: $(READY)

$(READY): pyproject.toml setup.py constraints.txt $(wildcard src/paceline/comm/csrc/*) | $(PY)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(PY):
	$(PYTHON) -m venv $(VENV)

demo: $(READY)
	$(PY) -m paceline launch --cpu --num_processes 2 examples/digits.py

# What the engine stands on is tested on both process groups for CPUs.
ON_SHM := tests/oracle $(addprefix tests/engine/,test_gradients.py test_pass.py test_faults.py test_more.py)

# Tests start many small processes, which share the cores.
test check: export OMP_NUM_THREADS ?= 1

# Two workers: most of a test is starting ranks and waiting for them.
SIDE_BY_SIDE := -n 2 --dist loadfile

test: $(READY)
	$(PY) -m pytest $(SIDE_BY_SIDE) tests
	PACELINE_TEST_BACKEND=shm $(PY) -m pytest $(SIDE_BY_SIDE) $(ON_SHM) -m "not slow"

check: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest tests/architecture

kernel:
	$(MAKE) -C tests/csrc all

bench: $(READY)
	$(PY) benchmarks/step.py
	$(PY) benchmarks/allreduce.py
