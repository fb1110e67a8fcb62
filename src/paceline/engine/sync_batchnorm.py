"""Batch normalisation whose statistics are those of the whole batch over all ranks.

    forward    _own_row            this rank's mean, squared deviations and count of each channel
               exchange.rows       one all-reduce: every rank has the rows of all ranks
               _combine            the whole batch's mean and variance, with the same bits on all ranks
               _Normalise.forward  (x - mean) / sqrt(var + eps) * weight + bias
    backward   _Normalise.backward one all-reduce of two sums a channel, then the input's gradient

Everything is plain tensor arithmetic, so it runs on every device, on ranks whose batches differ in
size, and on ranks that have an empty one. Low-precision inputs are computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.engine.statistics_exchange import StatisticsExchange
from paceline.errors import ArgumentError


class SyncBatchNorm(nn.SyncBatchNorm):
    """Batch normalisation over the batches of all ranks, on any device.

    Takes the place of ``torch.nn.SyncBatchNorm`` (which needs an accelerator), with its constructor,
    its keys in ``state_dict`` and its rules: batch statistics of all ranks in training mode, running
    statistics and no communication in eval mode, this rank's batch in eval mode with
    ``track_running_stats=False``. Algorithm: Ioffe and Szegedy, "Batch Normalization", ICML 2015.

    In training mode all ranks of ``process_group`` must run forward, and backward through its output,
    equally often and in the same order; a rank without data passes an empty batch, ``(0, C, ...)``.
    Ranks that run out of data early need ``join(throw_on_early_termination=True)``, as with torch's class.
    Before ``torch.distributed.init_process_group`` it is a plain BatchNorm.

    Layers made by ``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` are torch's and stay so, also
    inside the wrapper; pass the module to ``convert_sync_batchnorm`` of this class to get these.

    Args:
        num_features: number of channels C of inputs of shape ``(N, C, ...)``, 2-d to 5-d.
        eps: added to the variance.
        momentum: weight of the newest batch in running statistics; None for their plain mean.
        affine: whether there is a learned weight (and bias) per channel.
        track_running_stats: whether to keep running statistics.
        process_group: the ranks that form one batch; all by default.
        device: where parameters and buffers live.
        dtype: of parameters and buffers.
        bias: whether an affine layer has a bias.
    """

    label: str = ""  # dotted name in the module it was converted in, for error messages

    def forward(self, input: Tensor) -> Tensor:
        """Normalise this rank's part of the batch.

        Args:
            input: float tensor of shape ``(N, C, ...)``; N may be 0 and may differ between ranks.

        Returns:
            A tensor of the input's shape, dtype and memory format.

        Raises:
            ArgumentError: in training mode, the batch of all ranks has one value per channel (on every
                rank), or the input's channels are not ``num_features``.
            CommunicationError: another rank did not come, or is gone.
        """
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return _BatchNorm.forward(self, input)
        self._check_input(input)
        return self._normalise_over_ranks(input)

    @torch._disable_dynamo  # a compiler's graph ends here: it cannot hold process groups
    def _normalise_over_ranks(self, input: Tensor) -> Tensor:
        group: Any = dist.group.WORLD if self.process_group is None else self.process_group
        exchange = StatisticsExchange.over(group, input.device)
        whole = _statistics_of_all(input.detach(), exchange, self.label)
        if self._has_content(input, whole.count):
            self._update_running(whole)
        y: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, whole, self.eps, exchange, self.label
        )
        return y

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """Put a layer of this class in the place of every BatchNorm and ``torch.nn.SyncBatchNorm``.

        Parameters and buffers are taken over as they are, so that optimizers that hold them go on.
        Call it before wrapping.

        Args:
            module: the module to convert in place.
            process_group: the ranks that form one batch; default: all, or those a layer has already.

        Returns:
            ``module``, or a new layer if ``module`` itself is one to be replaced.

        Raises:
            ArgumentError: a lazy BatchNorm has not seen an input yet.
        """
        return _convert(cls, module, process_group, "", {})

    def _check_input(self, input: Tensor) -> None:
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        if input.size(1) != self.num_features:
            raise ArgumentError(
                f"{_called(self.label)} has num_features={self.num_features}, but the input of shape "
                f"{list(input.shape)} has {input.size(1)} channels"
            )

    def _has_content(self, input: Tensor, count: Tensor) -> bool:
        """Whether there is a batch at all; raises where it is too small for a variance.

        A rank with two values or more need not look at the sum, which would make the CPU wait for an
        accelerator; if the whole batch has fewer, no rank has two, and all of them look.
        """
        if _values_per_channel(input) > 1:
            return True
        total = int(count)
        if total == 1:
            raise ArgumentError(
                "Expected more than 1 value per channel when training, but the batches of all ranks together "
                f"have 1 ({_called(self.label)}, input of shape {list(input.shape)} on this rank)"
            )
        return total > 0

    @torch.no_grad()
    def _update_running(self, whole: BatchStatistics) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1.0 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = whole.variance * (whole.count / (whole.count - 1).clamp_min(1))
        for running, newest in ((self.running_mean, whole.mean), (self.running_var, unbiased)):
            running.copy_((1 - factor) * running.to(newest.dtype) + factor * newest)


@dataclass(frozen=True)
class BatchStatistics:
    """Of each channel, over all ranks; float32 or wider.

    Attributes:
        mean: shape (C,).
        variance: biased (divided by the count), shape (C,).
        count: number of values, shape ().
    """

    mean: Tensor
    variance: Tensor
    count: Tensor


class _Normalise(Function):
    """Normalises with the whole batch's statistics, and knows that they depend on the input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        whole: BatchStatistics,
        eps: float,
        exchange: StatisticsExchange,
        label: str,
    ) -> Tensor:
        inverse_deviation = torch.rsqrt(whole.variance + eps)
        ctx.save_for_backward(x, weight, bias, whole.mean, inverse_deviation, whole.count)
        ctx.eps, ctx.exchange, ctx.label = eps, exchange, label
        centred = x - _along(whole.mean, x)
        scale = inverse_deviation if weight is None else inverse_deviation * weight
        y = centred.mul_(_along(scale, x))
        return (y if bias is None else y.add_(_along(bias, x))).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        differentiate = _gradients_with_graph if torch.is_grad_enabled() else _gradients
        return *differentiate(ctx, dy), None, None, None, None


def _gradients(ctx: Any, dy: Tensor) -> list[Tensor | None]:
    """Of input (over all ranks' losses), weight and bias (of this rank's loss: the wrapper averages)."""
    x, weight, bias, mean, inverse_deviation, count = ctx.saved_tensors
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    centred = x - _along(mean, x)
    sum_dy = dy.sum(_all_but_channels(x), dtype=mean.dtype)
    sum_dy_centred = (dy * centred).sum(_all_but_channels(x))
    grad_weight = (sum_dy_centred * inverse_deviation).to(weight.dtype) if wants_weight else None
    grad_bias = sum_dy.to(bias.dtype) if wants_bias else None
    if not wants_x:
        return [None, grad_weight, grad_bias]
    sums = ctx.exchange.add_up(torch.stack([sum_dy, sum_dy_centred]), _in_words("backward", ctx.label))
    mean_dy, mean_dy_centred = sums / count.clamp_min(1)
    scale = inverse_deviation if weight is None else inverse_deviation * weight
    grad_x = centred.mul_(_along(-mean_dy_centred * inverse_deviation.square(), x)).add_(dy)
    grad_x = grad_x.sub_(_along(mean_dy, x)).mul_(_along(scale, x))
    return [grad_x.to(x.dtype), grad_weight, grad_bias]


def _gradients_with_graph(ctx: Any, dy: Tensor) -> list[Tensor | None]:
    """The same for ``create_graph=True``: from a forward of differentiable steps, so that it has a graph."""
    x, weight, bias, _, _, count = ctx.saved_tensors
    what = _in_words("double backward", ctx.label)
    total, dims = count.clamp_min(1), _all_but_channels(x)
    mean = _sum_over_ranks(x.sum(dims, dtype=count.dtype), ctx.exchange, what) / total
    centred = x - _along(mean, x)
    variance = _sum_over_ranks(centred.square().sum(dims), ctx.exchange, what) / total
    y = centred * _along(torch.rsqrt(variance + ctx.eps), x)
    y = y if weight is None else y * _along(weight, x)
    y = (y if bias is None else y + _along(bias, x)).to(x.dtype)
    wanted = [
        tensor for tensor, needed in zip((x, weight, bias), ctx.needs_input_grad, strict=False) if needed
    ]
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
    return [next(found) if needed else None for needed in ctx.needs_input_grad[:3]]


class _SumOverRanks(Function):
    """All-reduce; a sum's gradient is the sum of the gradients of all ranks' losses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: StatisticsExchange, what: str) -> Tensor:
        ctx.exchange, ctx.what = exchange, what
        return exchange.add_up(x.clone(), what)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_over_ranks(dy, ctx.exchange, ctx.what), None, None


def _sum_over_ranks(x: Tensor, exchange: StatisticsExchange, what: str) -> Tensor:
    total: Tensor = _SumOverRanks.apply(x, exchange, what)  # type: ignore[no-untyped-call]
    return total


@torch.no_grad()
def _statistics_of_all(x: Tensor, exchange: StatisticsExchange, label: str) -> BatchStatistics:
    return _combine(exchange.rows(_own_row(x), _in_words("forward", label)))


def _own_row(x: Tensor) -> Tensor:
    """Mean (C), sum of squared deviations from it (C) and count (1) of this rank's batch, 1-d."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    channels, count = x.size(1), _values_per_channel(x)
    if count == 0:
        return torch.zeros(2 * channels + 1, dtype=dtype, device=x.device)
    dims = _all_but_channels(x)
    mean = x.mean(dims, dtype=dtype)
    deviations = (x - _along(mean, x)).square_().sum(dims)
    return torch.cat([mean, deviations, mean.new_full((1,), count)])


def _combine(rows: Tensor) -> BatchStatistics:
    """The whole batch's statistics from those of its parts.

    Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
    1979: deviations within the parts, plus those of the parts' means. Nothing large cancels.
    """
    channels = rows.size(1) // 2
    means, deviations, counts = rows.split([channels, channels, 1], dim=1)
    count = counts.sum()
    shares = counts / count.clamp_min(1)
    mean = (shares * means).sum(0)
    within, between = deviations.sum(0) / count.clamp_min(1), (shares * (means - mean).square()).sum(0)
    return BatchStatistics(mean, within + between, count)


def _convert(
    layer_class: type[SyncBatchNorm], module: nn.Module, group: Any, name: str, done: dict[int, nn.Module]
) -> nn.Module:
    """Convert depth first; a module that is registered in several places stays one module."""
    if id(module) not in done:
        done[id(module)] = (
            _replacement(layer_class, module, group, name) if isinstance(module, _BatchNorm) else module
        )
        for child_name, child in module._modules.items():
            if child is not None:
                dotted = f"{name}.{child_name}" if name else child_name
                done[id(module)]._modules[child_name] = _convert(layer_class, child, group, dotted, done)
    return done[id(module)]


def _replacement(layer_class: type[SyncBatchNorm], old: _BatchNorm, group: Any, name: str) -> SyncBatchNorm:
    if any(map(nn.parameter.is_lazy, (*old.parameters(), *old.buffers()))):
        raise ArgumentError(
            f"{name or 'the module'} is a {type(old).__name__} whose number of channels is not known yet; "
            "run a forward pass before convert_sync_batchnorm"
        )
    if group is None and isinstance(old, nn.SyncBatchNorm):
        group = old.process_group
    new = layer_class(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats, group)
    new.weight, new.bias = old.weight, old.bias
    new.running_mean, new.running_var = old.running_mean, old.running_var
    new.num_batches_tracked = old.num_batches_tracked
    new.training = old.training
    new.label = name
    if hasattr(old, "qconfig"):
        new.qconfig = old.qconfig
    return new


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _along(per_channel: Tensor, x: Tensor) -> Tensor:
    """A (C,) tensor in a shape that broadcasts over x."""
    return per_channel.view(1, -1, *[1] * (x.dim() - 2))


def _values_per_channel(x: Tensor) -> int:
    return x.numel() // x.size(1)


def _called(label: str) -> str:
    return f"SyncBatchNorm {label}" if label else "SyncBatchNorm"


def _in_words(phase: str, label: str) -> str:
    return f"all-reduce of batch statistics in {phase} of {_called(label)}"
