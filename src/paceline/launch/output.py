"""What the ranks print: taken from pipes, written as whole lines, kept for the failure report.

Every rank writes into pipes that the launcher reads; nothing else writes to the launcher's own
stdout and stderr. A line therefore never tears, whoever else prints, and every line of a job
of several ranks begins with its rank (``[rank1]: ``, PyTorch's spelling).

Note: a terminal
    On a terminal rank 0 is not to notice that there is a launcher: it gets a pseudo-terminal of
    the same size in place of a pipe, and its bytes pass as they come, so progress bars, colours
    and prompts work. Another rank's line that comes into an unfinished one starts a new line.

Note: progress bars in a file
    A carriage return ends a piece just as a newline does, so that a bar moves while it is
    followed, and not only when it is complete.
"""

from __future__ import annotations

import os
import re
import selectors
import threading
import time
from collections.abc import Sequence
from typing import BinaryIO

_PIECE = re.compile(rb"[^\r\n]*(?:\r?\n|\r)")
_TRACEBACK = b"Traceback (most recent call last)"
_TAIL_LIMIT = 1 << 18  # bytes of each stderr that are kept for the failure report
_PIPE_LIMIT = 1 << 20  # bytes that a pipe can hold at most, as Linux usually allows
_PIECE_LIMIT = 1 << 20  # bytes without an end of line after which they are written as they are


class Screen:
    """Where lines go: the launcher's stdout or stderr. Safe to use from several threads.

    Args:
        descriptor: file descriptor to write to.
        beside: another screen that shows in the same place (stderr beside stdout on a terminal).
    """

    def __init__(self, descriptor: int, beside: Screen | None = None) -> None:
        self._descriptor = descriptor
        shared = beside is not None and _same_file(descriptor, beside._descriptor)
        self._line: _OpenLine = beside._line if beside is not None and shared else _OpenLine()
        self._closed = False

    def write(self, owner: int | None, data: bytes) -> None:
        """Write ``data`` for a rank (None: the launcher); first ends a line another one left open.

        When nobody reads the other end any more the data is dropped: the training is worth more
        than its output.
        """
        with self._line.lock:
            if self._line.owner != owner and self._line.open:
                data = b"\n" + data
            self._line.owner, self._line.open = owner, not data.endswith(b"\n")
            self._write_all(data)

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._closed:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                self._closed = True


class _OpenLine:
    """Whose unfinished line the cursor stands in, if any."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None
        self.open = False


class RankStream:
    """stdout or stderr of one rank, on its way to a screen, a file, or both.

    Args:
        rank: whose stream it is.
        source: descriptor to read from; this object closes it.
        screen: where to show it; None does not.
        notes: where the launcher says that the file cannot be written any more.
        prefix: put before every line; None lets the bytes pass as they come.
        file: also gets every byte; this object closes it.
        keep_tail: remember the end of it, for the failure report.
    """

    def __init__(
        self,
        rank: int,
        source: int,
        screen: Screen | None,
        notes: Screen,
        *,
        prefix: bytes | None,
        file: BinaryIO | None = None,
        keep_tail: bool = False,
    ) -> None:
        self.rank, self.source = rank, source
        self.traceback_at: float | None = None
        self._screen, self._notes = screen, notes
        self._prefix, self._file, self._keep_tail = prefix, file, keep_tail
        self._pending = b""
        self._tail = bytearray()

    @property
    def tail(self) -> str:
        """The end of what the rank wrote, when it is kept."""
        return self._tail.decode(errors="replace")

    def feed(self, data: bytes) -> None:
        """Pass on what was read."""
        self._write_file(data)
        if self._keep_tail:
            self._remember(data)
        if self._screen is None:
            return
        if self._prefix is None:
            self._screen.write(self.rank, data)
        else:
            self._show_whole_pieces(self._pending + data)

    def finish(self) -> None:
        """The rank closed the stream: show what is left, and close."""
        if self._pending:
            self._show([self._pending + b"\n"])
            self._pending = b""
        os.close(self.source)
        if self._file is not None:
            self._file.close()

    def _show_whole_pieces(self, data: bytes) -> None:
        # A carriage return at the very end waits: a newline may follow and belong to it.
        end = 1 + max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1))
        pieces, self._pending = _PIECE.findall(data[:end]), data[end:]
        if len(self._pending) > _PIECE_LIMIT:
            pieces.append(self._pending)
            self._pending = b""
        self._show(pieces)

    def _show(self, pieces: Sequence[bytes]) -> None:
        shown = b"".join(self._prefixed(piece) for piece in pieces if piece != b"\r")
        if shown and self._screen is not None:
            self._screen.write(self.rank, shown)

    def _prefixed(self, piece: bytes) -> bytes:
        assert self._prefix is not None
        # PyTorch puts the same prefix before the lines of a traceback: once is enough.
        return piece if piece.startswith(self._prefix.rstrip()) else self._prefix + piece

    def _remember(self, data: bytes) -> None:
        seen = max(0, len(self._tail) - len(_TRACEBACK))
        self._tail += data
        if self._tail.find(_TRACEBACK, seen) >= 0:
            self.traceback_at = time.monotonic()
        del self._tail[:-_TAIL_LIMIT]

    def _write_file(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            left = memoryview(data)
            while left:  # a disk that is nearly full takes a part
                left = left[self._file.write(left) :]
        except OSError as error:
            note = f"paceline launch: cannot write {self._file.name} any more: {error.strerror}\n"
            self._notes.write(None, note.encode())
            self._file.close()
            self._file = None


class Pump:
    """Reads the streams of all ranks of one attempt, in a thread of its own, until they end.

    It has all it needs before the first rank is started, for then the host may have no more to give.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._open = 0
        self._thread = threading.Thread(target=self._run, name="paceline-output", daemon=True)

    def start(self, streams: Sequence[RankStream]) -> None:
        """Begin to read."""
        for stream in streams:
            os.set_blocking(stream.source, False)
            self._selector.register(stream.source, selectors.EVENT_READ, stream)
        self._open = len(streams)
        self._thread.start()

    def finish(self) -> None:
        """Pass on what is still in the pipes and stop, whoever may still hold them open."""
        os.close(self._wake_writer)

    def finished(self, within: float) -> bool:
        """Whether all is passed on, waiting ``within`` seconds for it (for whoever reads our output)."""
        self._thread.join(within)
        return not self._thread.is_alive()

    def _run(self) -> None:
        finishing = False
        while self._open and not finishing:
            for key, _ in self._selector.select():
                if key.data is None:
                    finishing = True
                elif self._read(key.data) == 0:
                    self._end(key.data)
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._drain(key.data)
                self._end(key.data)
        self._selector.close()
        os.close(self._wake_reader)

    def _drain(self, stream: RankStream) -> None:
        """Pass on what the ranks wrote; not what somebody who got away with the pipe writes for ever."""
        left = _PIPE_LIMIT
        while left > 0 and (read := self._read(stream)):
            left -= read

    def _read(self, stream: RankStream) -> int | None:
        """Pass on what is there. Returns how many bytes: 0 at the end of the stream, None for now."""
        try:
            data = os.read(stream.source, 1 << 16)
        except BlockingIOError:
            return None
        except OSError:
            return 0  # a pseudo-terminal says so when its last user is gone
        if data:
            stream.feed(data)
        return len(data)

    def _end(self, stream: RankStream) -> None:
        self._selector.unregister(stream.source)
        stream.finish()
        self._open -= 1


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False
