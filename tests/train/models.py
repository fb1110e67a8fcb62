"""Small data sets and models for the tests of the Trainer, and the settings they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.train.arguments import TrainingArguments


class Points(Dataset[Any]):
    """Points in the plane with a number to predict; `noise` is drawn anew whenever a point is read."""

    def __init__(self, size: int, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(size, 2, generator=generator)
        self.y = self.x[:, 0] * 2 - self.x[:, 1] + 0.1 * torch.randn(size, generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index] + self.noise * torch.rand(2), "labels": self.y[index]}


class Regression(nn.Module):
    """A two-layer network with a mean squared error."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.layers = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        prediction = self.layers(x).squeeze(-1)
        outputs = {"logits": prediction}
        return outputs if labels is None else {"loss": (prediction - labels).square().mean(), **outputs}


class Sequences(Dataset[Any]):
    """Token sequences with very different numbers of labels that count, among them none at all."""

    LENGTH = 6

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(9)
        self.tokens = torch.randint(0, 5, (size, self.LENGTH), generator=generator)
        self.labels = torch.randint(0, 5, (size, self.LENGTH), generator=generator)
        for index in range(size):
            self.labels[index, (index * 5) % (self.LENGTH + 1) :] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[index], "labels": self.labels[index]}


class Tagger(nn.Module):
    """Predicts a class for each token; the loss is the mean over the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embedding(tokens))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class CountingTagger(Tagger):
    """The same with a loss that is divided by the number of items it is told."""

    def forward(  # type: ignore[override]
        self, tokens: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None
    ) -> dict[str, Tensor]:
        logits = self.head(self.embedding(tokens))
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        items = labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": loss / items, "logits": logits}


class KeywordTagger(Tagger):
    """The same head with ``**kwargs`` that swallow anything and use nothing."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
        return super().forward(tokens, labels)


def settings(folder: Path | str, **changes: Any) -> TrainingArguments:
    """Arguments of a quiet run with plain SGD on the CPU."""
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "learning_rate": 0.1,
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": 4,
        "seed": 7,
        "ddp_timeout": 30,
    }
    return TrainingArguments(**{**values, **changes})


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def losses(trainer: Any) -> list[float]:
    """The logged training losses."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
