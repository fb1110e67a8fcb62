"""Metrics for people: printed in columns, and kept as JSON files in the output folder."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from paceline.checkpoint.atomic import write_text


def formatted(metrics: dict[str, Any]) -> dict[str, str]:
    """Metrics as text: run times as h:mm:ss, memory in MB, operations in GF, losses with four digits."""
    return {name: _text(name, value) for name, value in metrics.items()}


def as_table(split: str, metrics: dict[str, Any]) -> str:
    """One metric a line, in columns, under the heading of its split."""
    cells = formatted(metrics)
    names, values = max(map(len, cells), default=0), max(map(len, cells.values()), default=0)
    lines = [f"  {name:<{names}} = {cells[name]:>{values}}" for name in sorted(cells)]
    return "\n".join([f"***** {split} metrics *****", *lines])


def save_metrics(output_dir: Path, split: str, metrics: dict[str, Any], combined: bool) -> None:
    """Write ``<split>_results.json``, and with `combined` add them to ``all_results.json``."""
    output_dir.mkdir(parents=True, exist_ok=True)
    write_text(output_dir / f"{split}_results.json", _json(metrics))
    if combined:
        together = output_dir / "all_results.json"
        earlier = json.loads(together.read_text()) if together.is_file() else {}
        write_text(together, _json({**earlier, **metrics}))


def _json(metrics: dict[str, Any]) -> str:
    return json.dumps(metrics, indent=4, sort_keys=True) + "\n"


def _text(name: str, value: Any) -> str:
    if "_mem_" in name:
        return f"{int(value) >> 20}MB"
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    if name.endswith("_runtime"):
        return str(datetime.timedelta(seconds=round(float(value), 2)))[:-4] if value % 1 else f"{value:.0f}s"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
