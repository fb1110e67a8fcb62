"""What a Trainer writes and prints: the model, checkpoints, the state, metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.atomic import whole_files
from paceline.checkpoint.model_files import save_model
from paceline.train import checkpoints, reports
from paceline.train.arguments import TrainingArguments

ARGUMENTS_NAME = "training_args.bin"


class Outputs:
    """The Trainer's methods that write files or print, as in 5.18.

    Attributes:
        saving: the checkpoint that is being written in the background, if any.
    """

    args: TrainingArguments
    model: nn.Module
    state: Any
    processing_class: Any
    data_collator: Any
    saving: checkpoints.Saving
    progress: Callable[[], dict[str, Any]]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, on the ranks that save; each file appears whole."""
        if not self.args.should_save:
            return
        folder = output_dir or str(self.args.output_dir)
        if _internal_call:
            self._save(folder)
            return
        with whole_files(folder) as aside:
            self._save(str(aside))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write model, tokenizer and arguments into a folder that nobody reads yet.

        Args:
            output_dir: default: that of the arguments.
            state_dict: to write instead of the model's own.
        """
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.model, folder, state_dict)
        self.save_companions(folder)

    @property
    def saves_in_its_own_way(self) -> bool:
        """Whether a subclass, or the script, has put another function in the place of one of these."""
        names = ("_save", "save_model")
        return any(
            name in vars(self) or getattr(type(self), name) is not getattr(Outputs, name) for name in names
        )

    def save_companions(self, folder: Path) -> None:
        """Write what goes with a model: tokenizer or processor, and the arguments."""
        companion: Any = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if hasattr(companion, "save_pretrained"):
            companion.save_pretrained(str(folder))
        torch.save(self.args, folder / ARGUMENTS_NAME)

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """Write ``checkpoint-<global_step>``; override it to write more beside it.

        Args:
            model: wrapped; the checkpoint holds `self.model`, which is inside.
            trial: None.
        """
        checkpoints.save(self, self.progress())  # type: ignore[arg-type]

    def save_state(self) -> None:
        """Write trainer_state.json to output_dir, on rank 0."""
        if self.args.process_index == 0:
            folder = Path(str(self.args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(folder / checkpoints.STATE_NAME)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print metrics in columns, on rank 0."""
        if self.args.process_index == 0:
            print(reports.as_table(split, metrics), flush=True)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write ``<split>_results.json`` and all_results.json to output_dir, on rank 0."""
        if self.args.process_index == 0:
            reports.save_metrics(Path(str(self.args.output_dir)), split, metrics, combined)

    def metrics_format(self, metrics: dict[str, Any]) -> dict[str, str]:
        """Metrics as text."""
        return reports.formatted(metrics)
