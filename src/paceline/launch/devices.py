"""How many accelerators this host has, and how ranks are told to see only some of them."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from paceline.launch.interrupted import Interrupted
from paceline.launch.leash import leash

_STEP = 0.1  # seconds between two looks at what the launcher was told, while devices are counted
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


def start_counting(interrupted: Callable[[], bool]) -> Callable[[], tuple[int, str]]:
    """Begin to count the accelerators that PyTorch sees here.

    It is asked in a process of its own: the launcher stays without torch, which takes seconds to
    import, and without an accelerator's context.

    Args:
        interrupted: asked while waiting; true ends the counting and raises ``Interrupted`` there.

    Returns:
        A function that waits for the answer: their number and type (0 and "cpu" without one).
    """
    if _torch_is_for_cpus():
        return lambda: (0, "cpu")
    asked = subprocess.Popen(
        [sys.executable, "-c", _COUNT],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=leash(),
    )

    def answer() -> tuple[int, str]:
        while True:
            try:
                words = asked.communicate(timeout=_STEP)[0].split()[-2:]
                break
            except subprocess.TimeoutExpired:
                if interrupted():
                    asked.kill()
                    asked.communicate()
                    raise Interrupted from None
        return (int(words[0]), words[1]) if asked.returncode == 0 else (0, "cpu")

    return functools.cache(answer)


def count_devices() -> tuple[int, str]:
    """Number of accelerators that PyTorch sees here, and their type (0 and "cpu" without one)."""
    return start_counting(lambda: False)()


def device_count() -> int:
    """Number of accelerators that PyTorch sees here."""
    return count_devices()[0]


def _torch_is_for_cpus() -> bool:
    """Whether the installed PyTorch was built without any accelerator and has no plugin for one."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return True
    from importlib import metadata  # here: not needed where the number of ranks is given

    version = Path(found.origin).with_name("version.py")
    built_for = re.findall(r"^(?:cuda|hip|xpu)\b.*= *(.+)$", version.read_text(), re.MULTILINE)
    plugins = {point.name for point in metadata.entry_points(group="torch.backends")} - {"paceline"}
    return all(value == "None" for value in built_for) and not plugins
