"""trainer.accelerator and the other names that Hugging Face's subclasses read and call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import ArgumentError
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.models import Points, Regression, Sequences, Tagger, losses, settings


def use_accelerator(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    trainer = Trainer(Regression(), settings(folder), train_dataset=Points(8))
    accelerator = trainer.accelerator
    own = torch.tensor([float(rank)])
    ragged = torch.full((2, rank + 1), rank)
    accelerator.wait_for_everyone()
    return {
        "place": (accelerator.process_index, accelerator.num_processes, accelerator.is_main_process),
        "kind": (accelerator.distributed_type, accelerator.device.type, accelerator.mixed_precision),
        "gathered": accelerator.gather(own).tolist(),
        "scalars": accelerator.gather(torch.tensor(rank)).tolist(),
        "uneven": accelerator.gather(torch.full((rank + 1, 2), rank)).tolist(),
        "nested": accelerator.gather_for_metrics({"a": (own, own + 1)})["a"][1].tolist(),
        "objects": accelerator.gather_for_metrics([f"rank {rank}"]),
        "mean": accelerator.reduce(own, "mean").tolist(),
        "padded": accelerator.pad_across_processes(ragged, dim=1, pad_index=-1).tolist(),
        "unwrapped": accelerator.unwrap_model(trainer.wrap_model()) is trainer.model,
        "prepared": accelerator.prepare(trainer.model, 3) == (trainer.model, 3),
        "total": trainer.get_total_train_batch_size(trainer.args),
    }


def test_ranks_exchange_values(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(use_accelerator, 2, tmp_path, backend=None)):
        assert found["place"] == (rank, 2, rank == 0)
        assert found["kind"] == ("MULTI_CPU", "cpu", "no")
        assert found["gathered"] == found["scalars"] == [0, 1]
        assert found["uneven"] == [[0, 0], [1, 1], [1, 1]]
        assert found["nested"] == [1, 2]
        assert found["objects"] == ["rank 0", "rank 1"]
        assert found["mean"] == [0.5]
        assert found["padded"] == ([[0, -1]] * 2 if rank == 0 else [[1, 1]] * 2)
        assert found["unwrapped"]
        assert found["prepared"]
        assert found["total"] == 8


def test_what_is_not_served_is_said_to_be_off(tmp_path: Path) -> None:
    trainer = Trainer(Regression(), settings(tmp_path))
    assert not trainer.is_deepspeed_enabled
    assert not trainer.is_fsdp_enabled
    assert trainer.accelerator.parallelism_config is None
    assert trainer.get_tp_size() == trainer.get_cp_size() == trainer.get_sp_size() == 1
    for method in (trainer.push_to_hub, trainer.hyperparameter_search):
        with pytest.raises(ArgumentError, match="not supported"):
            method()


def test_a_subclass_may_choose_the_entries_of_samples(tmp_path: Path) -> None:
    class Own(Trainer):
        def _set_signature_columns_if_needed(self) -> None:
            if self._signature_columns is None:
                self._signature_columns = ["x", "labels", "weight"]

    data = [{"x": torch.zeros(2), "labels": 1.0, "weight": 2.0, "other": 3.0}] * 4
    seen: list[Any] = []

    class Noting(Regression):
        def forward(self, x: Any, labels: Any = None, **more: Any) -> Any:
            seen.append(sorted(more))
            return super().forward(x, labels)

    Own(Noting(), settings(tmp_path, max_steps=1), train_dataset=data).train()
    assert seen == [["weight"]]


def count_tokens(rank: int, world_size: int, folder: Path) -> Any:
    found = []
    for kind in ("all", "non_padding"):
        args = settings(
            folder,
            include_num_input_tokens_seen=kind,
            per_device_train_batch_size=8 // world_size,
            num_train_epochs=1,
            save_strategy="steps",
            save_steps=2,
        )
        model = Tagger()
        model.main_input_name = "tokens"  # type: ignore[assignment]
        trainer = Trainer(model, args, train_dataset=Sequences(21))
        trainer.processing_class = type("Tokenizer", (), {"pad_token_id": 0})()
        speed = trainer.train().metrics["train_tokens_per_second"]
        again = Trainer(model, args, train_dataset=Sequences(21))
        again.processing_class = trainer.processing_class
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        found.append((trainer.state.num_input_tokens_seen, again.state.num_input_tokens_seen, speed > 0))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_tokens_are_counted_over_all_ranks_and_runs(tmp_path: Path, world_size: int) -> None:
    tokens = Sequences(21).tokens
    for found in run_ranks(count_tokens, world_size, tmp_path, backend=None):
        total, unpadded = tokens.numel(), int(tokens.ne(0).sum())
        assert found == [(total, total, True), (unpadded, unpadded, True)]


def split_batches(rank: int, world_size: int, folder: Path) -> Any:
    config = {"split_batches": True}
    args = settings(folder, accelerator_config=config, per_device_train_batch_size=8, max_steps=3)
    trainer = Trainer(Regression(), args, train_dataset=Points(21))
    trainer.train()
    try:
        settings(folder, accelerator_config=config, per_device_train_batch_size=7)
    except ArgumentError as error:
        return losses(trainer), args.train_batch_size, str(error)
    return None


def test_batches_of_all_ranks_together(tmp_path: Path) -> None:
    plain = Trainer(
        Regression(),
        settings(tmp_path, per_device_train_batch_size=8, max_steps=3),
        train_dataset=Points(21),
    )
    plain.train()
    for logged, own, refused in run_ranks(split_batches, 2, tmp_path, backend=None):
        assert logged == pytest.approx(losses(plain), rel=1e-5)
        assert own == 4
        assert "per_device_train_batch_size to be a multiple of the 2 ranks" in refused


def test_ignoring_the_place_in_the_data_begins_with_the_epoch(tmp_path: Path) -> None:
    values = {"num_train_epochs": 1, "save_strategy": "steps", "save_steps": 2}
    first = Trainer(Regression(), settings(tmp_path, **values), train_dataset=Points(16))
    first.train()
    seen: list[float] = []

    class Noting(Regression):
        def forward(self, x: Any, labels: Any = None) -> Any:
            seen.extend(labels.tolist())
            return super().forward(x, labels)

    again = Trainer(Noting(), settings(tmp_path, **values, ignore_data_skip=True), train_dataset=Points(16))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    order = list(again._get_train_sampler())
    assert seen == Points(16).y[order[:8]].tolist()
    assert again.state.global_step == 4
