"""The launcher's streams; a pseudo-terminal for rank 0, which prints as it would without a launcher."""

from __future__ import annotations

import fcntl
import os
import pty
import termios


def open_standard_descriptors() -> None:
    """Open what the caller closed of descriptors 0 to 2: no file of ours is to become a standard stream."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def open_channel(like: int | None) -> tuple[int, int]:
    """A channel that a rank writes into and the launcher reads from.

    Args:
        like: descriptor of a terminal for the writing end to resemble (size, ``isatty``), or None for a pipe.

    Returns:
        (reading end, writing end), both closed on exec.
    """
    if like is None:
        return os.pipe()
    reader, writer = pty.openpty()
    _pass_bytes_unchanged(writer)
    copy_size(like, writer)
    return reader, writer


def copy_size(terminal: int, other: int) -> None:
    """Give a pseudo-terminal the size that a terminal has now; without effect when either is gone."""
    try:
        size = fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(other, termios.TIOCSWINSZ, size)
    except OSError:
        pass


def _pass_bytes_unchanged(descriptor: int) -> None:
    """The real terminal turns newlines into what it needs; doing it twice would double them."""
    settings = termios.tcgetattr(descriptor)
    settings[1] &= ~termios.OPOST
    termios.tcsetattr(descriptor, termios.TCSANOW, settings)
