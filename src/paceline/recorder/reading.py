"""Reading records: what a rank was doing when it was last heard of.

    read_folder(folder)   every rank's record  ->  RankState, which travels between hosts as JSON

A record may be read while its rank writes it, and after the rank was killed in the middle of a fact: what
is torn is left out.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.recorder.layout import (
    FACT,
    FACT_BYTES,
    FILE_BYTES,
    NAMES_SUFFIX,
    RING_AT,
    RING_FACTS,
    SUFFIX,
    WHERE_AT,
    WORDS_AT,
    Kind,
    read_header,
    read_text,
)
from paceline.recorder.places import BACKWARD, COLLECTIVE, doing, innermost, line_of, users
from paceline.recorder.stacks import STACKS_SUFFIX, main_stack

_RECENT_PASSES = 3
_DEFAULT_GROUP = "0"  # what torch.distributed calls it
_SLEEPS_S = 2.0  # seconds in which a backward that sleeps must be waiting for other ranks


@dataclass(frozen=True)
class Fact:
    """One fact; ``layout.Kind`` says what its numbers mean."""

    number: int
    time: float
    kind: Kind
    step: int
    micro_batch: int
    name: str
    count: int
    size: int


@dataclass(frozen=True)
class RankState:
    """Where a rank was, as its record tells. Times are seconds of its host's monotonic clock.

    Attributes:
        rank: in the whole job.
        pid: its process.
        host: where that runs.
        read_at: when its record was read.
        seen: when it last gave a sign of life.
        phase: what it was in, in words, as "backward pass 118, bucket 2 of 3 (fc.weight, fc.bias) launched".
        phase_since: since when.
        step: optimizer step it was at; 0 where nobody counted.
        passes: backward passes it had begun; 0 without the engine.
        waits_for: what it waited for from the other ranks, in words; "" when it did not wait.
        waits_since: since when; of a rank that does not wait, when its last wait began.
        wait_failed: the wait ended in an error, ``waits_until``.
        waited_s: seconds it had waited in all.
        line: the line of the user's code that its main thread stood at when it was looked at last, as
            "train.py:41 in load".
        line_since: since when.
        stands: nothing was recorded after that look.
        inner: the line further in, of PyTorch or another package; "" when it stood in the user's.
        doing: what the frames below say, as "data loading"; may be empty.
        asleep: the thread used no processor time there.
        still_since: since when it has used none at all; 0 where nobody tells.
        group: name of the process group in whose collective of torch.distributed it stands; may be empty.
        members: the ranks of that group; empty where they are not known, or many.
        patience: timeout of the job's default process group in seconds; 0 where it is not known.
        raised: an exception it told of.
        over: since when its script is over, unless an exception ended it; 0 while it runs.
        leaving: what it waits for since, as "in an exit handler at train.py:7 in close"; may be empty.
        forwards: training forwards it ran before each of its last passes, by pass.
    """

    rank: int
    pid: int = 0
    host: str = ""
    read_at: float = 0.0
    seen: float = 0.0
    phase: str = ""
    phase_since: float = 0.0
    step: int = 0
    passes: int = 0
    waits_for: str = ""
    waits_since: float = 0.0
    wait_failed: bool = False
    waits_until: float = 0.0
    waited_s: float = 0.0
    line: str = ""
    line_since: float = 0.0
    stands: bool = False
    inner: str = ""
    doing: str = ""
    asleep: bool = False
    still_since: float = 0.0
    group: str = ""
    members: tuple[int, ...] = ()
    patience: float = 0.0
    raised: str = ""
    over: float = 0.0
    leaving: str = ""
    forwards: dict[int, int] = field(default_factory=dict)

    def moved(self, seconds: float) -> RankState:
        """The same on a clock that shows so much more."""
        times = ("read_at", "seen", "phase_since", "waits_since", "waits_until", "line_since", "still_since")
        moved = {name: getattr(self, name) + seconds for name in times}
        return dataclasses.replace(self, **moved, over=self.over and self.over + seconds)

    def waited(self, now: float) -> float:
        """How long the wait that is under way, or failed, has taken."""
        return (self.waits_until if self.wait_failed else now) - self.waits_since

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RankState:
        """What ``dataclasses.asdict`` gave, after a journey as JSON."""
        counted = {int(number): count for number, count in fields["forwards"].items()}
        return cls(**{**fields, "forwards": counted, "members": tuple(fields["members"])})


def read_folder(folder: Path) -> dict[int, RankState]:
    """The states of all ranks that have a record in a folder, by rank."""
    states = [read_state(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    return {state.rank: state for state in states if state is not None}


def read_state(path: Path) -> RankState | None:
    """The state of the rank whose record this is; None when it is none, or no rank's."""
    try:
        read_at, memory = time.monotonic(), path.read_bytes()
    except OSError:
        return None
    header = read_header(memory)
    rank = header.get("rank")
    if rank is None or len(memory) < FILE_BYTES:
        return None
    facts = facts_in(memory, names_beside(path))
    state = RankState(
        rank=int(rank),
        pid=int(header.get("pid") or 0),
        host=str(header.get("host", "")),
        read_at=read_at,
        seen=float(header.get("monotonic") or 0.0),
        **_what_facts_say(facts),
    )
    seen = max(state.seen, facts[-1].time if facts else 0.0)
    state = _with_line(_with_words(dataclasses.replace(state, seen=seen), memory), memory)
    return with_stack(state, path)


def record_of(folder: Path, rank: int) -> Path:
    """The record of a rank that a launcher started."""
    return folder / f"rank_{rank}{SUFFIX}"


def names_beside(path: Path) -> dict[int, str]:
    """The texts that the facts of a record refer to, by number."""
    try:
        lines = path.with_suffix(NAMES_SUFFIX).read_text(errors="replace").split("\n")[:-1]
    except OSError:
        return {}
    pairs = (line.partition(" ") for line in lines)
    return {int(number): text for number, _, text in pairs if number.isdigit()}


def facts_in(memory: bytes, names: dict[int, str]) -> list[Fact]:
    """The whole facts, oldest first; what is torn or cannot be is left out."""
    found = []
    known = set(Kind)
    ring = memoryview(memory)[RING_AT : RING_AT + RING_FACTS * FACT_BYTES]
    for place, fields in enumerate(FACT.iter_unpack(ring)):
        number, time, kind, micro, step, name, _, count, size, _, again = fields
        if number and number == again and number % RING_FACTS == place and kind in known:
            text = names.get(name, "")
            found.append(Fact(number, time, Kind(kind), step, micro, text, count, size))
    return sorted(found, key=lambda fact: fact.number)


def _what_facts_say(facts: Sequence[Fact]) -> dict[str, Any]:
    """The fields of a state that follow from the facts."""
    said: dict[str, Any] = {}
    forwards: dict[int, int] = {}
    call = ""
    for fact in facts:
        said["step"] = fact.step or said.get("step", 0)
        if fact.kind is Kind.FORWARD:  # whatever went wrong before, it went on
            said.update(raised="", wait_failed=False, waits_for="")
        if fact.kind is Kind.WAIT:
            said.update(waits_for=call or "a collective", waits_since=fact.time, wait_failed=False)
        elif fact.kind is Kind.WAIT_FAILED:
            said.update(wait_failed=True, waits_until=fact.time, waited_s=fact.size / 1e6)
        elif fact.kind is Kind.WAIT_ENDED:
            said.update(waits_for="", waited_s=fact.size / 1e6)
        elif fact.kind is Kind.RAISED:
            said["raised"] = fact.name
        elif fact.kind is not Kind.COLLECTIVE and not said.get("wait_failed"):
            said.update(phase=_phase(fact), phase_since=fact.time)
        call = _phase(fact) if fact.kind is Kind.COLLECTIVE else ""
        if fact.kind is Kind.FORWARD:
            forwards[fact.count] = forwards.get(fact.count, 0) + 1
        elif fact.kind is Kind.BACKWARD:
            said["passes"] = fact.count
    said["forwards"] = {number: forwards[number] for number in sorted(forwards)[-_RECENT_PASSES:]}
    return said


def _phase(fact: Fact) -> str:
    words = {
        Kind.FORWARD: f"forward before backward pass {fact.count}",
        Kind.FORWARD_ENDED: f"between forward and backward pass {fact.count}",
        Kind.BACKWARD: f"backward pass {fact.count}",
        Kind.LAUNCHED: f"backward pass {fact.count}, {fact.name} launched",
        Kind.BACKWARD_ENDED: f"the end of backward pass {fact.count}",
        Kind.PASS_FINISHED: f"between backward pass {fact.count} and the next forward",
        Kind.COLLECTIVE: f"collective {fact.count} ({fact.name}, {fact.size:,} bytes)",
        Kind.PHASE: fact.name,
    }[fact.kind]
    if not fact.step:
        return words
    micro = f", micro-batch {fact.micro_batch}" if fact.micro_batch > 1 else ""
    return f"{words} (step {fact.step}{micro})"


def _with_words(state: RankState, memory: bytes) -> RankState:
    """What the wait is for, where its words are from this wait and not from one before."""
    if not state.waits_for:
        return state
    _, when, words = read_text(memory, WORDS_AT)
    if words and when >= state.waits_since:
        return dataclasses.replace(state, waits_for=words)
    if state.waits_for == "a collective" and state.phase:
        return dataclasses.replace(state, waits_for=f"a collective ({state.phase})")
    return state


def _with_line(state: RankState, memory: bytes) -> RankState:
    _, when, text = read_text(memory, WHERE_AT)
    try:
        seen = json.loads(text)
        state = dataclasses.replace(
            state,
            seen=max(state.seen, when),
            over=float(seen.get("over", 0.0)),
            leaving=str(seen.get("leaving", "")),
        )
        if "line" not in seen:  # a script that was over within a second
            return state
        recorded, looked = max(state.phase_since, state.waits_since), float(seen["looked"])
        state = dataclasses.replace(
            state,
            line=str(seen["line"]),
            line_since=max(float(seen["since"]), recorded),
            stands=recorded <= looked,
            inner=str(seen["inner"]),
            doing=str(seen["doing"]),
            asleep=bool(seen["asleep"]),
            still_since=float(seen.get("still", 0.0)),
            group=str(seen.get("group", "")),
            members=tuple(seen.get("members", ())),
            patience=float(seen.get("patience", 0.0)),
        )
    except (ValueError, KeyError, TypeError):
        return state
    return state if state.waits_for or state.over else _with_unrecorded_wait(state, looked)


def with_stack(state: RankState, path: Path) -> RankState:
    """Where native code crashed, or the rank stood when it was asked: later than any look of its own.

    Args:
        state: of the rank.
        path: of its record.
    """
    places = main_stack(path.with_suffix(STACKS_SUFFIX))
    if not places:
        return state
    mine, inner = users(places), innermost(places)
    line = line_of(mine)
    return dataclasses.replace(
        state,
        line=line,
        line_since=state.line_since if line == state.line else state.seen,
        stands=True,
        inner="" if mine is inner else line_of(inner, parents=2),
        doing=doing(places),
        asleep=state.asleep and line == state.line,
    )


def _with_unrecorded_wait(state: RankState, when: float) -> RankState:
    """Where nobody records waits, as with torch's own DDP on Gloo, the line must tell."""
    sleeps = state.asleep and when - state.line_since > _SLEEPS_S
    in_backward = state.doing == BACKWARD and sleeps and not state.passes
    if state.stands and (in_backward or state.doing.startswith(COLLECTIVE)):
        group = f" in process group {state.group}" if state.group not in ("", _DEFAULT_GROUP) else ""
        words = f"{state.doing}{group} at {state.line}"
        return dataclasses.replace(state, waits_for=words, waits_since=state.line_since)
    return state
