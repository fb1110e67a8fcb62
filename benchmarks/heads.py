"""Losses and gradient norms of one global batch, divided among ranks and micro-batches in several ways.

    python benchmarks/heads.py                                  12 heads, both Trainers
    python benchmarks/heads.py --heads GPT2LMHeadModel LlamaForCausalLM --trainers paceline

Each head is tiny and random, in float32 without dropout, and trains 5 steps of SGD on 8 sequences
a step, whose numbers of labels that count differ widely. The layouts are (ranks,
gradient_accumulation_steps) = (1, 1), (2, 1), (1, 2), (2, 2), (4, 1). A cell is the largest relative
difference of any loss or gradient norm from that Trainer's own (1, 1); the last column is that of
the two Trainers' (1, 1) from each other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))
STEPS, GLOBAL_BATCH, LENGTH, VOCABULARY = 5, 8, 12, 40
TRAINERS = ("paceline", "transformers")

_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}

# Head -> its configuration's class and values, and what its labels are.
HEADS: dict[str, tuple[str, dict[str, Any], str]] = {
    "GPT2LMHeadModel": (
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 32,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        "tokens",
    ),
    "LlamaForCausalLM": ("LlamaConfig", _LLAMA, "tokens"),
    "ModernBertForMaskedLM": (
        "ModernBertConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
        "tokens",
    ),
    "ViTForImageClassification": (
        "ViTConfig",
        {
            "image_size": 8,
            "patch_size": 4,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "hidden_dropout_prob": 0.0,
            "num_labels": 3,
        },
        "image",
    ),
    "BertForMaskedLM": ("BertConfig", _BERT, "tokens"),
    "BertForSequenceClassification": ("BertConfig", _BERT, "class"),
    "BertForTokenClassification": ("BertConfig", {**_BERT, "num_labels": 3}, "tags"),
    "RobertaForMaskedLM": (
        "RobertaConfig",
        {**_BERT, "max_position_embeddings": 32, "pad_token_id": 0},
        "tokens",
    ),
    "T5ForConditionalGeneration": (
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 16,
            "num_layers": 2,
            "num_heads": 2,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
        "tokens",
    ),
    "BartForConditionalGeneration": (
        "BartConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 16,
            "decoder_ffn_dim": 16,
            "max_position_embeddings": 32,
            "dropout": 0.0,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": None,
        },
        "tokens",
    ),
    "LlamaForSequenceClassification": ("LlamaConfig", {**_LLAMA, "num_labels": 2}, "class"),
    "DistilBertForSequenceClassification": (
        "DistilBertConfig",
        {
            "vocab_size": VOCABULARY,
            "dim": 16,
            "hidden_dim": 16,
            "n_layers": 2,
            "n_heads": 2,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "seq_classif_dropout": 0.0,
        },
        "class",
    ),
}


class Samples(torch.utils.data.Dataset[Any]):
    """Random sequences or images; of tokens, labels after the first few of each sample do not count."""

    def __init__(self, kind: str) -> None:
        self.kind, size = kind, STEPS * GLOBAL_BATCH
        generator = torch.Generator().manual_seed(11)
        self.tokens = torch.randint(3, VOCABULARY, (size, LENGTH), generator=generator)
        self.images = torch.randn(size, 3, 8, 8, generator=generator)
        self.labels = self.tokens % 3 if kind == "tags" else self.tokens.clone()
        for index in range(size):
            self.labels[index, 2 + (7 * index) % (LENGTH - 2) :] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.kind == "image":
            return {"pixel_values": self.images[index], "labels": index % 3}
        if self.kind == "class":
            return {"input_ids": self.tokens[index], "labels": index % 2}
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def make_model(name: str) -> Any:
    """A tiny random model with this head."""
    import transformers

    config, values, _ = HEADS[name]
    torch.manual_seed(1)
    return getattr(transformers, name)(getattr(transformers, config)(**values))


def train(name: str, trainer: str, ranks: int, accumulation: int, folder: str) -> list[float]:
    """The losses and gradient norms of the steps; called in every rank."""
    library = __import__(trainer)
    args = library.TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=GLOBAL_BATCH // ranks // accumulation,
        gradient_accumulation_steps=accumulation,
        train_sampling_strategy="sequential",
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    made = library.Trainer(make_model(name), args, train_dataset=Samples(HEADS[name][2]))
    for callback in list(made.callback_handler.callbacks):
        if type(callback).__name__ == "PrinterCallback":
            made.remove_callback(callback)
    made.train()
    logs = [entry for entry in made.state.log_history if "loss" in entry]
    return [float(entry[key]) for entry in logs for key in ("loss", "grad_norm")]


def rank_main(
    rank: int, options: argparse.Namespace, trainer: str, layout: tuple[int, int], out: str
) -> None:
    """One rank: all heads in one layout."""
    ranks, accumulation = layout
    torch.set_num_threads(1)
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(options.port),
        }
    )
    found = {name: train(name, trainer, ranks, accumulation, out) for name in options.heads}
    if rank == 0:
        Path(out, "found.json").write_text(json.dumps(found))


def run(options: argparse.Namespace, trainer: str, layout: tuple[int, int]) -> dict[str, list[float]]:
    """Losses and norms of every head in one layout."""
    options.port = free_port()
    with tempfile.TemporaryDirectory(prefix="heads-") as out:
        mp.spawn(rank_main, args=(options, trainer, layout, out), nprocs=layout[0])
        found: dict[str, list[float]] = json.loads(Path(out, "found.json").read_text())
        return found


def free_port() -> int:
    """A TCP port of the loopback address that is free at this moment."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def difference(values: list[float], others: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(value - other) / abs(other) for value, other in zip(values, others, strict=True))


def main(arguments: list[str]) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    options = parser.parse_args(arguments)

    @cache
    def found(trainer: str, layout: tuple[int, int]) -> dict[str, list[float]]:
        return run(options, trainer, layout)

    columns = [f"{trainer} {layout}" for trainer in options.trainers for layout in LAYOUTS[1:]]
    print(f"{'head':36}" + "".join(f"{column:>21}" for column in columns) + f"{'between the two':>18}")
    for name in options.heads:
        cells = [
            difference(found(trainer, layout)[name], found(trainer, LAYOUTS[0])[name])
            for trainer in options.trainers
            for layout in LAYOUTS[1:]
        ]
        line = f"{name:36}" + "".join(f"{cell:>21.1e}" for cell in cells)
        if len(options.trainers) == 2:
            first, second = (found(trainer, LAYOUTS[0])[name] for trainer in options.trainers)
            line += f"{difference(first, second):>18.1e}"
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
