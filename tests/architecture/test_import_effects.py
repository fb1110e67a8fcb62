"""Importing paceline, or any file of it, changes nothing in the process and loads nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.architecture.house import files, module_name

# What the state of a process is judged by; compared before and after the imports.
STATE = """
import json, logging, os, signal, sys, threading, warnings

def state():
    import torch
    import torch.distributed as dist
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "threads": sorted(t.name for t in threading.enumerate()),
        "signals": {str(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
        "excepthooks": [str(sys.excepthook), str(threading.excepthook)],
        "log handlers": [str(log.handlers) for log in (logging.getLogger(), logging.getLogger("paceline"))],
        "log levels": [logging.getLogger().level, logging.getLogger("paceline").level],
        "warning filters": [str(f) for f in warnings.filters],
        "process group": dist.is_initialized(),
        "torch threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "random state": hash(bytes(torch.get_rng_state().tolist())),
    }
"""


def run_fresh(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=100
    ).stdout


def test_import_paceline_loads_neither_torch_nor_anything_else_heavy() -> None:
    code = "import sys, paceline; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    assert run_fresh(code).strip() == "[]"


def test_no_file_does_anything_when_imported() -> None:
    names = [module_name(path) for path in files() if path.stem != "__main__"]
    peers = ["transformers", "accelerate", "datasets", "sklearn", "matplotlib", "pandas"]
    code = f"""{STATE}
import importlib
import torch.distributed.elastic.multiprocessing, torch.distributed.run  # what they do is not on us
before = state()
for name in {names}:
    importlib.import_module(name)
after = state()
changed = {{key: [before[key], after[key]] for key in before if before[key] != after[key]}}
print(json.dumps([changed, [p for p in {peers} if p in sys.modules]]))
"""
    changed, loaded = json.loads(run_fresh(code).splitlines()[-1])
    assert not changed
    assert not loaded
