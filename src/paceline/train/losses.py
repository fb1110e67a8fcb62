"""What a step's loss is the mean over, and what each rank must multiply its own loss by.

The loss of a step is the mean over the step's items, on all ranks and in all its
micro-batches: over the labels that are not -100 where labels are whole numbers (classes,
tokens), else over samples. The engine averages gradients over ranks, so a micro-batch's
loss is weighted before its backward:

    loss is a mean over its own items       own items * world size / items of the step
    loss is a sum / num_items_in_batch      world size

The second is for models (and compute_loss_func) that take ``num_items_in_batch``, by that
name, and for an overridden compute_loss that computes with it (weighing.py). A head that
swallows it in ``**kwargs`` may or may not use it, so such heads are not given it; their own mean,
weighted, is right in both cases.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn

from paceline.errors import ArgumentError

if TYPE_CHECKING:
    from paceline.train.trainer import Trainer

IGNORED = -100

# transformers' loss types whose function predicts the next token.
_SHIFTING = ("ForCausalLM", "ForConditionalGeneration")


def takes_num_items(model: nn.Module) -> bool:
    """Whether the forward has a parameter named num_items_in_batch."""
    return "num_items_in_batch" in inspect.signature(model.forward).parameters


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model predicts label t+1 from token t itself, so that the first label never counts."""
    get_base_model: Any = getattr(model, "get_base_model", None)  # what an adapter (PEFT) wraps
    model = get_base_model() if get_base_model is not None else model
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    kind: Any = getattr(model, "loss_type", None)
    return kind in _SHIFTING or (kind is None and type(model).__name__.endswith("LMHeadModel"))


def returns_loss_unasked(model: nn.Module) -> bool:
    """Whether the forward gives a loss without labels: it has return_loss, which is true by default."""
    parameter = inspect.signature(model.forward).parameters.get("return_loss")
    return parameter is not None and parameter.default is True


def names_num_items(function: Any) -> bool:
    """Whether a loss function can be given num_items_in_batch, by name or among ``**kwargs``."""
    parameters = inspect.signature(function).parameters
    return "num_items_in_batch" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def label_names_of(model: nn.Module) -> list[str]:
    """The forward's parameters that are labels, as in "labels" or "start_positions"; else ["labels"]."""
    names = list(inspect.signature(model.forward).parameters)
    answers = {"start_positions", "end_positions"}
    found = [name for name in names if "label" in name or (name in answers and answers <= set(names))]
    return found or ["labels"]


def count_items(inputs: Any, samples: int, shifted: bool = False) -> int | Tensor:
    """Items that the loss of one micro-batch is a mean over.

    Args:
        inputs: the batch, as the collator made it.
        samples: how many samples it is.
        shifted: the model leaves the first label of each sequence out.

    Returns:
        `samples`, or an int64 scalar on the labels' device where labels are whole numbers.
    """
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not _counted(labels):
        return samples
    if "shift_labels" in inputs:
        labels = inputs["shift_labels"]
    elif shifted and labels.dim() > 1:
        labels = labels[..., 1:]
    return labels.ne(IGNORED).sum()


def with_countable_labels(inputs: Any) -> Any:
    """Inputs whose ignored labels stand for class 0.

    For a micro-batch that counts for nothing: a mean over no label is NaN, and NaN
    times a weight of zero is NaN still.
    """
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not _counted(labels) or bool(labels.ne(IGNORED).any()):
        return inputs
    return {**inputs, "labels": labels.masked_fill(labels == IGNORED, 0)}


def call_model(model: nn.Module, inputs: Any) -> Any:
    """The model's outputs for a batch that is a dict of arguments, a tuple of them, or one argument."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def loss_and_outputs(
    model: nn.Module,
    inputs: Any,
    loss_func: Callable[..., Tensor] | None,
    extra: Mapping[str, Any],
    to_model: bool,
) -> tuple[Tensor, Any]:
    """The model's own loss, or that of `loss_func` on its outputs, which then gets the labels instead.

    Args:
        model: wrapped or not.
        inputs: the batch, on the model's device.
        loss_func: called as ``loss_func(outputs, labels, **extra)``.
        extra: num_items_in_batch, or nothing.
        to_model: give `extra` to the model as well.
    """
    if isinstance(inputs, Mapping) and to_model:
        inputs = {**inputs, **extra}
    if loss_func is None:
        outputs = call_model(model, inputs)
        return loss_of(outputs), outputs
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if labels is not None:
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
    outputs = call_model(model, inputs)
    return loss_func(outputs, labels, **extra), outputs


def loss_func_for(trainer: Trainer, inputs: Any) -> tuple[Callable[..., Tensor] | None, Any]:
    """The function that computes the loss instead of the model, if any, and the inputs to go with it.

    Label smoothing needs labels. The decoder of an encoder-decoder model needs them too, unless the
    collator has made its inputs of them.
    """
    smoother = trainer.label_smoother
    if trainer.compute_loss_func is not None or smoother is None:
        return trainer.compute_loss_func, inputs
    if not isinstance(inputs, Mapping) or "labels" not in inputs:
        return None, inputs
    shift_right: Any = getattr(trainer.model, "prepare_decoder_input_ids_from_labels", None)
    if shift_right is not None and "decoder_input_ids" not in inputs:
        inputs = {**inputs, "decoder_input_ids": shift_right(labels=inputs["labels"])}
    return (lambda outputs, labels, **extra: smoother(outputs, labels)), inputs


def loss_of(outputs: Any) -> Tensor:
    """The loss among a model's outputs: the entry "loss", or the first of a tuple, or the output itself.

    Raises:
        ArgumentError: there is none; the text lists what there is.
    """
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
        if loss is None:
            raise ArgumentError(
                f"the model returned no loss, only {', '.join(map(str, outputs)) or 'an empty dict'}; "
                f"give it labels, or pass compute_loss_func to the Trainer"
            )
        return loss
    first = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
    if not isinstance(first, Tensor) or first.numel() != 1:
        raise ArgumentError(
            f"the model returned {_shape(first)} where a scalar loss was expected; return a dict with 'loss' "
            f"or a tuple whose first entry is the loss, or pass compute_loss_func to the Trainer"
        )
    return first


def _counted(labels: Any) -> TypeGuard[Tensor]:
    """Whether labels are whole numbers, of which each stands for an item."""
    if not isinstance(labels, Tensor) or labels.dim() == 0:
        return False
    return not labels.is_floating_point() and not labels.is_complex()


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
