"""A script started by the launcher sees and does what it does under plain Python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launch import rank_main
from tests.launch.launching import LIMIT, environment, script

WHO_AM_I = """
import sys
names = sorted(name for name in globals() if name not in ("__annotations__", "sys"))
print(__name__, __file__, __spec__ and __spec__.name, sys.argv, sys.path[0], names)
print(sys.modules["__main__"].names is names)
def first(items): return items[0]
if "raise" in sys.argv: first([])
if "exit" in sys.argv: sys.exit(3)
if "say" in sys.argv: sys.exit("no data")
"""
SPAWN = """
import multiprocessing
def double(x): return 2 * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [21]))
"""


def plain_and_ours(folder: Path, kind: str, name: str, *arguments: str) -> list[tuple[int, str, str]]:
    plain = ["-m", name] if kind == "module" else [name]
    results = []
    for words in (plain, [rank_main.__file__, str(folder / "told.json"), kind, name]):
        done = subprocess.run(
            [sys.executable, "-u", *words, *arguments],
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        frames_of_runpy = [line for line in done.stderr.splitlines() if "<frozen runpy>" not in line]
        results.append((done.returncode, done.stdout, "\n".join(frames_of_runpy)))
    return results


@pytest.mark.parametrize("argument", ["fine", "raise", "exit", "say"])
@pytest.mark.parametrize(
    ("kind", "name"), [("script", "job.py"), ("script", "sub/../job.py"), ("module", "job")]
)
def test_the_same_as_under_python(tmp_path: Path, kind: str, name: str, argument: str) -> None:
    (tmp_path / "sub").mkdir()
    script(tmp_path, WHO_AM_I)
    plain, ours = plain_and_ours(tmp_path, kind, name, argument, "--more")
    assert ours == plain
    assert json.loads((tmp_path / "told.json").read_text())["status"] == plain[0]


def test_the_end_is_told_before_the_interpreter_shuts_down(tmp_path: Path) -> None:
    text = f"""
import atexit, os, sys
@atexit.register
def at_exit(): print(os.path.exists({str(tmp_path / "told.json")!r}))
sys.stderr = open(os.devnull, "w")
if os.fork() == 0: raise KeyError("of a child")
os.wait()
print(os.path.exists({str(tmp_path / "told.json")!r}))
raise ValueError("mine")
"""
    script(tmp_path, text)
    _, (_, out, _) = plain_and_ours(tmp_path, "script", "job.py")
    assert out.splitlines() == ["False", "False", "True"]
    told = json.loads((tmp_path / "told.json").read_text())["message"]["extraInfo"]["py_callstack"]
    assert told.startswith("Traceback (most recent call last):") and told.endswith("ValueError: mine\n")
    assert "rank_main" not in told


@pytest.mark.parametrize("text", ["def f(:", "import no_such_module_here", SPAWN, "raise KeyboardInterrupt"])
def test_other_scripts_too(tmp_path: Path, text: str) -> None:
    script(tmp_path, text)
    (plain_status, *plain), (status, *ours) = plain_and_ours(tmp_path, "script", "job.py")
    assert ours == plain
    assert status == (130 if plain_status == -2 else plain_status)


@pytest.mark.parametrize(
    ("ending", "ended"), [("", 1), ("sys.exit(0)", 1), ("sys.exit(4)", 0), ("raise ValueError", 0)]
)
def test_a_gloo_group_left_behind_is_ended_after_a_good_end_only(
    tmp_path: Path, ending: str, ended: int
) -> None:
    script(
        tmp_path,
        f"""
import sys, types
dist = sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
dist.is_available = dist.is_initialized = lambda: True
dist.get_backend = lambda: "gloo"
dist.destroy_process_group = lambda: print("destroyed")
{ending}
""",
    )
    _, (_, out, _) = plain_and_ours(tmp_path, "script", "job.py")
    assert out.count("destroyed") == ended
