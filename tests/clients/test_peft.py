"""Adapters of PEFT train alone, are saved alone, and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.train.trainer import Trainer
from tests.clients.test_interchange import Texts, model
from tests.train.models import losses, settings

peft = pytest.importorskip("peft")


def train(folder: Path, resume: str | None = None) -> Trainer:
    adapted = peft.get_peft_model(
        model(),
        peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False),
    )
    values: dict[str, Any] = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "optim": "adamw_torch",
    }
    trainer = Trainer(adapted, settings(folder, **values), train_dataset=Texts())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_an_adapter_resumes_bit_by_bit(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    saved = tmp_path / "whole" / "checkpoint-2"
    assert (saved / "adapter_model.safetensors").is_file()
    assert not (saved / "model.safetensors").exists()
    again = train(tmp_path / "again", str(saved))
    assert losses(again) == pytest.approx(losses(whole), rel=1e-6)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name
