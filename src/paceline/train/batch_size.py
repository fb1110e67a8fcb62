"""Finding a batch size that fits the memory (``auto_find_batch_size``).

    before training, until a trial goes well on every rank:
        forward and backward of the first micro-batch, nothing averaged
        out of memory on any rank: all ranks halve the batch size
    amid training, on any rank:
        out of memory: all ranks take the same step anew, in more and smaller micro-batches

The trial leaves no trace: no gradient, no moved buffer. Amid training the global batch stays, and with it the
order of samples.

Note "the others must not wait". A rank that runs out of memory amid a step makes the averaging of gradients
fail that the others are in or will come to (`Reducer.give_up`). So all ranks raise in that step, and meet
again in the question whether it was memory. A collective of the user's own in the forward is not reached by
that: there the others wait until `ddp_timeout`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from paceline.engine.ddp import DistributedDataParallel
from paceline.errors import ArgumentError, CommunicationError, PeerFailedError
from paceline.train.feeds import feed_of
from paceline.train.step import own_items
from paceline.train.weighing import Weighing

if TYPE_CHECKING:
    from paceline.train.arguments import TrainingArguments
    from paceline.train.trainer import Trainer

logger = logging.getLogger(__name__)

# What the libraries below say when memory is short; not all raise a class of their own.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def find(trainer: Trainer) -> None:
    """Find the batch size, if that is asked for.

    Raises:
        ArgumentError: not even one sample fits.
    """
    while trainer.args.auto_find_batch_size and not _fits(trainer):
        _halve(trainer)


def split_further(trainer: Trainer, error: Exception) -> None:
    """Out of memory amid a step, here or on another rank: make its micro-batches smaller and more.

    Raises:
        Exception: `error` itself, if no rank was out of memory, or the model is wrapped in another class.
        ArgumentError: not even one sample fits.
    """
    args = trainer.args
    if not args.auto_find_batch_size or not _was_out_of_memory_anywhere(trainer, error):
        raise error
    trainer.model_wrapped.zero_grad()
    trainer.accelerator.free_memory()
    before, micro_batches = args.per_device_train_batch_size, args.gradient_accumulation_steps
    _refuse_single(args)
    smaller = next(size for size in range(before // 2, 0, -1) if before * micro_batches % size == 0)
    args.per_device_train_batch_size = smaller
    args.gradient_accumulation_steps = before * micro_batches // smaller
    logger.warning(
        "out of memory in step %d; going on with per_device_train_batch_size=%d and "
        "gradient_accumulation_steps=%d",
        trainer.state.global_step + 1,
        smaller,
        args.gradient_accumulation_steps,
    )


def _was_out_of_memory_anywhere(trainer: Trainer, error: Exception) -> bool:
    """Whether a rank was out of memory in this step; then all ranks come here, each with what it raised."""
    own, wrapper = is_out_of_memory(error), trainer.model_wrapped
    if trainer.args.world_size == 1:
        return own
    if not isinstance(wrapper, DistributedDataParallel) or not (own or isinstance(error, PeerFailedError)):
        return False
    if own:
        wrapper.reducer.give_up()
    wrapper.reducer.count_forwards_anew()
    flag = torch.tensor(int(own), dtype=torch.int32, device=trainer.args.device)
    try:
        return bool(trainer.collectives.max(flag, "asking which rank is out of memory"))
    except CommunicationError:
        return False  # the rank that raised is gone, so it was something else


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory is short."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, CommunicationError):
        return False  # it may quote what another rank says
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def _fits(trainer: Trainer) -> bool:
    """Whether the trial goes well on every rank."""
    failed = torch.tensor(int(not _fits_here(trainer)), dtype=torch.int32, device=trainer.args.device)
    return not bool(trainer.collectives.max(failed, "trying a batch size"))


def _fits_here(trainer: Trainer) -> bool:
    feed = feed_of(trainer.get_train_dataloader(), trainer.args, trainer.collectives)
    feed.start_at(0, 0)
    step = feed.next_step()
    if step is None:
        return True
    buffers = {name: buffer.clone() for name, buffer in trainer.model.named_buffers()}
    try:
        own = own_items(trainer, step.micro_batches[0])
        trainer.weighing = Weighing(own, own, 1, 1, trainer.loss_takes_total, trainer.args.device)
        trainer.training_step(trainer.model, step.micro_batches[0].inputs, trainer.weighing.count)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        _forget(trainer, buffers)
    return True


def _forget(trainer: Trainer, buffers: dict[str, Any]) -> None:
    trainer.model.zero_grad()
    for name, buffer in trainer.model.named_buffers():
        buffer.copy_(buffers[name])
    trainer.accelerator.free_memory()


def _halve(trainer: Trainer) -> None:
    args = trainer.args
    _refuse_single(args)
    args.per_device_train_batch_size //= 2
    logger.warning(
        "out of memory; going on with per_device_train_batch_size=%d", args.per_device_train_batch_size
    )


def _refuse_single(args: TrainingArguments) -> None:
    if args.train_batch_size == 1:
        raise ArgumentError(
            "auto_find_batch_size: not even one sample fits the memory; use gradient_checkpointing=True, "
            "bf16=True or a smaller model"
        )
