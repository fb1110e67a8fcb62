"""Models, tokenizers and checkpoints of transformers, where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.models import losses, settings

transformers = pytest.importorskip("transformers")

SMALL = {
    "GPT2LMHeadModel": (
        "GPT2Config",
        {
            "n_embd": 16,
            "n_layer": 1,
            "n_head": 2,
            "n_positions": 16,
            "resid_pdrop": 0,
            "embd_pdrop": 0,
            "attn_pdrop": 0,
        },
    ),
    "LlamaForCausalLM": (
        "LlamaConfig",
        {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        },
    ),
    "BertForMaskedLM": (
        "BertConfig",
        {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "hidden_dropout_prob": 0,
            "attention_probs_dropout_prob": 0,
        },
    ),
    "BertForSequenceClassification": (
        "BertConfig",
        {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "hidden_dropout_prob": 0,
            "attention_probs_dropout_prob": 0,
        },
    ),
}


def make(name: str) -> Any:
    config, values = SMALL[name]
    torch.manual_seed(1)
    return getattr(transformers, name)(getattr(transformers, config)(vocab_size=20, **values))


class Texts(torch.utils.data.Dataset[Any]):
    """Token sequences; the labels of each stop counting somewhere else."""

    def __init__(self, classes: bool) -> None:
        generator = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(0, 20, (21, 8), generator=generator)
        self.labels = self.tokens.clone()
        for index in range(21):
            self.labels[index, 2 + index % 6 :] = -100
        if classes:
            self.labels = torch.arange(21) % 2

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index], "unused": "text"}


def train_heads(rank: int, world_size: int, folder: Path, accumulation: int) -> dict[str, list[Any]]:
    results = {}
    for name in SMALL:
        args = settings(
            folder,
            max_steps=4,
            per_device_train_batch_size=8 // world_size // accumulation,
            gradient_accumulation_steps=accumulation,
            max_grad_norm=1.0,
        )
        trainer = Trainer(make(name), args, train_dataset=Texts("Sequence" in name))
        trainer.train()
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        results[name] = losses(trainer) + norms
    return results


@pytest.mark.slow
def test_heads_give_the_same_losses_and_norms_in_every_layout(tmp_path: Path) -> None:
    (want,) = run_ranks(train_heads, 1, tmp_path, 1, backend=None, timeout=90)
    for world_size, accumulation in [(2, 1), (1, 2), (2, 2)]:
        for report in run_ranks(train_heads, world_size, tmp_path, accumulation, backend=None, timeout=90):
            for name in SMALL:
                assert report[name] == pytest.approx(want[name], rel=2e-5), name


def test_a_checkpoint_loads_there_and_resumes_here(tmp_path: Path) -> None:
    values = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = Trainer(make("GPT2LMHeadModel"), settings(tmp_path, **values), train_dataset=Texts(False))
    whole.train()
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-4")
    for name, value in whole.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    again = Trainer(make("GPT2LMHeadModel"), settings(tmp_path, **values), train_dataset=Texts(False))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value)
    state = transformers.trainer_callback.TrainerState.load_from_json(
        str(tmp_path / "checkpoint-4" / "trainer_state.json")
    )
    assert state.global_step == 4


def test_a_checkpoint_of_theirs_resumes_here(tmp_path: Path) -> None:
    theirs_args = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=2,
        save_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        optim="adamw_torch",
    )
    theirs = transformers.Trainer(make("GPT2LMHeadModel"), theirs_args, train_dataset=Texts(False))
    theirs.train()
    ours = Trainer(
        make("GPT2LMHeadModel"),
        settings(tmp_path, max_steps=4, optim="adamw_torch"),
        train_dataset=Texts(False),
    )
    ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert ours.state.global_step == 4
    assert all(state["step"] == 4 for state in ours.optimizer.state.values())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_no_number(tmp_path: Path, use_reentrant: bool) -> None:
    def train(**changes: Any) -> list[float]:
        args = settings(tmp_path, max_steps=3, **changes)
        trainer = Trainer(make("GPT2LMHeadModel"), args, train_dataset=Texts(False))
        trainer.train()
        return losses(trainer)

    kwargs = {"use_reentrant": use_reentrant}
    want = train()
    assert train(gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs) == pytest.approx(want)


def test_a_tokenizer_pads_and_is_saved(tmp_path: Path) -> None:
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "a", "b", "c"])}
    backend = pytest.importorskip("tokenizers")
    tokenizer = backend.Tokenizer(backend.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = backend.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    )
    texts = ["a b c", "a", "b c", "c c c c"]
    data = [{**fast(text), "label": index % 2} for index, text in enumerate(texts)]
    args = settings(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    model = make("BertForSequenceClassification")
    trainer = Trainer(model, args, train_dataset=data, processing_class=fast)
    trainer.train()
    assert (tmp_path / "checkpoint-2" / "tokenizer.json").is_file()
    trainer.save_model()
    assert (tmp_path / "config.json").is_file()
