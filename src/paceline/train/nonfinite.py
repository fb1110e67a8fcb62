"""Steps whose gradient is NaN or infinite: one decision for all ranks, and the rank it came from by name.

Averaged gradients are the same on all ranks, so all see a bad one at the same step, with no
word between them. None takes the step: it would leave nothing but NaN in every replica. Only then
do the ranks tell each other whose loss it was.
"""

from __future__ import annotations

import logging
import math

from torch import Tensor

from paceline.errors import NonFiniteError
from paceline.train.collectives import Collectives

logger = logging.getLogger(__name__)

# A run that takes no step at all is not worth its electricity; loss scaling may skip some twenty in a row.
MOST_IN_A_ROW = 50


class BadSteps:
    """Counts and reports them.

    Args:
        collectives: to ask the other ranks with.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.in_a_row = 0

    def is_bad(self, grad_norm: float, loss: Tensor, step: int, scaled: bool) -> bool:
        """Whether this step must not be taken; the same on every rank.

        Args:
            grad_norm: of the averaged gradient.
            loss: this rank's part of the step's loss.
            step: the step's number, counted from 1, for the report.
            scaled: the loss was scaled up for float16, so an infinite gradient may mean too high a scale.

        Raises:
            NonFiniteError: it is the fiftieth in a row.
        """
        if math.isfinite(grad_norm):
            self.in_a_row = 0
            return False
        self.in_a_row += 1
        text = self._in_words(grad_norm, loss, step, scaled)
        if self.in_a_row >= MOST_IN_A_ROW:
            raise NonFiniteError(f"{text}; it is the {self.in_a_row}th such step in a row, so training ends")
        logger.log(logging.DEBUG if scaled and "loss of" not in text else logging.WARNING, "%s", text)
        return True

    def _in_words(self, grad_norm: float, loss: Tensor, step: int, scaled: bool) -> str:
        losses = self._collectives.gather(loss.detach().float(), "asking whose loss is not finite").tolist()
        bad = [(rank, value) for rank, value in enumerate(losses) if value - value != 0]  # NaN or infinite
        decision = "no rank takes this step"
        if bad:
            named = ", ".join(f"the loss of rank {rank} is {value}" for rank, value in bad)
            return f"step {step}: {named}; {decision}"
        if scaled:
            return f"step {step}: the gradient is too large for float16 at this loss scale; {decision}"
        return (
            f"step {step}: the gradient's norm is {grad_norm} although the loss of every rank is "
            f"finite; {decision}"
        )
