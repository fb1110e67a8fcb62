"""What overrides and loss functions are given and may return: the step's mean in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.train.orders import EpochOrder
from paceline.train.smoothing import LabelSmoother
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.models import CountingTagger, KeywordTagger, Sequences, Tagger, losses, settings, weights

STEPS, GLOBAL_BATCH = 3, 8


def summed(outputs: Any, labels: Tensor) -> Tensor:
    logits = outputs["logits"]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class SumOverCount(Trainer):
    """Divides its sum by what it is given."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        own = inputs["labels"].ne(-100).sum()
        loss = summed(outputs, inputs["labels"]) / (own if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class TimesRanks(SumOverCount):
    """Multiplies by the number of ranks as well, as Hugging Face's own compute_loss does."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if num_items_in_batch is None:
            return found
        ranks = self.accelerator.num_processes
        return (found[0] * ranks, found[1]) if return_outputs else found * ranks


class OwnMean(Trainer):
    """Takes the count, and returns a mean that has nothing to do with it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        assert num_items_in_batch is None or num_items_in_batch.shape == ()
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class PassesOn(Trainer):
    """Leaves everything to the base class."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


class OwnTrainingStep(Trainer):
    """A training step written for Hugging Face's."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach() * self.loss_weight


class Listening(Trainer):
    """Notes what get_batch_samples gives, and halves no batch."""

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.counts = [*getattr(self, "counts", []), int(items)]  # type: ignore[arg-type]
        assert len(batches) == num_batches
        return batches, items


def mean_func(outputs: Any, labels: Tensor) -> Tensor:
    return summed(outputs, labels) / labels.ne(-100).sum()


def counting_func(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
    return summed(outputs, labels) / num_items_in_batch


FORMS: dict[str, tuple[type[Trainer], type[nn.Module], dict[str, Any]]] = {
    "sum over count": (SumOverCount, Tagger, {}),
    "sum over count, keywords": (SumOverCount, KeywordTagger, {}),
    "times ranks": (TimesRanks, KeywordTagger, {}),
    "own mean": (OwnMean, KeywordTagger, {}),
    "passes on, mean": (PassesOn, KeywordTagger, {}),
    "passes on, counting": (PassesOn, CountingTagger, {}),
    "own training step": (OwnTrainingStep, CountingTagger, {}),
    "listening": (Listening, KeywordTagger, {}),
    "mean function": (Trainer, Tagger, {"compute_loss_func": mean_func}),
    "counting function": (Trainer, Tagger, {"compute_loss_func": counting_func}),
}


def train_forms(rank: int, world_size: int, folder: Path, accumulation: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (trainer_class, model_class, given) in FORMS.items():
        args = settings(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=GLOBAL_BATCH // world_size // accumulation,
            gradient_accumulation_steps=accumulation,
        )
        data = Sequences(21)
        trainer = trainer_class(model_class(), args, train_dataset=data, eval_dataset=data, **given)
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        found[name] = losses(trainer), weights(trainer.model), evaluated, getattr(trainer, "counts", None)
    smoothed = settings(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=GLOBAL_BATCH // world_size // accumulation,
        gradient_accumulation_steps=accumulation,
        label_smoothing_factor=0.2,
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    )
    trainer = Trainer(CountingTagger(), smoothed, train_dataset=Sequences(21))
    trainer.train()
    found["smoothed"] = losses(trainer), weights(trainer.model), 0.0, None
    return found


def alone(epsilon: float = 0.0) -> tuple[list[float], dict[str, Tensor], float, list[int]]:
    """The same as a plain loop over joined batches."""
    model, data = Tagger(), Sequences(21)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order, found, counts = list(EpochOrder(21, seed=7)), [], []
    for step in range(STEPS):
        chosen = order[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]
        logits = model.head(model.embedding(data.tokens[chosen])).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, data.labels[chosen].flatten(), label_smoothing=epsilon)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        counts.append(int(data.labels[chosen].ne(-100).sum()))
    return found, weights(model), float(model(data.tokens, data.labels)["loss"].detach()), counts


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 2), (2, 1), (2, 2)])
def test_every_form_gives_the_mean_over_the_step(tmp_path: Path, world_size: int, accumulation: int) -> None:
    want_losses, want_weights, want_evaluated, want_counts = alone()
    smooth_losses, smooth_weights, _, _ = alone(epsilon=0.2)
    for report in run_ranks(train_forms, world_size, tmp_path, accumulation, backend=None, timeout=100):
        got, got_weights, _, _ = report.pop("smoothed")
        assert got == pytest.approx(smooth_losses, rel=1e-5)
        for key, value in smooth_weights.items():
            torch.testing.assert_close(got_weights[key], value, rtol=1e-5, atol=1e-6)
        assert report["listening"][3] == want_counts
        for name, (logged, final, evaluated, _) in report.items():
            assert logged == pytest.approx(want_losses, rel=1e-5), name
            assert evaluated == pytest.approx(want_evaluated, rel=1e-5), name
            for key, value in want_weights.items():
                torch.testing.assert_close(final[key], value, rtol=1e-5, atol=1e-6, msg=name)


def test_smoothing_equals_transformers() -> None:
    theirs = pytest.importorskip("transformers.trainer_pt_utils").LabelSmoother(epsilon=0.3)
    logits, labels = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    labels[1, 2:] = -100
    for shift in (False, True):
        for count in (None, torch.tensor(11)):
            want = theirs({"logits": logits}, labels, shift_labels=shift, num_items_in_batch=count)
            got = LabelSmoother(0.3)({"logits": logits}, labels, shift, count)
            torch.testing.assert_close(got, want)
