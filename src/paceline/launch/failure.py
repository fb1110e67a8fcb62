"""What is said when ranks fail: the first failure in full and last, the others in a line each.

Note: which failure is the first
    When one rank fails, the others soon lose their connection to it and fail as well, and may
    even be gone earlier, for an interpreter that raised takes its time to shut down. So ranks are
    ordered by when they failed, not by when they were gone: a traceback counts from the moment
    its first line was read. A failure that only says that another rank went away is never
    taken for the cause while another one is known.

Note: a failure that is none of an exception
    Where all that is known is lost peers, a rank that left with exit status 0, or one that was
    found stopped (SIGSTOP, a debugger), is the cause: the others waited for it. When it left is
    no help, for an interpreter takes longer to be gone than its connections.

Pure: nothing here touches a process, so every case can be tested in a millisecond.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.diagnose.comparison import Finding, compare, context, skipped_backward
from paceline.errors import CollectiveTimeoutError, PeerFailedError, PeerLostError, RanksOutOfStepError
from paceline.recorder.reading import RankState

_HEADER = "Traceback (most recent call last):"
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_NOISE = re.compile(r"\[?[WEIF]\d{4} \d\d:|terminate called|Exception ignored in|\S+\.py:\d+: \w*Warning")
_LOST_A_PEER = re.compile(
    "|".join(error.__name__ for error in (PeerLostError, PeerFailedError, CollectiveTimeoutError))
    + r"|Dist(Backend|Network|Store)Error|[Gg]loo|NCCL|Connection (closed by|reset by) peer|Broken pipe"
)
_OUT_OF_STEP = RanksOutOfStepError.__name__
_GLOO_ABORTED = "terminate called without an active exception"
_GLOO_MISMATCH = "op.preamble.length <= op.nbytes"
_MISMATCH = (
    "Gloo gave up, because the ranks called different collectives at one time, or gave tensors of different "
    'sizes or dtypes. All must make the same calls in one order; init_process_group("shm") compares them '
    "first, and names what differs"
)
_ENDED = (
    "They wait for each other in different process groups, and have for longer than the timeout of the job's "
    "(init_process_group), so they were ended."
)
_LAST_LINES = 15
_SHUT_DOWN = 10.0  # seconds that an interpreter which raised may take to be gone
_HINTS: dict[int, str] = {
    signal.SIGKILL: "by somebody, or by the kernel because memory ran out (`dmesg` tells)",
    signal.SIGSEGV: "it crashed in native code; PYTHONFAULTHANDLER=1 shows all threads",
    signal.SIGBUS: "often shared memory (/dev/shm) ran out",
    signal.SIGABRT: "a native library gave up; its message is above",
}


@dataclass(frozen=True)
class Ending:
    """How one rank of an attempt ended.

    Attributes:
        rank: global rank.
        pid: its process.
        exit_code: what it returned; minus the signal's number when one killed it.
        ended_at: when its script was seen to be over, or it to be gone (monotonic seconds).
        stopped: the launcher had sent it a signal before it ended.
        stderr: the end of what it wrote to stderr.
        traceback_at: when the last traceback in it began (monotonic seconds), if there is one.
        error_file: contents of the file that torch elastic's ``@record`` wrote, if it did.
        log: path of the file that holds its whole stderr, if there is one.
        frozen: it was found stopped, as by SIGSTOP, when the others had failed.
        overstayed: what it was still doing when it was ended because it did not leave Python.
        deadlocked: it was ended, with all others, because they waited for each other.
        host: where it ran; empty when there is only one host.
        state: what it was doing when ranks failed, if it recorded that.
        looked_at: when that was read.
    """

    rank: int
    pid: int
    exit_code: int
    ended_at: float
    stopped: bool = False
    stderr: str = ""
    traceback_at: float | None = None
    error_file: str | None = None
    log: str | None = None
    frozen: bool = False
    overstayed: str = ""
    deadlocked: bool = False
    host: str = ""
    state: RankState | None = None
    looked_at: float = 0.0

    @property
    def name(self) -> str:
        """The rank, and its host where there are several."""
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"

    @property
    def failed(self) -> bool:
        """Ended badly, and not because the launcher stopped it."""
        return self.exit_code != 0 and not self.stopped

    @property
    def crashed(self) -> bool:
        """Killed by a signal that the launcher did not send."""
        return self.exit_code < 0 and not self.stopped and not self.broke_in_shutdown

    @property
    def broke_in_shutdown(self) -> bool:
        """Whether Gloo's threads aborted an interpreter that was shutting down after an exception."""
        aborted = self.exit_code == -signal.SIGABRT and self.stderr.rstrip().endswith(_GLOO_ABORTED)
        return aborted and bool(self.traceback)

    @property
    def traceback(self) -> str:
        """The exception the rank ended with, the chain that led to it included; "" when there was none."""
        return last_traceback(self.stderr) or _recorded_traceback(self.error_file)

    @property
    def lost_a_peer(self) -> bool:
        """Whether the rank only says that its connection to another one is gone."""
        return not self.crashed and bool(_LOST_A_PEER.search(self.reason))

    @property
    def reason(self) -> str:
        """The last exception in a line, else ""."""
        return _exception_line(self.traceback)

    @property
    def failed_at(self) -> float:
        """When it went wrong: the beginning of the last traceback, else the end of the process."""
        if self.crashed or self.traceback_at is None or not self.traceback:
            return self.ended_at
        return min(self.traceback_at, self.ended_at)


def first_failure(endings: Sequence[Ending]) -> Ending:
    """The ending that the others follow from (see the notes above). One of ``endings`` must have failed."""
    failures = [ending for ending in endings if ending.failed]
    earliest = min(failures, key=lambda ending: (ending.lost_a_peer, ending.failed_at))
    if _OUT_OF_STEP in earliest.reason:  # all ranks raise it, at the same moment
        skipped = _skipped(endings)
        raised = [ending for ending in endings if _OUT_OF_STEP in ending.reason]
        return next((e for e in raised if skipped is not None and e.rank in skipped.culprits), earliest)
    if not earliest.lost_a_peer:
        return earliest
    # The cause may still have been shutting down when the launcher stopped everybody.
    since = earliest.failed_at - _SHUT_DOWN
    caught = [
        ending
        for ending in endings
        if _ends_in_traceback(ending)
        and not ending.lost_a_peer
        and since < ending.failed_at < earliest.failed_at
    ]
    if caught:
        return min(caught, key=lambda ending: ending.failed_at)
    absent = [ending for ending in endings if ending.frozen or (ending.exit_code == 0 and not ending.stopped)]
    if absent:
        return min(absent, key=lambda ending: (not ending.frozen, ending.ended_at))
    found = held_up(endings)
    culprits = found.culprits if found is not None else ()
    return next((ending for ending in endings if ending.rank in culprits), earliest)


def held_up(endings: Sequence[Ending]) -> Finding | None:
    """What the ranks' records say when all that is known is that ranks waited; None if they do not tell."""
    return compare(_states(endings), max((ending.looked_at for ending in endings), default=0.0))


def _skipped(endings: Sequence[Ending]) -> Finding | None:
    return skipped_backward(_states(endings))


def _states(endings: Sequence[Ending]) -> list[RankState]:
    return [ending.state for ending in endings if ending.state is not None]


def only_lost_peers(endings: Sequence[Ending]) -> bool:
    """Whether all failures so far say that another rank went away, so that the cause is yet to be seen."""
    failures = [ending for ending in endings if ending.failed]
    return bool(failures) and all(ending.lost_a_peer for ending in failures)


def exit_status(ending: Ending) -> int:
    """The launcher's exit status for this failure: the rank's own, or 128 + signal as shells have it."""
    if ending.stopped or ending.broke_in_shutdown or ending.exit_code == 0:
        return 1
    return ending.exit_code if ending.exit_code > 0 else 128 - ending.exit_code


def describe(endings: Sequence[Ending], *, attempt: int, max_restarts: int, quiet: bool = False) -> str:
    """The whole report, the first failure's own words last.

    Args:
        endings: how all ranks of the attempt ended, at least one of them badly.
        attempt: number of the attempt, from 0.
        max_restarts: how many more than one there may be.
        quiet: leave out all but the first failure's own words.
    """
    cause = first_failure(endings)
    if quiet:
        return _own_words(cause, endings, story="")
    others = sorted((e for e in endings if e is not cause), key=lambda ending: ending.rank)
    attempts = f", attempt {attempt + 1} of {max_restarts + 1}" if max_restarts else ""
    lines = [f"{cause.name} {_did(cause)} ({_how(cause)}, pid {cause.pid}{attempts})"]
    lines += [_consequence(ending, cause) for ending in others]
    if cause.log:
        lines.append(f"all that {cause.name} wrote to stderr: {cause.log}")
    return "".join(f"paceline launch: {line}\n" for line in lines) + _own_words(
        cause, endings, _story(cause, endings)
    )


def last_traceback(text: str) -> str:
    """The last traceback in ``text`` with all that it was chained to, without rank prefixes; "" if none."""
    lines = [_RANK_PREFIX.sub("", line) for line in text.splitlines()]
    headers = [number for number, line in enumerate(lines) if line == _HEADER]
    if not headers:
        return ""
    start = headers.pop()
    while headers and any(line in _CHAINED for line in lines[start - 2 : start]):
        start = headers.pop()
    end = next((n for n in range(start, len(lines)) if _NOISE.match(lines[n])), len(lines))
    return "\n".join(lines[start:end]).rstrip()


def _exception_line(traceback: str) -> str:
    """The line of a traceback that names the exception: the first after its last frame."""
    lines = traceback.splitlines()
    headers = [number for number, line in enumerate(lines) if line == _HEADER]
    after = lines[headers[-1] + 1 :] if headers else lines
    return next((line for line in after if line and not line[0].isspace()), "")


def _ends_in_traceback(ending: Ending) -> bool:
    """Whether an exception is the last that a stopped rank said, so that it did not log it and live on."""
    said = _RANK_PREFIX.sub("", ending.stderr.rstrip().rpartition("\n")[2])
    return ending.stopped and bool(ending.reason) and said == ending.reason


def _recorded_traceback(error_file: str | None) -> str:
    try:
        return str(json.loads(error_file or "")["message"]["extraInfo"]["py_callstack"]).rstrip()
    except (ValueError, KeyError, TypeError):
        return ""


def _did(cause: Ending) -> str:
    if cause.deadlocked:
        return "waited in vain"
    return "held up the others" if _waited_for(cause) else "failed first"


def _how(ending: Ending) -> str:
    if ending.frozen:
        return "found stopped, as by SIGSTOP"
    if _waited_for(ending):
        return "alive"
    if ending.deadlocked:
        return "ended by the launcher"
    if ending.stopped:
        return "stopped while it shut down"
    if ending.broke_in_shutdown:
        return "exit code 1"
    if ending.exit_code < 0:
        return f"killed by {_signal_name(-ending.exit_code)}"
    return f"exit code {ending.exit_code}"


def _consequence(ending: Ending, cause: Ending) -> str:
    if ending.deadlocked:
        return f"{ending.name} waited in vain, too ({_how(ending)})"
    if ending.failed:
        reason = f": {ending.reason[:200]}" if ending.reason else ""
        return f"{ending.name} failed after it ({_how(ending)}){reason}"
    if ending.frozen:
        return f"{ending.name} was found stopped, as by SIGSTOP"
    if ending.stopped:
        reason = f", already failing with {ending.reason[:200]}" if _ends_in_traceback(ending) else ""
        how = " with SIGKILL, for it did not end on SIGTERM" if ending.exit_code == -signal.SIGKILL else ""
        return f"{ending.name} was stopped by the launcher{how}{reason}"
    earlier = cause.failed_at - ending.ended_at
    when = f", {earlier:.1f} s earlier" if earlier > 0 else ""
    return f"{ending.name} had finished (exit code 0{when})"


def _waited_for(ending: Ending) -> bool:
    """Whether it is the cause because the others waited for it in vain, being alive and well itself."""
    return ending.stopped and not ending.frozen and not _ends_in_traceback(ending)


def _own_words(cause: Ending, endings: Sequence[Ending], story: str) -> str:
    """The traceback of the first failure, each line with its rank; without one, what is known instead."""
    if cause.frozen:
        return _absent(cause, "was stopped (SIGSTOP, or a debugger), and the others waited in vain", story)
    if cause.exit_code == 0:
        what = "ended its script (exit code 0) while others still communicated"
        return _absent(cause, f"{what}; all ranks must run as many steps, and leave together", story)
    if cause.overstayed:
        what = f"did not leave Python, and was ended: it was {cause.overstayed}"
        return _absent(cause, f"{what}. --exit_timeout gives it longer", "")
    if cause.deadlocked:
        found = held_up(endings)
        what = found.text if found is not None else "the ranks wait for each other."
        return f"paceline launch: {what} {_ENDED}\n"
    if cause.crashed:
        return story + _native_words(cause)
    if _waited_for(cause) or cause.lost_a_peer:
        found = held_up(endings)
        if found is not None:
            return f"paceline launch: {found.text}\n"
    if cause.traceback:
        skipped = _skipped(endings) if _OUT_OF_STEP in cause.reason else None
        last = f"paceline launch: {skipped.text}\n" if skipped is not None else ""
        return ("" if last else story) + _rank_lines(cause.rank, cause.traceback) + last
    said = _last_lines(cause)
    if not said:
        nothing = f"{cause.name} wrote nothing to stderr before it ended with {_how(cause)}"
        return f"{story}paceline launch: {nothing}\n"
    lead = f"paceline launch: the last that {cause.name} wrote to stderr:\n"
    return story + lead + _rank_lines(cause.rank, said)


def _story(cause: Ending, endings: Sequence[Ending]) -> str:
    """Where the cause was and what the others waited for, as far as that was recorded."""
    others = _states([ending for ending in endings if ending is not cause])
    text = context(cause.state, others, cause.looked_at, with_line=not cause.traceback)
    return f"paceline launch: {text}\n" if text else ""


def _absent(cause: Ending, what: str, story: str) -> str:
    return f"{story}paceline launch: {cause.name} {what}\n"


def _native_words(cause: Ending) -> str:
    """For a rank that a signal killed: what native code said before (none, if SIGKILL), and a hint."""
    number = -cause.exit_code
    said = "" if number == signal.SIGKILL else _rank_lines(cause.rank, _last_lines(cause))
    hint = f": {_HINTS[number]}" if number in _HINTS else ""
    if _GLOO_MISMATCH in said:
        hint = f": {_MISMATCH}"
    return f"{said}paceline launch: {cause.name} was killed by {_signal_name(number)}{hint}\n"


def _last_lines(ending: Ending) -> str:
    shown = [line.rpartition("\r")[2] for line in ending.stderr.split("\n")]  # of a bar, its last state
    lines = [_RANK_PREFIX.sub("", line) for line in shown if line.strip()]
    return "\n".join(lines[-_LAST_LINES:])


def _rank_lines(rank: int, text: str) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
