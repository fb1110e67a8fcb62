"""What a user is told: which rank, which backward pass, which parameters, and what to write instead.

The texts for unused parameters and changed graphs begin with the phrases of torch's class, which
people and scripts search for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.comm.waiting import Peers
from paceline.engine.usage import PassVerdict

if TYPE_CHECKING:
    from paceline.engine.bucket import Slot


def name_bucket(number: int, position: int, count: int, names: Sequence[str]) -> str:
    """What a rank waits for: the pass, the bucket (counted from 1) and its parameters."""
    return f"backward pass {number}, all-reduce of {name_only_bucket(position, count, names)}"


def name_only_bucket(position: int, count: int, names: Sequence[str]) -> str:
    """The bucket (counted from 1) and its parameters."""
    shown = ", ".join(names if len(names) <= 3 else [names[0], "...", names[-1]])
    return f"bucket {position + 1} of {count} ({shown})"


def name_tail(number: int) -> str:
    """What a rank waits for when the pass's tail travels by itself."""
    return f"backward pass {number}, all-reduce of the pass's tail"


def words_for_taken_gradient(name: str) -> str:
    """The text for a parameter whose gradient came and went before its bucket was launched."""
    return (
        f"the gradient of parameter '{name}' was gone before it could be averaged: a hook on the "
        "parameter set .grad to None. An optimizer stepped from such a hook would use this rank's gradient "
        "alone; register it with torch.distributed.optim._apply_optimizer_in_backward, which steps with the "
        "average"
    )


def words_for_gradient_with_graph(name: str) -> str:
    """The text for a parameter whose gradient is to be differentiated again."""
    return (
        f"the gradient of parameter '{name}' has a graph of its own (backward was called with "
        "create_graph=True), which averaging over ranks cuts: nothing flows back through .grad. Write "
        "torch.autograd.grad(loss, parameters, create_graph=True), build the loss from what it returns, "
        "and call backward() on that"
    )


def words_for_unused(peers: Peers, number: int, unused: dict[int, int], slots: Sequence[Slot]) -> str:
    """The text of the error for parameters without gradient; begins with torch's key phrases.

    Args:
        peers: the ranks.
        number: of the backward pass.
        unused: parameters that some rank's backward did not reach -> number of ranks whose did.
        slots: all parameters.
    """
    rank, world_size = peers.global_rank, peers.world_size
    here = [slots[index] for index in unused if not slots[index].reached]
    elsewhere = [(slots[index].name, users) for index, users in unused.items() if slots[index].reached]
    lines = [
        "Expected to have finished reduction in the prior iteration before starting a new one.",
        f"Rank {rank}: backward pass {number} left parameters without gradient. The gradients of that pass "
        "were averaged correctly (a rank without gradient counts as zero), but this wrapper was told that "
        "every parameter takes part.",
        "Write DistributedDataParallel(..., find_unused_parameters=True), which costs nothing here: that is, "
        "passing the keyword argument `find_unused_parameters=True`. Or, if it is a mistake, make sure that "
        "all `forward` function outputs participate in calculating loss.",
    ]
    if elsewhere:
        counted = ", ".join(f"{name} (reached on {users} of {world_size} ranks)" for name, users in elsewhere)
        lines.append(f"Parameters that this rank used and other ranks did not: {counted}.")
    if here:
        indices = " ".join(str(p.index) for p in here)
        modules = sorted({p.name.rpartition(".")[0] or "the wrapped module itself" for p in here})
        lines += [
            f"They sit in: {', '.join(modules)}. There is no need to set the environment variable "
            "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL: these are all the names.",
            f"Parameters which did not receive grad for rank {rank}: {', '.join(p.name for p in here)}",
            f"Parameter indices which did not receive grad for rank {rank}: {indices}",
        ]
    return "\n".join(lines)


def words_for_changed_graph(
    rank: int, number: int, unreached: list[tuple[int, str]], others: list[str]
) -> str:
    """The text of the error for a graph that was declared static and changed."""
    if not unreached:
        return (
            f"Your training graph has changed in this iteration (rank {rank}, backward pass {number}): "
            f"{', '.join(others)} took part more or less often than in the pass before. This is not "
            "compatible with static_graph set to True; write static_graph=False."
        )
    indices = " ".join(str(index) for index, _ in unreached)
    names = ", ".join(name for _, name in unreached)
    return (
        "Expected to have finished reduction in the prior iteration before starting a new one. This error "
        "indicates that your training graph has changed in this iteration, e.g., one parameter is used in "
        "first iteration, but then got unused in the second iteration. this is not compatible with "
        f"static_graph set to True.\nParameter indices which did not receive grad for rank {rank}: "
        f"{indices}\nParameters which did not receive grad for rank {rank}, backward pass {number}: {names}"
    )


def words_for_out_of_step(rank: int, number: int, verdict: PassVerdict) -> str:
    """The text of the error for ranks that met at different steps."""
    return (
        f"rank {rank}, backward pass {number}: the ranks are out of step, so gradients of different steps "
        "were mixed, and they are dropped on every rank. By rank, backward passes that synchronised: "
        f"{verdict.pass_numbers}; training forwards outside no_sync: {verdict.forwards}; bucket plans: "
        f"{verdict.plan_fingerprints}. A rank skipped a backward after its forward (or made one more), or "
        "its module's parameters were changed unlike the others'. Let every rank run the same forwards and "
        "backwards: for a batch to skip, call (loss * 0).backward()."
    )


def words_for_failed_peer(peers: Peers, number: int, failed: list[int]) -> str:
    """The text of the error for a backward that raised on other ranks of the job.

    A rank that ends by its exception tells it in the next moments; one that goes on does not.
    """
    said = peers.last_words_of(failed, patience_s=1.0) or " The exception stands in that rank's output."
    return (
        f"rank {peers.global_rank}, backward pass {number}: backward raised an exception on rank "
        f"{', '.join(map(str, failed))}, so this pass has no average; its gradients are dropped on every "
        f"rank.{said}"
    )
