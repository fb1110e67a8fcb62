"""Mixed precision, compilation, noise and determinism: settings that change how a step is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.errors import ArgumentError
from paceline.train.neftune import noisy_embeddings
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.models import Points, Regression, Sequences, Tagger, losses, settings, weights


def loop_with_scaler(steps: int, spoil: int) -> tuple[list[float], dict[str, Tensor], float]:
    """The same in a plain loop with torch's own scaler; the loss of step `spoil` overflows."""
    model, data = Regression(), Points(8 * steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    scaler, found = torch.amp.GradScaler("cpu"), []
    for step in range(steps):
        chosen = slice(8 * step, 8 * step + 8)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(data.x[chosen], data.y[chosen])["loss"] * (1e30 if step == spoil else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.item())
    return found, weights(model), scaler.get_scale()


class Overflowing(Regression):
    """Its loss is so large in one step that the scaled gradient is infinite."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.overflow_at, self.calls = step, 0

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        outputs = super().forward(x, labels)
        if labels is not None:
            outputs["loss"] = outputs["loss"] * (1e30 if self.calls == self.overflow_at else 1.0)
            self.calls += 1
        return outputs


def train_fp16(rank: int, world_size: int, folder: Path) -> Any:
    args = settings(
        folder,
        fp16=True,
        max_steps=5,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        per_device_train_batch_size=8 // world_size,
        train_sampling_strategy="sequential",
        save_strategy="steps",
        save_steps=3,
    )
    trainer = Trainer(Overflowing(1), args, train_dataset=Points(40))
    trainer.train()
    again = Trainer(Overflowing(-1), args, train_dataset=Points(40))
    again.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    assert trainer.accelerator.scaler is not None
    assert again.accelerator.scaler is not None
    scales = trainer.accelerator.scaler.get_scale(), again.accelerator.scaler.get_scale()
    return losses(trainer), weights(trainer.model), weights(again.model), scales


@pytest.mark.parametrize("world_size", [1, 2])
def test_fp16_scales_the_loss_and_skips_what_overflows(tmp_path: Path, world_size: int) -> None:
    want, want_weights, scale = loop_with_scaler(5, spoil=1)
    for logged, final, resumed, (last_scale, resumed_scale) in run_ranks(
        train_fp16, world_size, tmp_path, backend=None
    ):
        assert resumed_scale == last_scale < 2.0**16
        for key, value in want_weights.items():
            assert torch.equal(resumed[key], final[key])
            assert torch.isfinite(final[key]).all()
            if world_size == 1:  # halves of a batch overflow at other scales than the whole
                assert last_scale == scale
                assert [logged[0], *logged[2:]] == pytest.approx([want[0], *want[2:]], rel=1e-3)
                torch.testing.assert_close(final[key], value, rtol=1e-3, atol=1e-3)


def test_compiled_models_give_the_same_numbers(tmp_path: Path) -> None:
    def train(**changes: Any) -> Trainer:
        trainer = Trainer(Regression(), settings(tmp_path, max_steps=3, **changes), train_dataset=Points(12))
        trainer.train()
        return trainer

    plain, compiled = train(), train(torch_compile_backend="eager")
    assert compiled.args.torch_compile
    assert compiled.model._compiled_call_impl is not None
    assert losses(compiled) == pytest.approx(losses(plain))
    assert compiled.model.state_dict().keys() == plain.model.state_dict().keys()


def compiled_rank(rank: int, world_size: int, folder: Path) -> tuple[list[float], list[str]]:
    """Points have an entry that the forward does not take."""
    rows = [{**point, "number": number} for number, point in enumerate(Points(13))]
    args = settings(folder, max_steps=3, per_device_train_batch_size=4 // world_size, save_strategy="steps")
    trainer = Trainer(torch.compile(Regression(), backend="eager"), args, train_dataset=rows)
    trainer.train()
    assert trainer.model._compiled_call_impl is not None
    return losses(trainer), list(load_file(folder / "checkpoint-3" / "model.safetensors"))


def test_a_compiled_model_is_taken_as_what_was_compiled(tmp_path: Path) -> None:
    """torch.compile(model) hides what the forward takes, and names the state ``_orig_mod...``."""
    plain = Trainer(Regression(), settings(tmp_path, max_steps=3), train_dataset=Points(13))
    plain.train()
    for outcome in run_ranks(compiled_rank, 2, tmp_path):
        found, names = outcome
        assert found == pytest.approx(losses(plain), rel=1e-5)
        assert sorted(names) == sorted(plain.model.state_dict())


class Embedded(Tagger):
    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


def test_noise_has_its_bounds_and_goes_away() -> None:
    model, tokens = Embedded(), torch.arange(5).repeat(40, 6)
    plain = model.embedding(tokens).detach()
    with noisy_embeddings(model, 5.0):
        model.train()
        noise = model.embedding(tokens).detach() - plain
        model.eval()
        assert torch.equal(model.embedding(tokens), plain)
    bound = 5.0 / (30 * 4) ** 0.5
    assert 0.99 * bound < float(noise.abs().max()) <= bound * (1 + 1e-5)
    assert abs(float(noise.mean())) < 0.02 * bound
    assert float(noise.std()) == pytest.approx(bound / 3**0.5, rel=0.02)
    model.train()
    assert torch.equal(model.embedding(tokens), plain)


def test_noise_in_training_is_a_function_of_the_seed(tmp_path: Path) -> None:
    def train(**changes: Any) -> list[float]:
        values = {"max_steps": 3, **changes}
        trainer = Trainer(Embedded(), settings(tmp_path, **values), train_dataset=Sequences(12))
        trainer.train()
        return losses(trainer)

    assert train(neftune_noise_alpha=5.0) == train(neftune_noise_alpha=5.0) != train()
    wrong = Trainer(Regression(), settings(tmp_path, neftune_noise_alpha=5.0), train_dataset=Points(8))
    with pytest.raises(ArgumentError, match="get_input_embeddings"):
        wrong.train()


def deterministic(rank: int, world_size: int, folder: Path) -> tuple[bool, bool]:
    before = torch.are_deterministic_algorithms_enabled()
    Trainer(Regression(), settings(folder, full_determinism=True))
    return before, torch.are_deterministic_algorithms_enabled()


def test_full_determinism_is_switched_on(tmp_path: Path) -> None:
    assert run_ranks(deterministic, 1, tmp_path, backend=None) == [(False, True)]
