"""The command line of ``paceline launch``, and what else has a say.

    given         on the command line, which wins
    PET_*         torchrun's variables (Kubernetes' operators set them)
    srun's        the hosts of a SLURM step                                   (slurm.py)
    config file   Accelerate's                                                (config_file.py)

Parsing stops at the script: everything behind it belongs to the script, whatever it
looks like. What is not known or not supported is refused by name, never passed over.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import ArgumentError
from paceline.launch import help_pages
from paceline.launch.config import MAIN_PORT, Hosts, LaunchConfig, Output
from paceline.launch.config_file import read_config_file
from paceline.launch.options import names_of, options
from paceline.launch.refused import reason_against
from paceline.launch.script_variables import script_variables
from paceline.launch.slurm import hosts_of_slurm

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def add_launch_arguments(parser: argparse.ArgumentParser, *, with_script: bool = True) -> None:
    """Fill ``parser``, made with ``add_help=False``, with the options of ``paceline launch``.

    Args:
        parser: gets them.
        with_script: the script and its arguments follow.
    """
    page = help_pages.of_launch() if with_script else help_pages.of_test()
    parser.usage = page.usage
    parser.add_argument("-h", "--help", action=help_pages.ShowHelp, nargs=0, text=page.short)
    parser.add_argument("--help_all", "--help-all", action=help_pages.ShowHelp, nargs=0, text=page.long)
    for option in options():
        if option.read is None:
            parser.add_argument(*option.spellings(), dest=option.key, action="store_const", const=True)
        else:
            parser.add_argument(
                *option.spellings(), dest=option.key, type=option.read, metavar=option.metavar
            )
    if not with_script:
        return
    parser.add_argument("script")
    rest = parser.add_argument("script_arguments", nargs=argparse.REMAINDER)
    rest.required = False


def config_from(
    arguments: argparse.Namespace, unknown: Sequence[str], environment: Mapping[str, str]
) -> LaunchConfig:
    """Check what the command line said, add what else has a say, and make it a ``LaunchConfig``.

    Args:
        arguments: what the parser of ``add_launch_arguments`` understood.
        unknown: what it did not.
        environment: variables of this process.

    Raises:
        ArgumentError: an option is unknown or not supported, options exclude each other, there is no
            such script, or the configuration file cannot be used.
    """
    if unknown:
        raise ArgumentError(_unknown_option(unknown[0]))
    given = {
        option.key: getattr(arguments, option.key)
        for option in options()
        if getattr(arguments, option.key) is not None
    }
    return config_of(given, environment, arguments.script, tuple(arguments.script_arguments))


def config_of(
    given: Mapping[str, Any], environment: Mapping[str, str], script: str, script_arguments: tuple[str, ...]
) -> LaunchConfig:
    """Put together all that has a say (see the top of this file).

    Args:
        given: values by the options' keys, as the command line gave them.
        environment: variables of this process.
        script: path, module or program.
        script_arguments: what is handed to it.

    Raises:
        ArgumentError: see ``config_from``.
    """
    wanted = {**_torchruns_variables(environment), **given}
    from_file = read_config_file(wanted.get("config_file"), environment)
    slurm = hosts_of_slurm(environment, wanted)
    chosen = {**from_file, **slurm, **wanted}
    _check_together(chosen)
    _check_script(script, module=bool(chosen.get("module")), no_python=bool(chosen.get("no_python")))
    hosts = _hosts(chosen)
    return LaunchConfig(
        script=script,
        script_arguments=script_arguments,
        module=bool(chosen.get("module")),
        no_python=bool(chosen.get("no_python")),
        ranks_per_host=_ranks_per_host(given, chosen, hosts),
        cpu=bool(chosen.get("cpu")),
        gpu_ids=None if chosen.get("gpu_ids") == "all" else chosen.get("gpu_ids"),
        role=chosen.get("role", "default"),
        fork=chosen.get("start_method", "forkserver") == "forkserver",
        hosts=hosts,
        output=_output(chosen),
        variables=script_variables(chosen),
        max_restarts=chosen.get("max_restarts", 0),
        grace=chosen.get("shutdown_timeout"),
        exit_timeout=chosen.get("exit_timeout"),
        signals=chosen.get("signals_to_handle", LaunchConfig.signals),
        look=min(1.0, max(0.01, chosen.get("monitor_interval", LaunchConfig.look))),
        quiet=bool(chosen.get("quiet")),
    )


def _torchruns_variables(environment: Mapping[str, str]) -> dict[str, Any]:
    """Options given as PET_NNODES and so on, as torchrun takes them."""
    found: dict[str, Any] = {}
    for option in options():
        for name in option.names:
            text = environment.get(f"PET_{name.upper()}")
            if text is None:
                continue
            if option.read is None:
                found.update({option.key: True} if text not in ("", "0") else {})
                continue
            try:
                found[option.key] = option.read(text)
            except argparse.ArgumentTypeError as error:
                raise ArgumentError(f"environment variable PET_{name.upper()}: {error}") from None
    return found


def _hosts(chosen: Mapping[str, Any]) -> Hosts:
    least, most = chosen.get("num_machines", (1, 1))
    address, port = chosen.get("main_process_ip"), chosen.get("main_process_port")
    if "rdzv_endpoint" in chosen:
        address, port = _endpoint(chosen["rdzv_endpoint"], port)
    alone = most == 1 and (address is None or chosen.get("rdzv_backend", "static") == "static")
    if chosen.get("standalone") or alone:
        return Hosts(port=port or 0)
    rank = chosen.get("machine_rank")
    by_arrival = chosen.get("rdzv_backend", "c10d" if least < most else "static") == "c10d"
    _check_hosts(chosen, most, address, rank, by_arrival)
    conf = chosen.get("rdzv_conf", {})
    interval, attempts = conf.get("keep_alive_interval"), conf.get("keep_alive_max_attempt")
    silence = float(interval or 10) * float(attempts or 3)
    return Hosts(
        least=least,
        most=most,
        rank=rank,
        address=address,
        port=MAIN_PORT if port is None else port,
        job=chosen.get("rdzv_id", "none"),
        is_main=conf["is_host"] == "true" if "is_host" in conf else None,
        join_timeout=float(conf.get("join_timeout", Hosts.join_timeout)),
        last_call=float(conf.get("last_call_timeout", Hosts.last_call)),
        silence=silence,
        local_address=chosen.get("local_addr"),
    )


def _endpoint(text: str, port: int | None) -> tuple[str, int | None]:
    host, colon, tail = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, tail = text, ""
    if tail and not (tail.isascii() and tail.isdigit() and int(tail) <= 65535):
        raise ArgumentError(f"--rdzv_endpoint {text!r}: {tail!r} is not a port; write HOST:PORT")
    return host.strip("[]") or "localhost", int(tail) if tail else port


def _check_hosts(
    chosen: Mapping[str, Any], most: int, address: str | None, rank: int | None, by_arrival: bool
) -> None:
    if not address:
        raise ArgumentError(
            f"{most} hosts need a main host to meet on: write --main_process_ip ADDRESS (or --rdzv_endpoint "
            f"ADDRESS:PORT) with an address of it, the same on all hosts"
        )
    if rank is None and not by_arrival:
        raise ArgumentError(
            f"which of the {most} hosts is this? write --machine_rank I, from 0 (the main host) to "
            f"{most - 1}; or --rdzv_backend c10d on all hosts to give ranks out by arrival"
        )
    if rank is not None and rank >= most:
        raise ArgumentError(
            f"--machine_rank {rank} does not exist among {most} hosts; write 0 to {most - 1}, or a higher "
            f"--num_machines"
        )
    if chosen.get("main_process_port") == 0:
        raise ArgumentError("several hosts cannot meet on port 0; write --main_process_port with a number")


def _ranks_per_host(given: Mapping[str, Any], chosen: Mapping[str, Any], hosts: Hosts) -> int | None:
    """Ranks on this host: as said, or its part of all ranks; None when nothing was said."""
    per_host: int | None = chosen.get("nproc_per_node")
    if per_host is not None and "num_processes" not in given:
        return per_host
    total: int | None = chosen.get("num_processes")
    if total is None:
        return None
    if total % hosts.most:
        raise ArgumentError(
            f"--num_processes {total} is the number of ranks on all hosts together, and cannot be shared out "
            f"among {hosts.most} hosts; write a multiple of {hosts.most}, or --nproc_per_node"
        )
    if per_host is not None and per_host * hosts.most != total:
        raise ArgumentError(
            f"--num_processes {total} and --nproc_per_node {per_host} disagree for {hosts.most} host(s); "
            f"leave one of them out"
        )
    return total // hosts.most


def _output(chosen: Mapping[str, Any]) -> Output:
    log_dir = chosen.get("log_dir")
    if log_dir is not None and os.path.exists(log_dir) and not os.path.isdir(log_dir):
        raise ArgumentError(f"--log_dir {log_dir!r} is a file; name a folder")
    return Output(
        log_dir=log_dir,
        tee=chosen.get("tee"),
        redirects=chosen.get("redirects", 0),
        rank_0_only=bool(chosen.get("log_rank_0_only")),
        local_ranks=chosen.get("local_ranks_filter", ()),
    )


def _check_together(chosen: Mapping[str, Any]) -> None:
    """Refuse what excludes each other."""
    if chosen.get("module") and chosen.get("no_python"):
        raise ArgumentError(
            "-m and --no_python exclude each other: a module needs Python; leave one of them out"
        )
    if chosen.get("multi_gpu") and chosen.get("cpu"):
        raise ArgumentError("--multi_gpu and --cpu exclude each other; leave one of them out")
    if chosen.get("multi_gpu") and 1 in (chosen.get("num_processes"), chosen.get("nproc_per_node")):
        raise ArgumentError("--multi_gpu needs two or more ranks; write --num_processes 2, or leave it out")
    if chosen.get("standalone") and chosen.get("num_machines", (1, 1))[1] > 1:
        raise ArgumentError("--standalone is for one host; leave it out, or --num_machines (--nnodes)")
    fsdp = [key for key in chosen if key.startswith("fsdp_")]
    if fsdp and not chosen.get("use_fsdp"):
        raise ArgumentError(f"--{fsdp[0]} does nothing without --use_fsdp; add it, or leave --{fsdp[0]} out")


def _unknown_option(option: str) -> str:
    name = option.split("=")[0]
    reason = reason_against(name)
    if reason is not None:
        return f"{name}: {reason}"
    close = difflib.get_close_matches(name, names_of(options()), n=1, cutoff=0.7)
    hint = f"; did you mean {close[0]}?" if close else ""
    return (
        f"there is no option {name}{hint} (options of your script go behind the script; "
        f"`paceline launch --help` lists ours)"
    )


def _check_script(script: str, *, module: bool, no_python: bool) -> None:
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise ArgumentError("the current folder was deleted; change to one that is there") from None
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
        hint = f"; to start a module write -m {script}" if _MODULE.fullmatch(script) else ""
        raise ArgumentError(f"there is no script {script!r} (looked in {folder}){hint}")
    elif not (os.path.isfile(script) or os.path.isdir(script)):
        raise ArgumentError(
            f"the script {script!r} is no file: every rank has to read it, so write it to one first"
        )
