"""The command line of ``paceline launch``.

Parsing stops at the script: everything behind it belongs to the script, whatever it
looks like. What is not known here is refused by name, never passed over.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import ArgumentError

STDOUT, STDERR = 1, 2  # the bits of --tee

_DESCRIPTION = """\
Start a training script on several ranks of this machine, one process for each.
Options stand before the script, with _ or - between words; what follows the script is
handed to it untouched."""

_EXAMPLES = """\
examples:
  paceline launch --num_processes 4 train.py --epochs 3
  paceline launch --cpu --num_processes 2 -m my_package.train
  paceline launch --log_dir logs --max_restarts 2 train.py"""


@dataclass(frozen=True)
class LaunchConfig:
    """What to start, how often, and where its output goes.

    Attributes:
        script: path of a Python script, name of a module, or name of a program.
        script_arguments: handed to every rank as they are.
        num_processes: number of ranks; None means one per device, or 1 without a device.
        module: ``script`` is the name of a module, started as ``python -m`` does.
        no_python: ``script`` is a program, started without the Python interpreter.
        cpu: leave accelerators alone.
        main_process_port: TCP port on 127.0.0.1 where the ranks find each other; 0 takes a free one.
        log_dir: folder that gets the ranks' output as files; None writes none.
        tee: for each rank the streams (bits 1: stdout, 2: stderr) that go to a file and, prefixed
            with the rank, to the screen. None: both, when there is a ``log_dir``.
        max_restarts: how often all ranks are started again after one failed.
    """

    script: str
    script_arguments: tuple[str, ...] = ()
    num_processes: int | None = None
    module: bool = False
    no_python: bool = False
    cpu: bool = False
    main_process_port: int = 0
    log_dir: str | None = None
    tee: int | dict[int, int] | None = None
    max_restarts: int = 0

    def tee_of(self, local_rank: int) -> int:
        """The streams of one rank that go to the screen and to a file under ``--tee``."""
        if isinstance(self.tee, dict):
            return self.tee.get(local_rank, 0)
        return self.tee or 0

    def logged_of(self, local_rank: int) -> int:
        """The streams of one rank that are written to files."""
        if self.tee is None:
            return STDOUT | STDERR if self.log_dir else 0
        return self.tee_of(local_rank)


def add_launch_arguments(parser: argparse.ArgumentParser) -> list[str]:
    """Fill ``parser`` with the options of ``paceline launch``.

    Returns:
        Every spelling of every option.
    """
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "paceline launch [options] script [script arguments]"
    spellings: list[str] = []

    def add(name: str, *also: str, **settings: Any) -> None:
        """One option. Help shows the first name; the others, and all of them with dashes, work as well."""
        first = parser.add_argument(name, **settings)
        others = [spelling for one in (name, *also) for spelling in _with_dashes(one) if spelling != name]
        for other in others:
            parser.add_argument(
                other,
                **{**settings, "dest": first.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS},
            )
        spellings.extend([name, *others])

    add(
        "--num_processes",
        "--nproc_per_node",
        type=_number_of_processes,
        metavar="N",
        help="number of ranks (default: one per device, else 1); also --nproc_per_node",
    )
    add(
        "--module",
        "-m",
        action="store_true",
        help="(or -m) the script is the name of a module, as for `python -m`",
    )
    add("--no_python", action="store_true", help="the script is a program to start as it is, without Python")
    add("--cpu", action="store_true", help="train on the CPU, also where there are accelerators")
    add(
        "--main_process_port",
        type=_port,
        default=0,
        metavar="PORT",
        help="port on 127.0.0.1 where the ranks find each other (default: a free one)",
    )
    add(
        "--log_dir",
        metavar="FOLDER",
        help="also write each rank's output to FOLDER/<run>/attempt_<n>/<rank>/{stdout,stderr}.log",
    )
    add(
        "--tee",
        type=_streams,
        metavar="STREAMS",
        help="streams to write to a file and, prefixed with the rank, to the screen: 0 none, 1 stdout, "
        "2 stderr, 3 both, or by rank as in 0:3,1:2 (default: 3 with --log_dir)",
    )
    add(
        "--max_restarts",
        type=_count,
        default=0,
        metavar="N",
        help="start all ranks again up to N times when one fails (default: 0)",
    )
    parser.add_argument("script", help="path of the script (or name of a module or program)")
    rest = parser.add_argument("script_arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False
    return spellings


def config_from(arguments: argparse.Namespace, unknown: Sequence[str]) -> LaunchConfig:
    """Check what the command line said, and make it a ``LaunchConfig``.

    Args:
        arguments: what the parser of ``add_launch_arguments`` understood.
        unknown: what it did not.

    Raises:
        ArgumentError: an option is unknown, two exclude each other, or there is no such script.
    """
    if unknown:
        raise ArgumentError(_unknown_option(unknown[0]))
    if arguments.module and arguments.no_python:
        raise ArgumentError(
            "-m and --no_python exclude each other: a module needs Python; leave one of them out"
        )
    _check_script(arguments.script, module=arguments.module, no_python=arguments.no_python)
    _check_log_dir(arguments.log_dir)
    return LaunchConfig(
        script=arguments.script,
        script_arguments=tuple(arguments.script_arguments),
        num_processes=arguments.num_processes,
        module=arguments.module,
        no_python=arguments.no_python,
        cpu=arguments.cpu,
        main_process_port=arguments.main_process_port,
        log_dir=arguments.log_dir,
        tee=arguments.tee,
        max_restarts=arguments.max_restarts,
    )


def resolve_num_processes(config: LaunchConfig) -> int:
    """The number of ranks to start: as asked for, else one per device, else 1."""
    return config.num_processes or max(1, 0 if config.cpu else device_count())


def device_count() -> int:
    """Number of accelerators this machine shows to PyTorch (0 without one)."""
    import torch  # here, so that a wrong command line is answered at once

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _with_dashes(name: str) -> list[str]:
    return list(dict.fromkeys((name, name[:2] + name[2:].replace("_", "-"))))


def _unknown_option(option: str) -> str:
    name = option.split("=")[0]
    close = difflib.get_close_matches(name, add_launch_arguments(argparse.ArgumentParser()), n=1, cutoff=0.7)
    hint = f"; did you mean {close[0]}?" if close else ""
    return (
        f"there is no option {name}{hint} (options of your script go behind the script; "
        f"`paceline launch --help` lists ours)"
    )


def _check_script(script: str, *, module: bool, no_python: bool) -> None:
    if module:
        if "/" in script or script.endswith(".py"):
            raise ArgumentError(
                f"-m needs the name of a module such as my_package.train, but got {script!r}; "
                f"to start a file leave -m out"
            )
    elif no_python:
        if shutil.which(script) is None:
            raise ArgumentError(
                f"--no_python: there is no program {script!r} on PATH, or it may not be executed"
            )
    elif not os.path.exists(script):
        raise ArgumentError(
            f"there is no script {script!r} (looked in {os.getcwd()}); to start a module write -m {script}"
        )


def _check_log_dir(log_dir: str | None) -> None:
    if log_dir is not None and os.path.exists(log_dir) and not os.path.isdir(log_dir):
        raise ArgumentError(f"--log_dir {log_dir!r} is a file; name a folder")


def _number_of_processes(text: str) -> int:
    """A whole number, or torchrun's words: gpu, cpu (one per core), auto (devices, else cores)."""
    cores = os.cpu_count() or 1
    if text in ("gpu", "auto"):
        devices = device_count()
        if devices == 0 and text == "gpu":
            raise argparse.ArgumentTypeError("gpu: PyTorch sees no accelerator here; write a number, or cpu")
        return devices or cores
    if text == "cpu":
        return cores
    number = _whole(text)
    if number is None or number < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of ranks; write 1 or more (or gpu, cpu, auto)"
        )
    return number


def _count(text: str) -> int:
    number = _whole(text)
    if number is None or number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count; write 0 or more")
    return number


def _port(text: str) -> int:
    number = _whole(text)
    if number is None or not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; write 0 (a free one) to 65535")
    return number


def _streams(text: str) -> int | dict[int, int]:
    if text in ("0", "1", "2", "3"):
        return int(text)
    by_rank: dict[int, int] = {}
    for part in text.split(","):
        rank, _, streams = part.partition(":")
        if _whole(rank) is None or streams not in ("0", "1", "2", "3"):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a choice of streams; write 0, 1, 2 or 3, or by rank as in 0:3,1:2"
            )
        by_rank[int(rank)] = int(streams)
    return by_rank


def _whole(text: str) -> int | None:
    return int(text) if text.removeprefix("-").isascii() and text.removeprefix("-").isdigit() else None
