"""Gradients, replicas and trajectories of the whole zoo, on 2 and on 4 ranks.

The ranks are started once per world size and train every specimen in that one start; the tests then look at
what they reported. What is right comes from one process on the joined batch, and from torch's DDP
where that is right itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.oracle.training import Training, train_in_one_process, train_on_ranks
from tests.oracle.zoo import BY_NAME, STEPS, ZOO, Specimen
from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.timeout(300)  # the first test of each world size pays for all


@dataclass
class Reported:
    """One specimen on one world size."""

    specimen: Specimen
    ranks: list[Training]
    torch: list[Training] | None
    alone: Training


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> Callable[[str, int], Reported]:
    """(name, world size) -> what was reported; ranks run when a world size is first asked for."""
    chosen = _chosen_names(request.session.items)
    of_world: dict[int, list[dict[tuple[str, str], Training]] | RankError] = {}

    def look(name: str, world_size: int) -> Reported:
        if world_size not in of_world:
            ddp, backend = request.config.getoption("--ddp"), request.config.getoption("--backend")
            try:
                of_world[world_size] = run_ranks(
                    train_on_ranks, world_size, chosen, ddp, timeout=280, backend=backend, group_timeout=120
                )
            except RankError as error:  # the same for all tests; not to be tried again for each
                of_world[world_size] = error
        seen = of_world[world_size]
        if isinstance(seen, RankError):
            raise seen
        has_torch = (name, "torch") in seen[0]
        return Reported(
            specimen=BY_NAME[name],
            ranks=[of_rank[name, "ours"] for of_rank in seen],
            torch=[of_rank[name, "torch"] for of_rank in seen] if has_torch else None,
            alone=_alone(name, world_size),
        )

    return look


@pytest.fixture(params=[2, 4], ids=["2ranks", "4ranks"], scope="module")
def world_size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=[s.name for s in ZOO])
def reported(
    request: pytest.FixtureRequest, world_size: int, report: Callable[[str, int], Reported]
) -> Reported:
    found = report(request.param, world_size)
    for rank, training in enumerate(found.ranks):
        assert not training.error, f"rank {rank} failed:\n{training.error}"
    return found


def test_gradients_equal_one_process_on_the_joined_batch(reported: Reported) -> None:
    for rank, training in enumerate(reported.ranks):
        for step, want in reported.alone.gradients.items():
            _same(
                training.gradients[step],
                want,
                reported.specimen.tolerance,
                f"gradient, rank {rank}, step {step}",
            )


@pytest.mark.parametrize("reported", [s.name for s in ZOO if not s.torch_wrong], indirect=True)
def test_gradients_equal_torchs(reported: Reported) -> None:
    if reported.torch is None:
        pytest.skip("torch's is the class under test")
    # The two add in another order and divide at another place: to rounding, then, not to the bit.
    tolerance = min(reported.specimen.tolerance, 1e-2)
    for rank, (ours, theirs) in enumerate(zip(reported.ranks, reported.torch, strict=True)):
        assert not theirs.error, f"torch's DDP failed on rank {rank}:\n{theirs.error}"
        for step, want in theirs.gradients.items():
            _same(ours.gradients[step], want, tolerance, f"gradient, rank {rank}, step {step}")


def test_replicas_are_bit_identical_after_every_step(reported: Reported) -> None:
    first, *others = reported.ranks
    assert len(first.hashes) == STEPS
    for rank, other in enumerate(others, start=1):
        differing = [step for step in range(STEPS) if other.hashes[step] != first.hashes[step]]
        assert not differing, (
            f"parameters of rank {rank} differ from rank 0's first after step {differing[0]}"
        )
        assert other.final_hash == first.final_hash, f"buffers of rank {rank} differ from rank 0's"


def test_every_step_follows_one_process(reported: Reported) -> None:
    tolerance = reported.specimen.tolerance
    losses = torch.tensor([training.losses for training in reported.ranks], dtype=torch.float64).mean(dim=0)
    wanted = torch.tensor(reported.alone.losses, dtype=torch.float64)
    torch.testing.assert_close(losses, wanted, rtol=tolerance, atol=tolerance, msg=lambda m: f"losses: {m}")
    for step, want in enumerate(reported.alone.parameters):
        _same(reported.ranks[0].parameters[step], want, tolerance, f"parameters after step {step}")


@functools.cache
def _alone(name: str, world_size: int) -> Training:
    return train_in_one_process(BY_NAME[name], world_size)


def _same(
    have: dict[str, Tensor] | dict[str, Tensor | None],
    want: dict[str, Tensor] | dict[str, Tensor | None],
    tolerance: float,
    what: str,
) -> None:
    assert list(have) == list(want)
    for name, right in want.items():
        value = have[name]
        if right is None or value is None:
            assert right is value, f"{what}: {name} is {value}, right is {right}"
            continue
        torch.testing.assert_close(
            value, right, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{what}: {n}: {m}"
        )


def _chosen_names(items: Sequence[pytest.Item]) -> list[str]:
    """Of the zoo, what this run looks at (`-k`)."""
    wanted = {item.callspec.params.get("reported") for item in items if hasattr(item, "callspec")}
    return [specimen.name for specimen in ZOO if specimen.name in wanted]
