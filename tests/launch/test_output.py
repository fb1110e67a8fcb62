"""Lines of several ranks on one screen, through real pipes."""

from __future__ import annotations

import io
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.output import Pump, RankStream, Screen


class Scene:
    """A screen that can be read back, and streams whose writing ends the test holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.screen = Screen(self._descriptor)

    def stream(self, rank: int, prefix: bytes | None = None, **settings: object) -> tuple[RankStream, int]:
        reader, writer = os.pipe()
        stream = RankStream(rank, reader, self.screen, self.screen, prefix=prefix, **settings)  # type: ignore[arg-type]
        return stream, writer

    def shown(self) -> bytes:
        return self.path.read_bytes()

    def close(self) -> None:
        os.close(self._descriptor)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "screen")
    yield scene
    scene.close()


def feed_and_finish(stream: RankStream, writer: int, *parts: bytes) -> None:
    for part in parts:
        stream.feed(part)
    os.close(writer)
    stream.finish()


def test_lines_come_whole_however_they_were_written(scene: Scene) -> None:
    stream, writer = scene.stream(1, b"[rank1]: ")
    feed_and_finish(stream, writer, b"fir", b"st\nsec", b"ond", b"\n", b"\n", b"no newline")
    assert scene.shown() == b"[rank1]: first\n[rank1]: second\n[rank1]: \n[rank1]: no newline\n"


def test_a_carriage_return_ends_a_piece(scene: Scene) -> None:
    stream, writer = scene.stream(0, b"[rank0]: ")
    stream.feed(b"\r 10%")
    stream.feed(b"\r 20%\r 30%")
    assert scene.shown() == b"[rank0]:  10%\r[rank0]:  20%\r"
    feed_and_finish(stream, writer, b"\r\ndone\r", b"\n")
    assert scene.shown().endswith(b"[rank0]:  30%\r\n[rank0]: done\r\n")


def test_a_prefix_that_is_there_is_not_repeated(scene: Scene) -> None:
    stream, writer = scene.stream(1, b"[rank1]: ")
    feed_and_finish(stream, writer, b"[rank1]: Traceback\n[rank1]:[W1129 ...]\n[rank12]: x\n")
    assert scene.shown() == b"[rank1]: Traceback\n[rank1]:[W1129 ...]\n[rank1]: [rank12]: x\n"


def test_a_line_of_another_rank_starts_on_a_line_of_its_own(scene: Scene) -> None:
    (bar, bar_writer), (other, other_writer) = scene.stream(0), scene.stream(1, b"[rank1]: ")
    bar.feed(b"\r 10%")
    other.feed(b"hello\n")
    bar.feed(b"\r 20%\n")
    assert scene.shown() == b"\r 10%\n[rank1]: hello\n\r 20%\n"
    for stream, writer in ((bar, bar_writer), (other, other_writer)):
        feed_and_finish(stream, writer)


def test_a_very_long_line_is_not_kept_back_for_ever(scene: Scene) -> None:
    stream, writer = scene.stream(0, b"")
    for _ in range(40):
        stream.feed(b"x" * (1 << 16))
    assert len(scene.shown()) > 1 << 20
    feed_and_finish(stream, writer)


def test_the_end_of_stderr_and_its_traceback_are_remembered(scene: Scene) -> None:
    stream, writer = scene.stream(0, b"", keep_tail=True)
    stream.feed(b"x" * 300_000 + b"\nTraceback (most rec")
    assert stream.traceback_at is None
    stream.feed(b"ent call last):\n  File")
    assert stream.traceback_at is not None
    assert stream.tail.endswith("Traceback (most recent call last):\n  File")
    assert len(stream.tail) <= 1 << 18
    feed_and_finish(stream, writer)


def test_every_byte_goes_to_the_file(scene: Scene, tmp_path: Path) -> None:
    file = open(tmp_path / "log", "wb", buffering=0)  # noqa: SIM115  (the stream closes it)
    stream, writer = scene.stream(0, b"[rank0]: ", file=file)
    feed_and_finish(stream, writer, b"a\rb\n", b"\xffc")
    assert (tmp_path / "log").read_bytes() == b"a\rb\n\xffc"


@pytest.mark.parametrize("shown", [True, False])
def test_a_full_disk_ends_the_file_and_not_the_run(scene: Scene, shown: bool) -> None:
    reader, writer = os.pipe()
    file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115  (the stream closes it)
    stream = RankStream(0, reader, scene.screen if shown else None, scene.screen, prefix=b"", file=file)
    feed_and_finish(stream, writer, b"one\n", b"two\n")
    note = b"paceline launch: cannot write /dev/full any more: No space left on device\n"
    assert scene.shown() == note + (b"one\ntwo\n" if shown else b"")


def test_a_file_that_takes_a_part_gets_the_rest(scene: Scene) -> None:
    class Slow(io.BytesIO):
        taken = b""

        def write(self, data: Any) -> int:
            self.taken += bytes(data[:2])
            return min(2, len(data))

    file = Slow()
    stream, writer = scene.stream(0, b"", file=file)
    feed_and_finish(stream, writer, b"hello\n")
    assert file.taken == b"hello\n"


def test_a_reader_that_went_away_ends_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    screen = Screen(writer)
    screen.write(0, b"nobody reads this\n")
    screen.write(0, b"nor this\n")
    os.close(writer)


def test_the_pump_loses_nothing_of_what_was_written_before_the_end(scene: Scene) -> None:
    streams, writers = zip(*(scene.stream(rank, b"[rank%d]: " % rank) for rank in range(3)), strict=True)
    pump = Pump()
    pump.start(streams)
    for number in range(200):
        for writer in writers:
            os.write(writer, b"line %d" % number)
            os.write(writer, b"\n")
    os.close(writers[0])
    pump.finish()  # the others are still open, as when a stranger holds on to a pipe
    assert pump.finished(within=30)
    for rank in range(3):
        lines = [line for line in scene.shown().splitlines() if line.startswith(b"[rank%d]" % rank)]
        assert lines == [b"[rank%d]: line %d" % (rank, number) for number in range(200)]
    for writer in writers[1:]:
        os.close(writer)


def test_a_stranger_that_writes_for_ever_does_not_hold_the_pump(scene: Scene) -> None:
    stream, writer = scene.stream(0, b"[rank0]: ")
    pump = Pump()
    pump.start([stream])
    with subprocess.Popen(["yes"], stdout=writer, stderr=subprocess.DEVNULL) as stranger:
        os.close(writer)
        time.sleep(0.2)
        pump.finish()
        ended = pump.finished(within=30)
        stranger.kill()
    assert ended
    assert set(scene.shown().splitlines()[:-1]) == {b"[rank0]: y"}
