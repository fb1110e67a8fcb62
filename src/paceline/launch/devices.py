"""How many accelerators this host has, and how ranks are told to see only some of them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

_COUNT = (
    "import torch; print(torch.accelerator.device_count() if torch.accelerator.is_available() else 0, "
    "torch.accelerator.current_accelerator() or 'cpu')"
)
# Type of device -> the variable with which its runtime is told which devices to show.
VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "mlu": "MLU_VISIBLE_DEVICES",
    "sdaa": "SDAA_VISIBLE_DEVICES",
    "musa": "MUSA_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "hpu": "HABANA_VISIBLE_MODULES",
    "neuron": "NEURON_RT_VISIBLE_CORES",
}


def count_devices() -> tuple[int, str]:
    """Number of accelerators that PyTorch sees here, and their type (0 and "cpu" without one).

    Asked in a process of its own: the launcher stays without torch, which takes seconds to import,
    and without an accelerator's context.
    """
    if _torch_is_for_cpus():
        return 0, "cpu"
    done = subprocess.run(
        [sys.executable, "-c", _COUNT], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return 0, "cpu"
    number, kind = done.stdout.split()[-2:]
    return int(number), kind


def device_count() -> int:
    """Number of accelerators that PyTorch sees here."""
    return count_devices()[0]


def _torch_is_for_cpus() -> bool:
    """Whether the installed PyTorch was built without any accelerator and has no plugin for one."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return True
    version = Path(found.origin).with_name("version.py")
    built_for = re.findall(r"^(?:cuda|hip|xpu)\b.*= *(.+)$", version.read_text(), re.MULTILINE)
    return all(value == "None" for value in built_for) and not metadata.entry_points(group="torch.backends")
