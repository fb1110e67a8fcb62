"""What waiting ends with when the launcher is told to end."""

from __future__ import annotations


class Interrupted(Exception):  # noqa: N818  (nothing went wrong)
    """The launcher was told to end while it waited."""
