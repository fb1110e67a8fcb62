"""Why a collective cannot finish, and how that is said."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """Why a collective cannot finish.

    Attributes:
        kind: "lost" (processes are gone), "left" (connections broke), "absent" (did not come) or
            "apart" (all came, to different collectives).
        ranks: the ranks of the whole job it is put down to; empty when none could be found.
        elsewhere: what other ranks wait for, in words; of kind "apart" alone.
    """

    kind: str
    ranks: list[int]
    elsewhere: str = ""

    def in_words(self) -> str:
        """The end of a sentence that begins with what failed."""
        named = ", ".join(f"rank {rank}" for rank in self.ranks) or "a rank"
        return {
            "lost": f"the process of {named} is gone; look for the first error in its output",
            "left": f"the connection to {named} broke; look for the first error in its output",
            "absent": (
                f"{named} did not come before the timeout: stuck, stopped, slower than the process group's "
                "timeout, or out of data while others still have some"
            ),
            "apart": f"the ranks wait for different things: {self.elsewhere}",
        }[self.kind]
