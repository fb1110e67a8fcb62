"""Train a small character transformer on the text of Python's own help topics.

The same global batch gives the same losses, however many ranks share it:

    python examples/charlm.py --per_device_train_batch_size 16
    paceline launch --num_processes 2 examples/charlm.py --per_device_train_batch_size 8
    paceline launch --num_processes 4 examples/charlm.py --per_device_train_batch_size 4
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import Dataset

from paceline import Trainer, TrainingArguments

WINDOW = 64


class Text(Dataset):
    """Windows of a text, as character numbers."""

    def __init__(self, text):
        self.characters = sorted(set(text))
        number = {character: index for index, character in enumerate(self.characters)}
        self.numbers = torch.tensor([number[character] for character in text])

    def __len__(self):
        return (len(self.numbers) - 1) // WINDOW

    def __getitem__(self, index):
        window = self.numbers[index * WINDOW : (index + 1) * WINDOW + 1]
        return {"tokens": window[:-1], "labels": window[1:]}


class CharacterModel(nn.Module):
    """A transformer that predicts each next character."""

    def __init__(self, vocabulary, width=64, heads=4, layers=2):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(0.02 * torch.randn(WINDOW, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens, labels=None):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        hidden = self.layers(self.token(tokens) + self.place, mask=mask, is_causal=True)
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="runs/charlm")
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--logging_steps", type=int, default=10)
    flags = vars(parser.parse_args())
    flags |= {"disable_tqdm": True, "save_strategy": "no"}
    args = TrainingArguments(learning_rate=3e-3, warmup_steps=10, **flags)

    torch.manual_seed(args.seed)
    text = Text("\n".join(topics[name] for name in sorted(topics)))
    trainer = Trainer(CharacterModel(len(text.characters)), args, train_dataset=text)
    trainer.train()
    if trainer.is_world_process_zero():
        losses = [f"{entry['loss']:.6f}" for entry in trainer.state.log_history if "loss" in entry]
        print(f"{args.world_size} ranks, loss every {args.logging_steps} steps: {' '.join(losses)}")


if __name__ == "__main__":
    main()
