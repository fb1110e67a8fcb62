"""``paceline diagnose RUN_DIR``: what happened, from the files of a run alone.

A launcher leaves its report beside the ranks' records (``<run>/attempt_<n>/report.txt`` and ``records/``).
Where there is none, because the launcher was killed or is another one, the records are compared.
"""

from __future__ import annotations

from pathlib import Path

from paceline.diagnose.comparison import compare
from paceline.errors import ArgumentError
from paceline.recorder.layout import SUFFIX
from paceline.recorder.reading import RankState, read_folder
from paceline.recorder.words import seconds, waits, whereabouts

REPORT = "report.txt"
_GONE_S = 3.0  # seconds without a sign of life, the others giving some, after which a rank counts as gone


def explain(run: Path) -> str:
    """What happened in the last attempt of a run, in words.

    Args:
        run: folder that a launcher named in its report, or that PACELINE_RECORDS named.

    Raises:
        ArgumentError: nothing was recorded there.
    """
    records = {path.parent for path in run.rglob(f"*{SUFFIX}")}
    reports = {path.parent for path in run.rglob(REPORT)}
    attempts = {folder.parent if folder.name == "records" else folder for folder in records} | reports
    if not attempts:
        raise ArgumentError(
            f"{run} holds no records of ranks; name the folder that `paceline launch` named in its report, "
            "its --log_dir, or the one in PACELINE_RECORDS"
        )
    last = max(
        attempts, key=lambda folder: max(path.stat().st_mtime for path in [folder, *folder.rglob("*")])
    )
    report = last / REPORT
    if report.is_file():
        return report.read_text()
    folder = last / "records" if (last / "records").is_dir() else last
    return tell(list(read_folder(folder).values()))


def tell(states: list[RankState]) -> str:
    """What the records of a run come to whose end nobody reported; a paragraph, and a line for each rank."""
    now = max((state.seen for state in states), default=0.0)
    gone = [state for state in states if now - state.seen > _GONE_S]
    lines = []
    if gone:
        first = min(gone, key=lambda state: state.seen)
        before = seconds(now - first.seen)
        lines.append(
            f"rank {first.rank} was heard of for the last time {before} before the others: it was killed, "
            f"stopped, or its host is gone. It was {whereabouts(first, first.seen)}. "
            f"{waits([state for state in states if state is not first], now)}"
        )
    else:
        finding = compare(states, now)
        if finding is not None:
            lines.append(finding.text)
    for state in sorted(states, key=lambda state: state.rank):
        raised = f"; it had raised {state.raised}" if state.raised else ""
        lines.append(f"rank {state.rank} was {whereabouts(state, state.seen)}{raised}")
    return "".join(f"{line.rstrip()}\n" for line in lines)
