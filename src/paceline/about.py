"""``paceline env``: what a bug report needs to say about this installation and this host."""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata

_PACKAGES = ("paceline", "torch", "numpy", "transformers", "accelerate", "datasets", "safetensors")
_TELLING = (
    *("CUDA_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "SLURM_", "PACELINE_"),
    *("ACCELERATE_", "PET_", "MASTER_"),
)


def about(environment: Mapping[str, str]) -> str:
    """Versions, devices, this host, its part in the network, and which backend would serve and why.

    Args:
        environment: variables of this process.
    """
    return "".join(f"{name:<16}{value}\n" for name, value in _facts(environment))


def _facts(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    import torch  # here, so that other commands need not wait for it

    from paceline.comm.native import why_unavailable
    from paceline.comm.select import choose_backend, choose_device
    from paceline.launch.config_file import find_config_file
    from paceline.launch.rank_environment import usable_cores

    yield from ((name, _version(name)) for name in _PACKAGES)
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", platform.platform()
    yield "host", f"{socket.gethostname()}, networks {', '.join(name for _, name in socket.if_nameindex())}"
    yield "cores", f"{usable_cores()} usable, {torch.get_num_threads()} threads by default"
    yield "memory", _memory()
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    kind = torch.accelerator.current_accelerator() if devices else None
    yield "devices", f"{devices} x {kind}" if devices else "none besides the CPU"
    built_for = {"CUDA": torch.version.cuda, "HIP": torch.version.hip, "XPU": torch.version.xpu}
    yield (
        "built for",
        ", ".join(f"{name} {version}" for name, version in built_for.items() if version) or "the CPU alone",
    )
    yield "backend", choose_backend(None, choose_device()).reason
    yield "kernel", why_unavailable() or "built: ranks of one host can reduce in shared memory"
    yield "configuration", str(find_config_file(environment) or "no file")
    for name in sorted(environment):
        if name.startswith(_TELLING):
            yield name, environment[name]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _memory() -> str:
    try:
        with open("/proc/meminfo") as file:
            sizes = dict(line.split(":") for line in file)
    except OSError:
        return "unknown"
    total, free = (int(sizes[key].split()[0]) / 2**20 for key in ("MemTotal", "MemAvailable"))
    return f"{total:.1f} GiB, {free:.1f} GiB of it available"
