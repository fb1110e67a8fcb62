"""Evaluation on 1, 2 and 4 ranks: each sample once, in order, with one rank's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.train.predictions import join, to_arrays
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.models import Points, Regression, Sequences, Tagger, settings


def evaluate_points(rank: int, world_size: int, folder: Path, size: int, **more: Any) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def metrics(prediction: Any) -> dict[str, Any]:
        seen["labels"] = prediction.label_ids.tolist()
        predictions, labels = prediction
        return {"error": np.abs(predictions - labels).mean()}

    args = settings(folder, per_device_eval_batch_size=2)
    trainer = Trainer(Regression(), args, eval_dataset=Points(size), compute_metrics=metrics)
    results = trainer.evaluate()
    output = trainer.predict(Points(size))
    return {
        "seen": seen.get("labels"),
        "metrics": results,
        "predictions": output.predictions,
        "test": output.metrics,
    }


@pytest.mark.parametrize(("world_size", "size"), [(1, 7), (2, 7), (4, 7), (4, 3)])
def test_each_sample_counts_once(tmp_path: Path, world_size: int, size: int) -> None:
    points, model = Points(size), Regression()
    with torch.no_grad():
        want = model(points.x, points.y)
    error = float((want["logits"] - points.y).abs().mean())
    reports = run_ranks(evaluate_points, world_size, tmp_path, size, backend=None)
    assert reports[0]["seen"] == points.y.tolist()
    for report in reports:
        assert report["metrics"]["eval_loss"] == pytest.approx(float(want["loss"]), rel=1e-6)
        assert report["metrics"]["eval_error"] == pytest.approx(error, rel=1e-6)
        assert report["test"]["test_error"] == pytest.approx(error, rel=1e-6)
        np.testing.assert_allclose(report["predictions"], want["logits"].numpy(), rtol=1e-6)


def evaluate_tokens(rank: int, world_size: int, folder: Path) -> float:
    trainer = Trainer(Tagger(), settings(folder, per_device_eval_batch_size=2), eval_dataset=Sequences(15))
    return trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_token_losses_are_means_over_tokens(tmp_path: Path, world_size: int) -> None:
    data = Sequences(15)
    want = Tagger()(data.tokens, data.labels)["loss"].item()
    assert (
        run_ranks(evaluate_tokens, world_size, tmp_path, backend=None) == [pytest.approx(want)] * world_size
    )


def fail_in_metrics(rank: int, world_size: int, folder: Path) -> str:
    def metrics(prediction: Any) -> dict[str, float]:
        raise ZeroDivisionError("no positives")

    trainer = Trainer(Regression(), settings(folder), eval_dataset=Points(4), compute_metrics=metrics)
    try:
        trainer.evaluate()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def test_an_error_in_compute_metrics_is_everyones(tmp_path: Path) -> None:
    first, second = run_ranks(fail_in_metrics, 2, tmp_path, backend=None)
    assert first == "ZeroDivisionError: no positives"
    assert second.startswith(
        "PeerFailedError: rank 1 waited for rank 0 (compute_metrics), which raised ZeroDiv"
    )


def test_several_sets_have_names(tmp_path: Path) -> None:
    sets = {"easy": Points(4), "hard": Points(6)}
    trainer = Trainer(Regression(), settings(tmp_path), eval_dataset=sets)
    metrics = trainer.evaluate()
    assert {"eval_easy_loss", "eval_hard_loss"} <= set(metrics)
    assert "eval_easy_loss" not in trainer.evaluate("hard", metric_key_prefix="again")


def test_accumulation_steps_and_preprocessing_change_nothing_but_memory(tmp_path: Path) -> None:
    kept: list[int] = []

    def metrics(prediction: Any) -> dict[str, float]:
        kept.append(prediction.predictions.shape)
        return {"mean": prediction.predictions.mean()}

    values = []
    for steps in (None, 1, 3):
        args = settings(tmp_path, per_device_eval_batch_size=2, eval_accumulation_steps=steps)
        trainer = Trainer(
            Regression(),
            args,
            eval_dataset=Points(9),
            compute_metrics=metrics,
            preprocess_logits_for_metrics=lambda logits, labels: logits.round(),
        )
        values.append(trainer.evaluate()["eval_mean"])
    assert values[0] == values[1] == values[2]
    assert kept == [(9,)] * 3


def test_joining_pads_sequences_and_keeps_structure() -> None:
    first = to_arrays((torch.ones(2, 3), {"a": torch.zeros(2, dtype=torch.bfloat16)}))
    second = to_arrays((torch.ones(1, 4), {"a": torch.zeros(1, dtype=torch.bfloat16)}))
    long, named = join([first, second])
    assert long.tolist() == [[1, 1, 1, -100], [1, 1, 1, -100], [1, 1, 1, 1]]
    assert named["a"].shape == (3,)


class Seen:
    """A compute_metrics that adds up over its calls, and notes what it was given."""

    def __init__(self) -> None:
        self.labels: list[float] = []
        self.inputs: list[Any] = []
        self.losses: list[float] = []
        self.last: list[bool] = []

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, float]:
        self.labels += prediction.label_ids.tolist()
        self.inputs += prediction.inputs.tolist()
        self.losses += prediction.losses.tolist()
        self.last.append(compute_result)
        assert len(prediction) == 4
        return {"sum": sum(self.labels)} if compute_result else {}


def evaluate_with_more(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, by_batch in [("at once", False), ("by batch", True)]:
        seen = Seen()
        args = settings(
            folder,
            per_device_eval_batch_size=2,
            include_for_metrics=["inputs", "loss"],
            batch_eval_metrics=by_batch,
        )
        model = Regression()
        model.main_input_name = "x"  # type: ignore[assignment]
        trainer = Trainer(model, args, eval_dataset=Points(7), compute_metrics=seen)
        metrics = trainer.evaluate()
        found[name] = metrics, *(list(each) for each in (seen.labels, seen.inputs, seen.losses, seen.last))
        found[name + ", predict"] = trainer.predict(Points(7)).label_ids
    args = settings(folder, per_device_eval_batch_size=2, eval_do_concat_batches=False)
    found["apart"] = Trainer(Regression(), args).predict(Points(7)).label_ids
    return found


def test_metrics_may_get_more_and_come_batch_by_batch(tmp_path: Path) -> None:
    points = Points(7)
    first, second = run_ranks(evaluate_with_more, 2, tmp_path, backend=None)
    for found in (first, second):
        for name in ("at once", "by batch"):
            assert found[name][0]["eval_sum"] == pytest.approx(float(points.y.sum()), rel=1e-6)
            assert found[name + ", predict"].tolist() == points.y.tolist()
        assert [each.tolist() for each in found["apart"]] == [
            points.y[indices].tolist() for indices in ([0, 1], [2, 3], [4, 5], [6])
        ]
    _, labels, inputs, losses, last = first["at once"]
    assert labels == points.y.tolist()
    assert inputs == points.x.tolist()
    assert last == [True]
    assert losses[0] == losses[1] == pytest.approx(Regression()(points.x[:2], points.y[:2])["loss"].item())
    assert sorted(first["by batch"][1]) == sorted(points.y.tolist())
    assert first["by batch"][4] == [False, True]  # two rounds of two ranks
    assert second["by batch"][1] == []


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_full_evaluation_in_half_precision_leaves_the_weights_alone(tmp_path: Path, name: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    seen: list[torch.dtype] = []

    class Noting(Regression):
        def forward(self, x: Any, labels: Any = None) -> Any:
            seen.append(self.layers[0].weight.dtype)  # type: ignore[union-attr, arg-type]
            return super().forward(x.to(seen[-1]), labels)

    model, data = Noting(), Points(6)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    args = settings(tmp_path, **{f"{name}_full_eval": True}, eval_strategy="steps", eval_steps=1, max_steps=1)
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data)
    loss = trainer.evaluate()["eval_loss"]
    assert seen == [dtype]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        want = Regression().to(dtype)(data.x.to(dtype), data.y)["loss"]
    assert loss == pytest.approx(float(want), rel=1e-6)
    trainer.train()
    assert set(seen[1:]) == {torch.float32}  # as long as it trains, in the precision of training
