"""The ``paceline`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline import environment
from paceline.errors import ArgumentError, PacelineError
from paceline.launch.config_file import default_config_file, find_config_file
from paceline.launch.flags import add_launch_arguments, config_from

_USAGE_ERROR = 2

# Each command imports what it needs itself: `launch` is measured by the time until the ranks run.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one ``paceline`` command.

    Args:
        arguments: the command line without the program's name; None takes the process's own.

    Returns:
        The exit status: 0 when all went well, 2 for a command line that cannot work, 1 when the ranks
        could not be started, else what ``paceline launch`` says of the ranks.
    """
    understood, unknown = _parser().parse_known_args(arguments)
    command: Callable[[argparse.Namespace, Sequence[str]], int] = understood.run
    try:
        return command(understood, unknown)
    except PacelineError as error:
        print(f"paceline {understood.command}: {error}", file=sys.stderr)
        return _USAGE_ERROR if isinstance(error, ArgumentError) else 1
    except KeyboardInterrupt:  # no rank had been started
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline", description="Data-parallel training on PyTorch.", allow_abbrev=False
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="command", required=True)
    launch = commands.add_parser(
        "launch", help="start a training script on several ranks", allow_abbrev=False, add_help=False
    )
    add_launch_arguments(launch)
    launch.set_defaults(run=_launch)
    test = commands.add_parser(
        "test", help="train a tiny model as `launch` would, and check it", allow_abbrev=False, add_help=False
    )
    add_launch_arguments(test, with_script=False)
    test.set_defaults(run=_test)
    config = commands.add_parser("config", help="ask what `launch` is to do by default, and write it down")
    config.add_argument(
        "--config_file", "--config-file", metavar="FILE", help="where to (default: where Accelerate looks)"
    )
    config.set_defaults(run=_config)
    diagnose = commands.add_parser("diagnose", help="what happened in a run, from the files it left")
    diagnose.add_argument(
        "folder", metavar="RUN_DIR", type=Path, help="folder that the launcher's report names"
    )
    diagnose.set_defaults(run=_diagnose)
    env = commands.add_parser("env", help="what a bug report needs to say")
    env.set_defaults(run=_env)
    return parser


class _ShowVersion(argparse.Action):
    """As argparse's own, but the version is looked up when somebody asks for it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib import metadata

        print(f"paceline {metadata.version('paceline')}")
        parser.exit()


def _launch(understood: argparse.Namespace, unknown: Sequence[str]) -> int:
    from paceline.launch.launcher import launch

    config = config_from(understood, unknown, environment.snapshot())
    _tell_default_config_file(understood)
    return launch(config)


def _test(understood: argparse.Namespace, unknown: Sequence[str]) -> int:
    from paceline.launch.launcher import launch

    understood.module, understood.script, understood.script_arguments = True, "paceline.self_test", ()
    config = config_from(understood, unknown, environment.snapshot())
    _tell_default_config_file(understood)
    return launch(config)


def _tell_default_config_file(understood: argparse.Namespace) -> None:
    """A file that nobody named on the command line has its say: whoever wonders may know."""
    found = find_config_file(environment.snapshot())
    if understood.config_file is None and found is not None:
        print(f"paceline {understood.command}: options that are not given come from {found}", file=sys.stderr)


def _config(understood: argparse.Namespace, unknown: Sequence[str]) -> int:
    from paceline.launch.questions import ask, write

    _refuse(unknown)
    path = Path(understood.config_file or default_config_file(environment.snapshot()))
    print(f"the answers go to {path}; Enter takes what stands in brackets", file=sys.stderr)
    write(ask(input), path)
    print(f"written to {path}; `paceline launch` and `accelerate launch` read it", file=sys.stderr)
    return 0


def _diagnose(understood: argparse.Namespace, unknown: Sequence[str]) -> int:
    from paceline.diagnose.afterwards import explain

    _refuse(unknown)
    print(explain(understood.folder), end="")
    return 0


def _env(understood: argparse.Namespace, unknown: Sequence[str]) -> int:
    from paceline.about import about

    _refuse(unknown)
    print(about(environment.snapshot()), end="")
    return 0


def _refuse(unknown: Sequence[str]) -> None:
    if unknown:
        raise ArgumentError(f"there is no option {unknown[0]}")
