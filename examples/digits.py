"""Train a small network on 1,797 real handwritten digits, on any number of ranks.

    paceline launch --num_processes 2 examples/digits.py
    python examples/digits.py --per_device_train_batch_size 64       (one rank, the same losses)

Prints the accuracy on 360 digits it has not seen, and leaves in the output folder a
checkpoint, log.json and loss.png.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import Dataset

from paceline import Trainer, TrainingArguments


class Digits(Dataset):
    """Pictures of 8 x 8 pixels with their digit."""

    def __init__(self, images, digits):
        self.images = torch.tensor(images / 16.0, dtype=torch.float32).unsqueeze(1)
        self.digits = torch.tensor(digits)

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        return {"images": self.images[index], "labels": self.digits[index]}


class SmallCNN(nn.Module):
    """Two convolutions and a linear layer."""

    def __init__(self):
        super().__init__()
        first, second = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        self.features = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(64 * 4 * 4, 10)

    def forward(self, images, labels=None):
        logits = self.head(self.features(images).flatten(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def accuracy(prediction):
    """Share of digits that were read right."""
    return {"accuracy": float((np.argmax(prediction.predictions, axis=-1) == prediction.label_ids).mean())}


def keep_log(trainer, folder):
    """Write the log as JSON and as a picture."""
    pyplot.switch_backend("agg")
    history = trainer.state.log_history
    Path(folder, "log.json").write_text(json.dumps(history, indent=1))
    for name, label in (("loss", "training loss"), ("eval_loss", "loss on held-out digits")):
        points = [(entry["step"], entry[name]) for entry in history if name in entry]
        pyplot.plot(*zip(*points, strict=True), label=label)
    pyplot.yscale("log")
    pyplot.xlabel("step")
    pyplot.legend()
    pyplot.savefig(Path(folder, "loss.png"), dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="runs/digits")
    parser.add_argument("--num_train_epochs", type=float, default=8)
    parser.add_argument("--per_device_train_batch_size", type=int, default=32)
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint")
    flags = vars(parser.parse_args())
    resume = flags.pop("resume")

    flags |= {"eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 2}
    args = TrainingArguments(learning_rate=3e-3, logging_steps=10, **flags)
    torch.manual_seed(args.seed)
    data = load_digits()
    images, held_out_images, digits, held_out_digits = train_test_split(
        data.images, data.target, test_size=360, random_state=0
    )
    train_set, eval_set = Digits(images, digits), Digits(held_out_images, held_out_digits)
    trainer = Trainer(SmallCNN(), args, None, train_set, eval_set, compute_metrics=accuracy)
    trainer.train(resume_from_checkpoint=resume)
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        keep_log(trainer, args.output_dir)
        print(f"accuracy on held-out digits: {metrics['eval_accuracy']:.2%} (see {args.output_dir})")


if __name__ == "__main__":
    main()
