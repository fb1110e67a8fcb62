"""All ranks train other parameters from the same pass on, or all of them raise; one that gives up is heard.

Note "a plan that one rank changes alone": its buckets would meet buckets of other sizes.
Gloo then ends a process ("terminate called", no exception), others mix memory or wait for
ever. So a rank whose trained parameters are others than in the pass before launches nothing
until all ranks have said through the store that theirs are, too. One that has not changed
hears of it while it waits for the first bucket, and answers. In the same way the others hear
of a rank whose communication hook raised: nobody but the hook knows what it would have sent.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from paceline.comm.last_words import in_words
from paceline.comm.waiting import Peers
from paceline.engine.plan import ParameterSpec
from paceline.errors import CommunicationError, PeerFailedError, RanksOutOfStepError


@dataclass(frozen=True)
class _Answer:
    """What one rank says.

    Attributes:
        fingerprint: of what it trains.
        changed: what has changed in that, in words that follow "rank 0 has".
        raised: the exception of its communication hook, in words that do, too.
    """

    fingerprint: int = 0
    changed: str = ""
    raised: str = ""

    def as_text(self) -> str:
        return json.dumps(asdict(self))


Answers = dict[int, _Answer]  # by rank within the group


class PlanAgreement:
    """Sees to it that a pass has buckets of the same parameters on all ranks.

    Args:
        peers: the ranks.
        specs: what is trained now, on all ranks.
        timeout: how long to wait for another rank.
    """

    def __init__(self, peers: Peers, specs: Sequence[ParameterSpec], timeout: timedelta) -> None:
        self._peers = peers
        self._agreed = specs
        self._timeout = timeout
        self._changes = 0  # on which all ranks have spoken
        self._pass: int | None = None  # which runs without a change here
        self._failure: CommunicationError | None = None
        if peers.world_size > 1:
            peers.between_slices = self._hear

    def before_launch(self, specs: Sequence[ParameterSpec], number: int) -> None:
        """Agree with the other ranks on what is trained, if that is not what it was in the pass before.

        Args:
            specs: what this rank trains in the pass.
            number: of the pass.

        Raises:
            RanksOutOfStepError: on all ranks, saying what each has changed; from then on, always.
            PeerFailedError: a rank has given up; from then on, always.
        """
        self.check()
        if self._peers.world_size > 1 and specs is not self._agreed and specs != self._agreed:
            self._exchange(specs, number)
        self._agreed, self._pass = specs, number

    def after_pass(self) -> None:
        """The pass is over: what other ranks change from now on concerns the next."""
        self._pass = None

    def check(self) -> None:
        """Raise if ranks have disagreed or given up: a bucket may be under way that will never land."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def give_up(self, error: Exception, number: int) -> None:
        """This rank's communication hook raised: so do the others, and this one in its next forward."""
        answers = {self._peers.rank: _Answer(raised=f"raised {in_words(error)}")}
        if self._peers.world_size > 1:
            self._peers.announce(f"plan/{self._changes}", answers[self._peers.rank].as_text())
        self._failure = self._of_failed_hook(answers, number)

    def _hear(self) -> None:
        if self._pass is not None and self._peers.is_announced(f"plan/{self._changes}"):
            number, self._pass = self._pass, None  # heard once: the exchange waits, too
            self._exchange(self._agreed, number)

    def _exchange(self, specs: Sequence[ParameterSpec], number: int) -> None:
        what = f"backward pass {number}, agreement on the trained parameters, which have changed"
        mine = _Answer(_fingerprint(specs), _difference(self._agreed, specs))
        texts = self._peers.exchange(f"plan/{self._changes}", mine.as_text(), what, self._timeout)
        self._peers.forget(f"plan/{self._changes - 1}")
        self._changes += 1
        answers = {rank: _Answer(**json.loads(text)) for rank, text in enumerate(texts)}
        if any(answer.raised for answer in answers.values()):
            self._failure = self._of_failed_hook(answers, number)
        elif len({answer.fingerprint for answer in answers.values()}) > 1:
            self._failure = self._of_different_parameters(answers, number)
        self.check()

    def _of_different_parameters(self, answers: Answers, number: int) -> CommunicationError:
        return RanksOutOfStepError(
            f"rank {self._peers.global_rank}, backward pass {number}: the ranks do not train the same "
            f"parameters. Since the pass before, {self._each(answers, 'changed')}. Freeze, unfreeze, add, "
            "convert and replace parameters on every rank before the same forward; wrap the module again to "
            "go on."
        )

    def _of_failed_hook(self, answers: Answers, number: int) -> CommunicationError:
        return PeerFailedError(
            f"rank {self._peers.global_rank}, backward pass {number}: {self._each(answers, 'raised')} in its "
            "communication hook, so this pass has no average, and what the hook would have sent is missing "
            "in its process group. Wrap the module again, with another group for the hook, to go on."
        )

    def _each(self, answers: Answers, what: str) -> str:
        """What ranks have to say, as part of a sentence."""
        said = {rank: getattr(answer, what) for rank, answer in answers.items()}
        return "; ".join(
            f"rank {self._peers.in_job([rank])[0]} has {text}" for rank, text in said.items() if text
        )


def _fingerprint(specs: Sequence[ParameterSpec]) -> int:
    return zlib.crc32("\n".join(map(str, specs)).encode())


def _difference(before: Sequence[ParameterSpec], now: Sequence[ParameterSpec]) -> str:
    """What has changed between two passes, in words that follow "rank 0 has"."""
    old, new = {spec.name: spec for spec in before}, {spec.name: spec for spec in now}
    converted = [name for name in old.keys() & new.keys() if old[name] != new[name]]
    parts = [
        f"{verb} {_listed(sorted(names))}"
        for verb, names in (
            ("stopped training", old.keys() - new.keys()),
            ("begun to train", new.keys() - old.keys()),
            ("converted", converted),
        )
        if names
    ]
    return " and ".join(parts) or ("reordered its parameters" if before != now else "changed nothing")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"and {len(names) - 3} more"])
