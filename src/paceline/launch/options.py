"""The options of ``paceline launch``: one table, from which the parser and both help pages are made.

An option has every name it goes by in torchrun and in Accelerate's launcher, each with ``_`` and
with ``-`` between words. The first name is the one under which its value is found.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.launch.devices import device_count

STDOUT, STDERR = 1, 2  # the bits of --tee and --redirects

FIRST = "most used"
RANKS = "ranks and devices"
HOSTS = "several hosts"
OUTPUT = "output"
ENDS = "restarts, signals and ends"
ACCELERATE = "read by scripts that use Accelerate"
FSDP = "Accelerate's FSDP"

_DYNAMO_BACKENDS = (
    "no eager aot_eager inductor aot_ts_nvfuser nvprims_nvfuser cudagraphs ofi fx2trt onnxrt tensorrt "
    "aot_torchxla_trace_once torchxla_trace_once tvm hpu_backend neuron"
)


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        names: without leading dashes, words joined by ``_``; ``-x`` for a single letter.
        help: what it does, in a line.
        read: makes the value of its text, or raises ``argparse.ArgumentTypeError``; None for a switch.
        metavar: what stands for the value in help; empty for a switch.
        group: under which heading it is shown.
    """

    names: tuple[str, ...]
    help: str
    read: Callable[[str], Any] | None
    metavar: str
    group: str

    @property
    def key(self) -> str:
        """The name under which the value is found."""
        return self.names[0]

    def spellings(self) -> list[str]:
        """Everything that may be written for it."""
        long = [f"--{name}" for name in self.names if not name.startswith("-")]
        dashed = ["--" + name[2:].replace("_", "-") for name in long]
        short = [name for name in self.names if name.startswith("-")]
        return list(dict.fromkeys([*long, *dashed, *short]))


def options() -> list[Option]:
    """All options, in the order in which help shows them."""
    return [*_first(), *_ranks(), *_hosts(), *_output(), *_ends(), *_accelerate(), *_fsdp()]


def _first() -> Iterator[Option]:
    def option(names: str, help: str, read: Callable[[str], Any] | None = None, metavar: str = "") -> Option:
        return Option(tuple(names.split()), help, read, metavar, FIRST)

    yield option(
        "num_processes", "number of ranks on all hosts (default: one per device, else 1)", positive, "N"
    )
    yield option("nproc_per_node", "number of ranks on this host; also gpu, cpu, auto", ranks_per_host, "N")
    yield option("num_machines nnodes", "number of hosts, or MIN:MAX (default: 1)", host_range, "N")
    yield option("machine_rank node_rank", "which of the hosts this is; 0 is the main host", count, "I")
    yield option("main_process_ip master_addr", "address of the main host", str, "HOST")
    yield option(
        "main_process_port master_port",
        "port on the main host (default: 29500; a free one if there is one host)",
        port,
        "PORT",
    )
    yield option("cpu", "train on the CPU, also where there are accelerators")
    yield option("module -m", "the script is the name of a module, as for `python -m`")
    yield option(
        "max_restarts", "start all ranks again up to N times after a failure (default: 0)", count, "N"
    )
    yield option("log_dir", "also write each rank's output to files in FOLDER", str, "FOLDER")


def _ranks() -> Iterator[Option]:
    def option(names: str, help: str, read: Callable[[str], Any] | None = None, metavar: str = "") -> Option:
        return Option(tuple(names.split()), help, read, metavar, RANKS)

    yield option("no_python", "the script is a program to start as it is, without Python")
    yield option(
        "config_file",
        "Accelerate's configuration file, YAML or JSON (default: the one that "
        "`accelerate config` or `paceline config` wrote, if any)",
        str,
        "FILE",
    )
    yield option("multi_gpu", "several ranks, which is what happens anyway; needs two or more")
    yield option("gpu_ids", "devices to use, as in 0,2 (default: all)", device_ids, "IDS")
    yield option(
        "num_cpu_threads_per_process",
        "OMP_NUM_THREADS of ranks (default: the cores, shared out)",
        positive,
        "N",
    )
    yield option("role", "ROLE_NAME of the ranks (default: default)", str, "NAME")
    yield option(
        "start_method",
        "forkserver: ranks are forked from a process that has imported torch "
        "(default); spawn: each is a Python of its own",
        one_of("forkserver spawn"),
        "METHOD",
    )


def _hosts() -> Iterator[Option]:
    def option(names: str, help: str, read: Callable[[str], Any] | None = None, metavar: str = "") -> Option:
        return Option(tuple(names.split()), help, read, metavar, HOSTS)

    yield option(
        "rdzv_backend",
        "static: each host names its rank (default); c10d: ranks by arrival",
        one_of("static c10d"),
        "NAME",
    )
    yield option("rdzv_endpoint", "HOST:PORT of the main host, as torchrun has it", str, "HOST:PORT")
    yield option("rdzv_id", "name of the job; launchers of another job are turned away", str, "ID")
    yield option(
        "rdzv_conf",
        "join_timeout, last_call_timeout, keep_alive_interval, keep_alive_max_attempt "
        "(seconds), is_host, as K=V,K=V",
        key_values,
        "K=V",
    )
    yield option("standalone", "one host, a free port")
    yield option("local_addr", "this host's address in the network that the hosts share", str, "ADDRESS")
    yield option("same_network", "the hosts share a network, which is what is expected anyway")


def _output() -> Iterator[Option]:
    def option(names: str, help: str, read: Callable[[str], Any] | None = None, metavar: str = "") -> Option:
        return Option(tuple(names.split()), help, read, metavar, OUTPUT)

    yield option(
        "tee -t",
        "streams to write to a file and to the screen: 0 none, 1 stdout, 2 stderr, "
        "3 both, or by local rank as in 0:3,1:2 (default: 3 with --log_dir)",
        streams,
        "STREAMS",
    )
    yield option("redirects -r", "streams to write to a file only, chosen as for --tee", streams, "STREAMS")
    yield option("log_rank_0_only", "show rank 0 alone on the screen; a failure report is always shown")
    yield option(
        "local_ranks_filter", "show only these local ranks on the screen, as in 0,1", local_ranks, "RANKS"
    )
    yield option("quiet -q", "when ranks fail, show the first failure's own words and nothing else")
    yield option("debug", "sets ACCELERATE_DEBUG_MODE=true")


def _ends() -> Iterator[Option]:
    def option(names: str, help: str, read: Callable[[str], Any] | None = None, metavar: str = "") -> Option:
        return Option(tuple(names.split()), help, read, metavar, ENDS)

    yield option(
        "shutdown_timeout",
        "seconds a rank has to end before SIGKILL (default: 1.5 after a failure, 5 after Ctrl-C, "
        "30 after SIGTERM)",
        seconds,
        "S",
    )
    yield option(
        "exit_timeout",
        "seconds a rank has to leave Python when all scripts have ended, or others have and it is stuck in "
        "native code (default: 600; 30 behind its exit handlers, where only idle native code is left)",
        seconds,
        "S",
    )
    yield option(
        "signals_to_handle",
        "signals to pass on to the ranks (default: SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2)",
        signals,
        "NAMES",
    )
    yield option("monitor_interval", "seconds between two looks at the ranks (default: 0.05)", seconds, "S")


def _accelerate() -> Iterator[Option]:
    def option(names: str, help: str, read: Callable[[str], Any] | None = None, metavar: str = "") -> Option:
        return Option(tuple(names.split()), help, read, metavar, ACCELERATE)

    yield option("mixed_precision", "no, fp16 or bf16", one_of("no fp16 bf16"), "P")
    yield option("dynamo_backend", "torch.compile backend (default: no)", one_of(_DYNAMO_BACKENDS), "NAME")
    yield option("dynamo_mode", "torch.compile mode", one_of("default reduce-overhead max-autotune"), "MODE")
    yield option("dynamo_use_fullgraph", "torch.compile(fullgraph=True)")
    yield option("dynamo_use_dynamic", "torch.compile(dynamic=True)")
    yield option("dynamo_use_regional_compilation", "compile repeated blocks once")
    yield option("enable_cpu_affinity", "pin each rank to cores near its device (NVIDIA)")


def _fsdp() -> Iterator[Option]:
    def option(names: str, help: str, read: Callable[[str], Any] | None = None, metavar: str = "") -> Option:
        return Option(tuple(names.split()), help, read, metavar, FSDP)

    yield option("use_fsdp", "let Accelerate in the script shard with FSDP")
    yield option("fsdp_version", "1 or 2", one_of("1 2"), "N")
    yield option("fsdp_min_num_params", "least size that is wrapped", count, "N")
    yield option("fsdp_sharding_strategy", "FULL_SHARD, SHARD_GRAD_OP, ...", str, "NAME")
    yield option("fsdp_reshard_after_forward", "true, false, or a strategy", str, "VALUE")
    yield option("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, NO_WRAP", str, "NAME")
    yield option("fsdp_transformer_layer_cls_to_wrap", "class names, comma-separated", str, "NAMES")
    yield option("fsdp_backward_prefetch", "BACKWARD_PRE, BACKWARD_POST, NO_PREFETCH", str, "NAME")
    yield option("fsdp_state_dict_type", "FULL_STATE_DICT, SHARDED_STATE_DICT, ...", str, "NAME")
    yield option("fsdp_ignored_modules", "regular expression of module names", str, "PATTERN")
    for name in (
        "offload_params",
        "forward_prefetch",
        "use_orig_params",
        "cpu_ram_efficient_loading",
        "sync_module_states",
        "activation_checkpointing",
        "activation_checkpointing_offload",
    ):
        yield option(f"fsdp_{name}", "true or false", boolean, "BOOL")


def _whole(text: str) -> int | None:
    return int(text) if text.removeprefix("-").isascii() and text.removeprefix("-").isdigit() else None


def positive(text: str) -> int:
    """A whole number from 1."""
    number = _whole(text)
    if number is None or number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number that can be had; write 1 or more")
    return number


def count(text: str) -> int:
    """A whole number from 0."""
    number = _whole(text)
    if number is None or number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count; write 0 or more")
    return number


def seconds(text: str) -> float:
    """A time in seconds, from 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write seconds, as in 30 or 0.5")
    return number


def ranks_per_host(text: str) -> int:
    """A whole number, or torchrun's words: gpu, xpu, cpu (one per core), auto (devices, else cores)."""
    cores = os.cpu_count() or 1
    if text in ("gpu", "xpu", "auto"):
        devices = device_count()
        if devices == 0 and text != "auto":
            raise argparse.ArgumentTypeError(
                f"{text}: PyTorch sees no accelerator here; write a number, or cpu"
            )
        return devices or cores
    if text == "cpu":
        return cores
    number = _whole(text)
    if number is None or number < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of ranks; write 1 or more (or gpu, cpu, auto)"
        )
    return number


def host_range(text: str) -> tuple[int, int]:
    """``4`` or ``MIN:MAX``."""
    least, _, most = text.partition(":")
    numbers = (_whole(least), _whole(most or least))
    if None in numbers or not 1 <= numbers[0] <= numbers[1]:  # type: ignore[operator]
        raise argparse.ArgumentTypeError(f"{text!r} is no number of hosts; write as in 2, or as in 1:4")
    return numbers  # type: ignore[return-value]


def port(text: str) -> int:
    """A TCP port; 0 takes a free one."""
    number = _whole(text)
    if number is None or not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; write 0 (a free one) to 65535")
    return number


def boolean(text: str) -> str:
    """``true`` or ``false``, as the text that Accelerate reads."""
    words = {"true": "true", "yes": "true", "1": "true", "false": "false", "no": "false", "0": "false"}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return words[text.lower()]


def one_of(words: str) -> Callable[[str], str]:
    """One of a few words, in lower or upper case."""

    def read(text: str) -> str:
        if text.lower() == "fp8":
            raise argparse.ArgumentTypeError("fp8 is not supported; write bf16")
        if text.lower() not in words.split():
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(words.split())}")
        return text.lower()

    return read


def device_ids(text: str) -> str:
    """``all``, or numbers (or device names, as CUDA takes them) joined by commas."""
    if not all(part.strip() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of devices; write as in 0,2, or all")
    return ",".join(part.strip() for part in text.split(","))


def local_ranks(text: str) -> tuple[int, ...]:
    """Local ranks joined by commas; none is all of them."""
    numbers = tuple(_whole(part) for part in text.split(",") if part.strip())
    if any(number is None or number < 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of local ranks; write as in 0,1")
    return tuple(number for number in numbers if number is not None)


def streams(text: str) -> int | dict[int, int]:
    """A choice of streams for all ranks, or by local rank."""
    if text in ("0", "1", "2", "3"):
        return int(text)
    by_rank: dict[int, int] = {}
    for part in text.split(","):
        rank, _, which = part.partition(":")
        if _whole(rank) is None or which not in ("0", "1", "2", "3"):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a choice of streams; write 0, 1, 2 or 3, or by rank as in 0:3,1:2"
            )
        by_rank[int(rank)] = int(which)
    return by_rank


def signals(text: str) -> tuple[int, ...]:
    """Names of signals joined by commas."""
    known = {
        name: getattr(signal, name)
        for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    }
    names = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [name for name in names if name not in known]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} cannot be passed on; choose from {', '.join(known)}")
    return tuple(int(known[name]) for name in names)


def key_values(text: str) -> dict[str, str]:
    """``K=V,K=V`` with the keys of ``--rdzv_conf``."""
    known = (
        "join_timeout",
        "timeout",
        "last_call_timeout",
        "keep_alive_interval",
        "keep_alive_max_attempt",
        "is_host",
    )
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in known:
            raise argparse.ArgumentTypeError(f"there is no setting {key!r}; there are {', '.join(known)}")
        if key == "is_host":
            found[key] = boolean(value)
        else:
            seconds(value)
            found["join_timeout" if key == "timeout" else key] = value
    return found


def names_of(table: Sequence[Option]) -> list[str]:
    """Every spelling of every option."""
    return [spelling for option in table for spelling in option.spellings()]
