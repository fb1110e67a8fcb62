"""Checkpoints go from Hugging Face's Trainer to paceline's and back; both give the same numbers meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.train.callbacks import EarlyStoppingCallback
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.models import settings

transformers = pytest.importorskip("transformers")

COMMON = {
    "per_device_train_batch_size": 4,
    "train_sampling_strategy": "sequential",
    "optim": "adamw_torch",
    "lr_scheduler_type": "cosine",
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "save_strategy": "steps",
    "save_steps": 2,
    "logging_steps": 1,
    "max_steps": 5,
}


class Texts(torch.utils.data.Dataset[Any]):
    """Token sequences; with `gaps` the labels of each stop counting somewhere else."""

    def __init__(self, gaps: bool = True) -> None:
        self.gaps = gaps
        generator = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(0, 20, (21, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        labels = self.tokens[index].clone()
        if self.gaps:
            labels[2 + index % 6 :] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def model() -> Any:
    """A head whose labels Hugging Face's Trainer counts as the loss does (GPT2LMHeadModel's it does not)."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def ours(folder: Path, resume: Path | None = None, callbacks: Any = None, **changes: Any) -> Trainer:
    trainer = Trainer(
        model(), settings(folder, **{**COMMON, **changes}),
        train_dataset=Texts(), eval_dataset=Texts(gaps=False), callbacks=callbacks,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def theirs(folder: Path, resume: Path | None = None, callbacks: Any = None, **changes: Any) -> Any:
    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **{**COMMON, **changes}
    )
    trainer = transformers.Trainer(
        model(), args, train_dataset=Texts(), eval_dataset=Texts(gaps=False), callbacks=callbacks
    )
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def logged(trainer: Any) -> list[list[float]]:
    names = ("loss", "grad_norm", "learning_rate")
    return [[entry[name] for name in names] for entry in trainer.state.log_history if "loss" in entry]


def assert_same(first: Any, second: Any) -> None:
    for one, other in zip(logged(first), logged(second), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    for name, value in first.model.state_dict().items():
        torch.testing.assert_close(value, second.model.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_theirs_goes_on_here(tmp_path: Path) -> None:
    whole = theirs(tmp_path / "theirs")
    again = ours(tmp_path / "ours", tmp_path / "theirs" / "checkpoint-2")
    assert again.state.global_step == 5
    assert_same(whole, again)


def test_ours_goes_on_there(tmp_path: Path) -> None:
    whole = ours(tmp_path / "ours")
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours" / "checkpoint-4")
    assert set(loaded.state_dict()) == set(whole.model.state_dict())
    again = theirs(tmp_path / "theirs", tmp_path / "ours" / "checkpoint-2")
    assert again.state.global_step == 5
    assert_same(whole, again)


def half_a_batch_each(rank: int, world_size: int, folder: Path, resume: Path) -> Any:
    trainer = ours(folder, resume, per_device_train_batch_size=2)
    return logged(trainer), {name: value.clone() for name, value in trainer.model.state_dict().items()}


def test_theirs_of_one_rank_goes_on_here_on_two(tmp_path: Path) -> None:
    whole = theirs(tmp_path / "theirs")
    resume = tmp_path / "theirs" / "checkpoint-2"
    for history, state in run_ranks(
        half_a_batch_each, 2, tmp_path / "ours", resume, backend=None, timeout=90
    ):
        for one, other in zip(history, logged(whole), strict=True):
            assert one == pytest.approx(other, rel=1e-4)
        for name, value in whole.model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


STOPPING = {
    "metric_for_best_model": "loss",
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_steps": 1,
    "learning_rate": 0.0,
    "max_steps": 6,
    "restore_callback_states_from_checkpoint": True,
}


@pytest.mark.parametrize("first", [ours, theirs])
@pytest.mark.parametrize("second", [ours, theirs])
def test_callbacks_states_go_along(tmp_path: Path, first: Any, second: Any) -> None:
    """Nothing improves at a learning rate of zero: patience counts 0, 1, 2 and stops at 3."""
    stopper = {ours: EarlyStoppingCallback, theirs: transformers.EarlyStoppingCallback}
    trainer = first(tmp_path / "first", None, [stopper[first](3, early_stopping_threshold=1e-3)], **STOPPING)
    assert trainer.state.global_step == 4
    state = json.loads((tmp_path / "first" / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["EarlyStoppingCallback"]["attributes"] == {
        "early_stopping_patience_counter": 2
    }
    fresh = stopper[second](1)
    again = second(tmp_path / "second", tmp_path / "first" / "checkpoint-3", [fresh], **STOPPING)
    assert again.state.global_step == 4
