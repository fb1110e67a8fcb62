"""What processes that are forked from a rank, as DataLoader workers are, do with the rank's process groups.

They own none of what they inherit: the threads behind a group exist in the parent alone, and its file
descriptors are closed in the child, where their numbers soon stand for other files. Freeing a group
there joins threads that are not there, which waits for ever, or closes somebody else's file.
"""

from __future__ import annotations

import functools
import gc
import os


@functools.cache
def spare_parent_in_children() -> None:
    """From now on the garbage collector of forked children passes over everything they inherited.

    Called where process groups are made; does nothing at later calls.
    """
    os.register_at_fork(after_in_child=gc.freeze)
