"""TrainerState, where a run stands, and TrainerControl, what happens next.

Both have Hugging Face's fields; the state's JSON is interchangeable with theirs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.atomic import write_text
from paceline.errors import CheckpointError
from paceline.train.arguments import TrainingArguments
from paceline.train.collectives import Collectives


@dataclass
class TrainerState:
    """Where a run stands. A step is an optimizer step.

    Attributes:
        epoch: epochs done, with the fraction of the running one.
        global_step: steps done.
        max_steps: steps of the whole run.
        logging_steps, eval_steps, save_steps: intervals in steps (never shares).
        train_batch_size: samples of a micro-batch on one rank.
        num_train_epochs: epochs of the whole run, the last one counted in full.
        log_history: every dict that was logged, oldest first.
        best_metric, best_global_step, best_model_checkpoint: of metric_for_best_model.
        stateful_callbacks: by class name, what callbacks with a state gave to be saved.
        is_local_process_zero, is_world_process_zero: whether this is the first rank here, or of all.
    """

    epoch: float = 0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: float = 500
    eval_steps: float | None = 500
    save_steps: float = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)

    def save_to_json(self, json_path: str | Path) -> None:
        """Write the state, whole or not at all."""
        write_text(json_path, json.dumps(asdict(self), indent=2, sort_keys=True) + "\n")

    @classmethod
    def load_from_json(cls, json_path: str | Path) -> TrainerState:
        """Read a state; entries that this version does not know are left out.

        Raises:
            CheckpointError: the file is missing or torn.
        """
        try:
            entries = json.loads(Path(json_path).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{json_path} cannot be read: {error}") from error
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in entries.items() if name in known})

    def compute_steps(self, args: TrainingArguments, max_steps: int) -> None:
        """Turn intervals that are shares of the run into steps."""
        for kind in ("logging", "eval", "save"):
            steps = getattr(args, f"{kind}_steps")
            if steps is not None:
                setattr(self, f"{kind}_steps", math.ceil(max_steps * steps) if steps < 1 else steps)


@dataclass
class TrainerControl:
    """What the loop does next; callbacks set the switches.

    Attributes:
        should_training_stop: end the training after this step.
        should_epoch_stop: end this epoch after this step.
        should_save, should_evaluate, should_log: do so after this step.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def agree(
        self, collectives: Collectives, device: torch.device, wishes: Sequence[bool] = ()
    ) -> list[bool]:
        """Set every switch that any rank has set, on all ranks.

        A callback may act on one rank alone. If that rank then saved or stopped by
        itself, the others would wait for it in a collective it never comes to.

        Args:
            collectives: to agree with.
            device: this rank's.
            wishes: further flags, as many on every rank.

        Returns:
            for each wish, whether any rank has it.
        """
        if collectives.world_size == 1:
            return list(wishes)
        names = [each.name for each in fields(TrainerControl)]
        mine = [int(getattr(self, name)) for name in names] + [int(wish) for wish in wishes]
        switches = torch.tensor(mine, dtype=torch.int32, device=device)
        collectives.max(switches, "agreeing on what callbacks want")
        agreed = [bool(value) for value in switches.tolist()]
        for name, value in zip(names, agreed, strict=False):
            setattr(self, name, value)
        return agreed[len(names) :]

    def state(self) -> dict[str, Any]:
        """The switches, as callbacks give their state."""
        return {"args": asdict(self), "attributes": {}}
