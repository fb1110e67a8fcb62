"""SIGTERM, taken as a request to stop at the end of the step with a checkpoint.

Machines that can be taken away send SIGTERM some seconds before they go. While training runs, the
signal is only noted; the ranks agree on it at the end of the step, write a checkpoint and leave
with exit code 143, which says that the work is not done. So they do at the end of training, until `train`
returns: the script has work to do yet, such as saving the model. A mark in the output folder lets
the next start of the same script go on from there by itself.

A second SIGTERM ends the process at once. A handler that the script has put in place itself
stays, unless enable_jit_checkpoint asks for this one.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from paceline.checkpoint import contents
from paceline.checkpoint.atomic import write_text
from paceline.train.arguments import TrainingArguments

MARK = "interrupted.json"
EXIT_CODE = 128 + signal.SIGTERM


class Interruption:
    """While it is open, SIGTERM is noted in `asked`.

    Args:
        args: with save_strategy="no" and without enable_jit_checkpoint nothing is to be saved, so
            the signal keeps its meaning.
    """

    def __init__(self, args: TrainingArguments) -> None:
        self.asked = False
        self._insisting: bool = args.enable_jit_checkpoint
        self._wanted = args.enable_jit_checkpoint or args.save_strategy != "no"
        self._before: Any = None
        self._pid = os.getpid()

    def __enter__(self) -> Interruption:
        self.asked = False
        found = signal.getsignal(signal.SIGTERM)
        free = found is signal.SIG_DFL or (self._insisting and found is not None)
        if self._wanted and free and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        if self.asked and kind is None:  # it came when the ranks had agreed for the last time
            signal.raise_signal(signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked or os.getpid() != self._pid:  # insisted on, or inherited by a forked child
            self._restore()
            signal.raise_signal(number)
        self.asked = True

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None


def mark(args: TrainingArguments) -> None:
    """Let the next run in output_dir go on from the newest checkpoint, if there is one that holds all."""
    output_dir = Path(str(args.output_dir))
    saved = contents.list_checkpoints(output_dir)
    if args.should_save and saved and not args.save_only_model:
        facts = {"signal": "SIGTERM", "step": contents.step_of(saved[-1])}
        write_text(output_dir / MARK, json.dumps(facts) + "\n")


def unmark(args: TrainingArguments) -> None:
    """A run has come to its end."""
    if args.should_save:
        (Path(str(args.output_dir)) / MARK).unlink(missing_ok=True)


def was_interrupted(output_dir: Path) -> bool:
    """Whether the last run in `output_dir` was interrupted and has not come to its end since."""
    return (output_dir / MARK).is_file()
