"""What helps to look into a run: NaNs by the name of their module, memory and operations in the metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ArgumentError, NonFiniteError
from paceline.train.reports import formatted
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.models import Points, Regression, settings


class Overflowing(nn.Module):
    """Its middle layer overflows in its third forward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(2, 4), layer, nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.last(self.middle(self.first(x))).squeeze(-1) - labels).square().mean()}


class Exploding(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value, self.calls = value, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.value if self.calls == 3 else x


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_the_first_module_that_overflows_is_named(tmp_path: Path, value: float) -> None:
    args = settings(tmp_path, max_steps=5, debug="underflow_overflow")
    trainer = Trainer(Overflowing(Exploding(value)), args, train_dataset=Points(64))
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    text = str(caught.value)
    assert text.startswith("rank 0, step 3: NaN or Inf in output of middle (Exploding)")
    assert "first (Linear): weight" in text
    assert not any(module._forward_hooks for module in trainer.model.modules())


def test_a_bad_weight_is_named_and_a_sound_model_trains(tmp_path: Path) -> None:
    model = Overflowing(nn.Identity())
    args = settings(tmp_path, max_steps=2, debug="underflow_overflow")
    assert Trainer(model, args, train_dataset=Points(64)).train().global_step == 2
    with torch.no_grad():
        model.last.bias.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"NaN or Inf in bias, output of last \(Linear\)"):
        Trainer(model, args, train_dataset=Points(64)).train()


def test_without_debug_nothing_is_watched(tmp_path: Path) -> None:
    seen = []

    class Looking(Regression):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            seen.append(any(module._forward_hooks for module in self.modules()))
            return super().forward(x, labels)

    Trainer(Looking(), settings(tmp_path, max_steps=1), train_dataset=Points(8)).train()
    assert seen == [False]


def test_other_debug_modes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="tpu_metrics_debug"):
        settings(tmp_path, debug="tpu_metrics_debug")
    assert settings(tmp_path, debug="underflow_overflow").debug == ["underflow_overflow"]


class Holding(Regression):
    """Holds 64 MB for the length of a forward, and keeps as much at its first."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        held = [torch.ones(2**24) for _ in range(3)]
        self.kept = self.kept if self.kept is not None else held[0]
        held[1].sum()
        return super().forward(x, labels)


def test_metrics_tell_memory(tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    args = settings(tmp_path, max_steps=2, skip_memory_metrics=False)
    trainer = Trainer(Holding(), args, train_dataset=Points(64), eval_dataset=Points(8))
    metrics = trainer.train().metrics
    names = {f"{stage}_mem_cpu_{kind}_delta" for stage in ("init", "train") for kind in ("alloc", "peaked")}
    assert names | {"before_init_mem_cpu"} == {name for name in metrics if "_mem_" in name}
    assert metrics["train_mem_cpu_alloc_delta"] > 2**25
    assert metrics["before_init_mem_cpu"] > 2**25
    evaluated = trainer.evaluate()
    assert evaluated["eval_mem_cpu_peaked_delta"] > 2**25
    assert "init_mem_cpu_alloc_delta" not in evaluated
    assert "test_mem_cpu_alloc_delta" in trainer.predict(Points(8)).metrics
    assert formatted({"train_mem_cpu_alloc_delta": 5 * 2**20, "total_flos": 2.0**31}) == {
        "train_mem_cpu_alloc_delta": "5MB",
        "total_flos": "2GF",
    }


def test_by_default_they_do_not(tmp_path: Path) -> None:
    trainer = Trainer(Regression(), settings(tmp_path, max_steps=1), train_dataset=Points(8))
    assert not [name for name in trainer.train().metrics if "_mem_" in name]


def count_operations(rank: int, world_size: int, folder: Path) -> float:
    import transformers

    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    model = transformers.BertForSequenceClassification(config)
    data = [{"input_ids": torch.arange(6), "labels": torch.tensor(index % 2)} for index in range(10)]
    args = settings(folder, num_train_epochs=1, max_steps=-1, per_device_train_batch_size=8 // world_size)
    trainer = Trainer(model, args, train_dataset=data)
    metrics = trainer.train().metrics
    assert metrics["total_flos"] == trainer.state.total_flos
    return float(trainer.state.total_flos) / model.num_parameters(exclude_embeddings=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_total_flos_are_six_for_each_token_and_weight(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("transformers")
    assert run_ranks(count_operations, ranks, tmp_path) == [6.0 * 6 * 10] * ranks
