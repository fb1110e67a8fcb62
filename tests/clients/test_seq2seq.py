"""Seq2SeqTrainer generates in evaluation, the same on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import ArgumentError
from paceline.train.seq2seq import Seq2SeqTrainer, Seq2SeqTrainingArguments
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")

PADDING = 0


class Pairs(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.arange(3, 7) + index, "labels": torch.arange(4, 8) + index}


def arguments(folder: Path, **changes: Any) -> Seq2SeqTrainingArguments:
    values = {
        "output_dir": str(folder), "use_cpu": True, "disable_tqdm": True, "save_strategy": "no",
        "predict_with_generate": True, "per_device_eval_batch_size": 2, "ddp_timeout": 30, "logging_steps": 1,
    }  # fmt: skip
    return Seq2SeqTrainingArguments(**{**values, **changes})


def make(folder: Path, metrics: Any = None, **changes: Any) -> Seq2SeqTrainer:
    torch.manual_seed(1)
    config = transformers.T5Config(
        vocab_size=20, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2, decoder_start_token_id=PADDING,
        pad_token_id=PADDING, eos_token_id=1, dropout_rate=0.0,
    )  # fmt: skip
    return Seq2SeqTrainer(
        transformers.T5ForConditionalGeneration(config), arguments(folder, **changes), train_dataset=Pairs(),
        eval_dataset=Pairs(), compute_metrics=metrics,
    )  # fmt: skip


def generate_and_evaluate(rank: int, world_size: int, folder: Path) -> Any:
    shapes = []

    def metrics(pair: Any) -> dict[str, float]:
        shapes.append((pair.predictions.shape, pair.label_ids.shape))
        return {"sum": float(pair.predictions.sum())}

    trainer = make(folder, metrics, max_steps=2, per_device_train_batch_size=4 // world_size)
    trainer.train()
    found = trainer.evaluate(max_length=9, num_beams=2)
    predicted = trainer.predict(Pairs(), max_length=9, num_beams=2)
    return found["eval_loss"], found["eval_sum"], shapes, predicted.predictions.tolist()


def test_generates_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    ((loss, total, shapes, tokens),) = run_ranks(generate_and_evaluate, 1, tmp_path, backend=None, timeout=90)
    assert shapes[0] == ((7, 9), (7, 9))
    for rank, report in enumerate(run_ranks(generate_and_evaluate, 2, tmp_path, backend=None, timeout=90)):
        assert report[0] == pytest.approx(loss, rel=1e-4)
        assert report[1] == total
        assert report[3] == tokens
        assert bool(report[2]) is (rank == 0)


def test_tokens_are_those_of_generate(tmp_path: Path) -> None:
    trainer = make(tmp_path, lambda pair: {}, generation_max_length=6, generation_num_beams=1)
    inputs = {name: torch.stack([Pairs()[i][name] for i in range(2)]) for name in ("input_ids", "labels")}
    trainer.evaluate()
    _, tokens, labels = trainer.prediction_step(trainer.model, inputs, prediction_loss_only=False)
    want = trainer.model.generate(input_ids=inputs["input_ids"], max_length=6)  # type: ignore[operator]
    assert torch.equal(tokens[:, : want.shape[1]], want)
    assert tokens.shape == labels.shape == (2, 6)
    assert (labels[:, 4:] == PADDING).all()


def test_a_generation_config_takes_the_models_place(tmp_path: Path) -> None:
    config = transformers.GenerationConfig(
        max_new_tokens=3, pad_token_id=PADDING, decoder_start_token_id=PADDING
    )
    config.save_pretrained(tmp_path / "config")
    for given in (config, str(tmp_path / "config"), str(tmp_path / "config" / "generation_config.json")):
        trainer = make(tmp_path, lambda pair: {}, generation_config=given)
        assert trainer.model.generation_config.max_new_tokens == 3  # type: ignore[union-attr]
        assert trainer.predict(Pairs()).predictions.shape == (7, 4)
    assert '"max_new_tokens": 3' in make(tmp_path, generation_config=config).args.to_json_string()
    with pytest.raises(ArgumentError, match="generation_config"):
        make(tmp_path, generation_config=transformers.GenerationConfig(temperature=0.5, do_sample=False))


def test_without_generating_it_is_a_trainer(tmp_path: Path) -> None:
    trainer = make(tmp_path, predict_with_generate=False)
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.predict(Pairs()).predictions[0].shape == (7, 4, 20)


def test_the_sorting_sampler_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="group_by_length"):
        arguments(tmp_path, sortish_sampler=True)


def test_the_command_line_has_the_further_fields(tmp_path: Path) -> None:
    parser = transformers.HfArgumentParser((Seq2SeqTrainingArguments,))
    (args,) = parser.parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--use_cpu", "--predict_with_generate", "--generation_num_beams", "3"]
    )
    assert (args.predict_with_generate, args.generation_num_beams) == (True, 3)
