"""Hugging Face's public names are there, and take what theirs take."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from paceline.train.arguments import TrainingArguments
from paceline.train.callbacks import CallbackHandler
from paceline.train.peer_names import NOT_CALLED
from paceline.train.seq2seq import Seq2SeqTrainer
from paceline.train.state import TrainerState
from paceline.train.trainer import Trainer

transformers = pytest.importorskip("transformers")

PAIRS: dict[str, tuple[type, type]] = {
    "Trainer": (transformers.Trainer, Trainer),
    "Seq2SeqTrainer": (transformers.Seq2SeqTrainer, Seq2SeqTrainer),
    "TrainingArguments": (transformers.TrainingArguments, TrainingArguments),
    "TrainerState": (transformers.TrainerState, TrainerState),
    "CallbackHandler": (transformers.trainer_callback.CallbackHandler, CallbackHandler),
}
# Parts of their loop and of the Hub, which nobody but themselves calls.
ABSENT = {*NOT_CALLED, "init_hf_repo", "init_training_references", "default_optim"}
ABSENT |= {"is_torch_greater_or_equal_than_2_8"}  # a flag of theirs that is found among the fields
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def members_of(owner: Any) -> dict[str, Any]:
    """Attributes of a class, and its fields, which may have no default."""
    fields = getattr(owner, "__dataclass_fields__", {})
    return {**fields, **{name: each for name, each in inspect.getmembers(owner) if not name.startswith("_")}}


@pytest.mark.parametrize("name", PAIRS)
def test_public_names_are_there(name: str) -> None:
    theirs, ours = map(members_of, PAIRS[name])
    if name == "CallbackHandler":  # whose events are attributes of an instance
        ours |= dict.fromkeys(dir(transformers.TrainerCallback))
    assert set(theirs) - set(ours) <= ABSENT


@pytest.mark.parametrize("name", PAIRS)
def test_methods_take_what_theirs_take(name: str) -> None:
    """By place and by name."""
    theirs, ours = map(members_of, PAIRS[name])
    for each in theirs.keys() & ours.keys():
        if each == "metrics_format" or not all(map(inspect.isfunction, (theirs[each], ours[each]))):
            continue  # theirs is a function without a self
        mine = inspect.signature(ours[each]).parameters
        if any(parameter.kind in VARIADIC for parameter in mine.values()):
            continue
        wanted = [n for n, p in inspect.signature(theirs[each]).parameters.items() if p.kind not in VARIADIC]
        assert list(mine)[: len(wanted)] == wanted, each
