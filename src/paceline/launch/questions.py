"""``paceline config``: asks the few questions that matter and writes Accelerate's configuration file."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import ArgumentError
from paceline.launch.config import MAIN_PORT
from paceline.launch.devices import count_devices
from paceline.launch.options import boolean, count, one_of, port, positive

_TYPES = {"cuda": "MULTI_GPU"}  # others are MULTI_ and the device's name


def ask(answer: Callable[[str], str]) -> dict[str, Any]:
    """Ask, and put the answers into the keys of the file.

    Args:
        answer: shows a question and returns the answer; empty takes what stands in brackets.

    Raises:
        ArgumentError: the answers ended before the questions.
    """

    def one(question: str, default: Any, read: Callable[[str], Any]) -> Any:
        while True:
            try:
                text = answer(f"{question} [{default}]: ").strip()
            except EOFError:
                raise ArgumentError("the answers ended before the questions; nothing was written") from None
            try:
                return read(text or str(default))
            except argparse.ArgumentTypeError as error:
                answer(f"{error} (press Enter) ")

    devices, kind = count_devices()
    cpu = (
        devices == 0
        or one(f"Leave the {devices} {kind} device(s) alone and use the CPU?", "no", boolean) == "true"
    )
    hosts = one("How many hosts?", 1, positive)
    content: dict[str, Any] = {}
    if hosts > 1:
        content["machine_rank"] = one(f"Which of them is this, 0 (the main one) to {hosts - 1}?", 0, count)
        content["main_process_ip"] = one("Address of the main host?", "localhost", str)
        content["main_process_port"] = one("Port on the main host?", MAIN_PORT, port)
    ranks = one("How many ranks on all hosts together?", hosts * (devices if not cpu else 2), positive)
    precision = one("Mixed precision: no, fp16 or bf16?", "no", one_of("no fp16 bf16"))
    many = "MULTI_CPU" if cpu else _TYPES.get(kind, f"MULTI_{kind.upper()}")
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO" if ranks == 1 else many,
        "use_cpu": cpu,
        "num_machines": hosts,
        "num_processes": ranks,
        "mixed_precision": precision,
        "rdzv_backend": "static",
        "debug": False,
        **content,
    }


def write(content: dict[str, Any], path: Path) -> None:
    """Write the file whole or not at all.

    Raises:
        ArgumentError: it cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with open(descriptor, "w", encoding="utf-8") as file:
            yaml.safe_dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        raise ArgumentError(
            f"{str(path)!r} cannot be written: {error.strerror}; name another with --config_file"
        ) from None
