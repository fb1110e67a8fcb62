"""What connects the hosts of a group: Gloo, and a word left in the store by whoever finds the group torn.

Gloo notices a process that ends, but not a host whose ranks have given up because another rank of theirs is
lost: it would wait for them until its timeout. So the first rank that gives up says why in the store, and who
waits for other hosts looks there now and then.

Note "who gives up first": a rank that waits for a host has to wait a little longer than the ranks of that
host wait for each other, and one that waits for such a rank longer still. Else it would put down to its
neighbour what is another one's fault.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.comm.hosts import Layout
from paceline.comm.word_in_store import WordInStore
from paceline.errors import CollectiveTimeoutError, CommunicationError, PeerLostError

LONGER_S = 1.0  # see "who gives up first"
_LOOK = timedelta(seconds=0.2)
_PATIENCE_S = 1.0  # for the word of a rank that was nearer to the cause
_KINDS = {kind.__name__: kind for kind in (CollectiveTimeoutError, PeerLostError)}


class BetweenHosts:
    """One rank's side of the connections between hosts.

    Args:
        store: shared by exactly the ranks of the group.
        layout: which rank is where.
        driver: this rank's number on its host.
        drivers: how many ranks of each host, the first ones, are connected with those of the same number.
        timeout: how long the ranks of a host wait for each other.
        global_rank: this rank in the whole job, for messages.

    Attributes:
        gloo: the group of this rank and its counterparts; None where it has none.
    """

    def __init__(
        self,
        store: dist.Store,
        layout: Layout,
        driver: int,
        drivers: int,
        timeout: timedelta,
        global_rank: int,
    ) -> None:
        self._word, self._global_rank = WordInStore(store, "torn"), global_rank
        self.gloo: Any = None
        if driver < drivers:
            of_driver = dist.PrefixStore(f"between/{driver}", store)
            longer = timeout + timedelta(seconds=LONGER_S)
            self.gloo = dist.ProcessGroupGloo(of_driver, layout.host, len(layout.hosts), timeout=longer)

    def wait(self, work: dist.Work) -> None:
        """Wait for a work of ``gloo``.

        Raises:
            CommunicationError: it failed, or a rank left word that the group is torn.
        """
        while not _is_over(work):
            told = self.told()
            if told is not None:
                raise told
        try:
            work.wait()
        except RuntimeError as error:
            raise self.told(_PATIENCE_S) or self._unexplained(error) from error

    def tell(self, error: CommunicationError) -> None:
        """Leave word why the group is torn, unless another rank did."""
        self._word.leave(json.dumps([type(error).__name__, error.reason, error.ranks]))

    def told(self, patience_s: float = 0.0) -> CommunicationError | None:
        """Why the group is torn, as the first rank put it that gave up; None where no word was left."""
        end = time.monotonic() + patience_s
        while (word := self._word.read()) is None:
            if time.monotonic() >= end:
                return None
            time.sleep(_LOOK.total_seconds() / 4)
        kind, reason, ranks = json.loads(word)
        return self._failure(_KINDS[kind], reason, tuple(ranks))

    def _unexplained(self, error: RuntimeError) -> CommunicationError:
        said = str(error).partition("\n")[0]
        if "imed out" in said:
            return self._failure(CollectiveTimeoutError, f"another host did not come in time ({said})")
        return self._failure(PeerLostError, f"the connection to another host broke ({said})")

    def _failure(
        self, kind: type[CommunicationError], reason: str, ranks: tuple[int, ...] = ()
    ) -> CommunicationError:
        error = kind(f"rank {self._global_rank}: a collective over several hosts failed, because {reason}")
        error.reason, error.ranks = reason, ranks
        return error


def _is_over(work: dist.Work) -> bool:
    """Whether a work has ended or failed, looking for a while; a wait that times out leaves it whole."""
    try:
        return work.wait(_LOOK)
    except RuntimeError:
        return work.is_completed()
