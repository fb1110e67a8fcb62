"""How many ranks a host with accelerators gets: asked of a PyTorch that says it has four."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.launching import LIMIT, SOURCE, environment

TORCH = """
class accelerator:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 4)
    current_accelerator = staticmethod(lambda: "cuda")
"""


@pytest.mark.parametrize(
    ("version", "torch", "counted"),
    [
        ("cuda = '12.8'\nhip = None", TORCH, "(4, 'cuda')"),
        ("cuda: Optional[str] = None\nxpu: Optional[str] = '2025'", TORCH, "(4, 'cuda')"),
        ("cuda: Optional[str] = None\nhip = None", "raise RuntimeError('not to be imported')", "(0, 'cpu')"),
        ("cuda = '12.8'", "raise RuntimeError('no driver')", "(0, 'cpu')"),
    ],
)
def test_devices_are_counted_without_importing_torch_here(
    tmp_path: Path, version: str, torch: str, counted: str
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(version)
    (tmp_path / "torch" / "__init__.py").write_text(torch)
    code = "import sys\nfrom paceline.launch.devices import *\nprint(count_devices(), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(PYTHONPATH=f"{tmp_path}:{SOURCE}"),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.stdout == f"{counted} False\n", done.stderr
