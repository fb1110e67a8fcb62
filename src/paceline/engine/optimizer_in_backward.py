"""Optimizers that step as soon as a parameter's gradient is there.

``torch.distributed.optim._apply_optimizer_in_backward`` hangs an optimizer on each parameter,
to be stepped from a hook when the gradient has been accumulated. Under a wrapper that moment
is too early: the gradient is still this rank's own. So the wrapper takes those hooks off and
steps the optimizers itself, when the averages are there, and sets ``.grad`` to None as they do.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def take_over(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Take the optimizers' hooks off; returns the parameters that had one."""
    owned = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
    if not owned:
        return []
    # Importing it takes longer than importing the engine, and who has such optimizers has it already.
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for parameter in owned:
        for handle in param_to_optim_hook_handle_map.get(parameter, []):
            handle.remove()
    return owned


def step_and_clear(parameters: Iterable[nn.Parameter]) -> None:
    """Step the optimizers of parameters that have a gradient, then drop the gradient."""
    for parameter in parameters:
        if parameter.grad is not None:
            for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                optimizer.step()
            parameter.grad = None
