"""The zoo: models and ways of driving a step, each of which has confused some wrapper.

A specimen says how to build a model, what one rank's batch of a step is, and how a step runs its
backwards. `training.py` trains it: by ranks under a wrapper, and in one process on the joined batch.
Everything is a function of (rank, step, micro-batch), and in double precision unless a specimen says
otherwise, so that "equal" can be taken strictly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Batch = tuple[Tensor, ...]
Net = Callable[..., Tensor]
STEPS = 20
EDIT_STEP = 5  # the step before which a specimen's `edit` is applied


# ---------------------------------------------------------------------------------------------------------
# Ways of driving one step. `loss_of(i)` is the loss of micro-batch i; `no_sync` is the wrapper's.
# ---------------------------------------------------------------------------------------------------------
LossOf = Callable[[int], Tensor]
NoSync = Callable[[], AbstractContextManager[None]]


def one_backward(loss_of: LossOf, no_sync: NoSync, micro_batches: int) -> Tensor:
    loss = loss_of(0)
    loss.backward()
    return loss.detach()


def accumulate(loss_of: LossOf, no_sync: NoSync, micro_batches: int) -> Tensor:
    """All but the last micro-batch wholly under no_sync."""
    total = torch.zeros((), dtype=torch.float64)
    for i in range(micro_batches - 1):
        with no_sync():
            loss = loss_of(i) / micro_batches
            loss.backward()
        total += loss.detach()
    loss = loss_of(micro_batches - 1) / micro_batches
    loss.backward()
    return total + loss.detach()


def accumulate_around_backward(loss_of: LossOf, no_sync: NoSync, micro_batches: int) -> Tensor:
    """As `accumulate`, but only the backwards are under no_sync, as a loop with the loss elsewhere has it."""
    total = torch.zeros((), dtype=torch.float64)
    for i in range(micro_batches - 1):
        loss = loss_of(i) / micro_batches
        with no_sync():
            loss.backward()
        total += loss.detach()
    loss = loss_of(micro_batches - 1) / micro_batches
    loss.backward()
    return total + loss.detach()


def several_forwards(loss_of: LossOf, no_sync: NoSync, micro_batches: int) -> Tensor:
    """One backward through several forwards."""
    loss = torch.stack([loss_of(i) for i in range(micro_batches)]).mean()
    loss.backward()
    return loss.detach()


def several_backwards(loss_of: LossOf, no_sync: NoSync, micro_batches: int) -> Tensor:
    """Several synchronised backwards into the same gradients."""
    losses = []
    for i in range(micro_batches):
        loss = loss_of(i)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def forwards_then_backwards(loss_of: LossOf, no_sync: NoSync, micro_batches: int) -> Tensor:
    """All forwards first, then a backward for each."""
    losses = [loss_of(i) for i in range(micro_batches)]
    for loss in losses:
        loss.backward()
    return torch.stack([loss.detach() for loss in losses]).mean()


# ---------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------
def _generator(rank: int, step: int, micro: int) -> torch.Generator:
    return torch.Generator().manual_seed(1 + rank + 100 * micro + 10_000 * step)


def vectors(rank: int, step: int, micro: int, dtype: torch.dtype = torch.float64) -> Batch:
    """4 samples of 6 features, 3 targets each."""
    generator = _generator(rank, step, micro)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def single_vectors(rank: int, step: int, micro: int) -> Batch:
    return vectors(rank, step, micro, torch.float32)


def images(rank: int, step: int, micro: int) -> Batch:
    """6 samples of 1 x 8 x 8, 3 targets each."""
    generator = _generator(rank, step, micro)
    x = torch.randn(6, 1, 8, 8, generator=generator, dtype=torch.float64)
    return x, torch.randn(6, 3, generator=generator, dtype=torch.float64)


def tokens(rank: int, step: int, micro: int) -> Batch:
    """4 samples of 5 token ids below 11, and an id to predict for each."""
    generator = _generator(rank, step, micro)
    return torch.randint(11, (4, 5), generator=generator), torch.randint(11, (4,), generator=generator)


def routed_by_rank(rank: int, step: int, micro: int) -> Batch:
    """All samples of a rank take the branch of its parity, always."""
    x, y = vectors(rank, step, micro)
    return x, torch.full((len(x),), rank % 2), y


def routed_in_turn(rank: int, step: int, micro: int) -> Batch:
    """Each rank takes another branch in every step."""
    x, y = vectors(rank, step, micro)
    return x, torch.full((len(x),), (rank + step) % 2), y


def routed_seldom(rank: int, step: int, micro: int) -> Batch:
    """Branch 1 is taken by rank 0 in every third step, by nobody in the others."""
    x, y = vectors(rank, step, micro)
    return x, torch.full((len(x),), int(rank == 0 and step % 3 == 1)), y


# ---------------------------------------------------------------------------------------------------------
# Losses: the mean over the samples, so that the mean over ranks is the loss of the joined batch
# ---------------------------------------------------------------------------------------------------------
def squared(net: Net, batch: Batch) -> Tensor:
    *inputs, target = batch
    return F.mse_loss(net(*inputs).to(target.dtype), target)


def classified(net: Net, batch: Batch) -> Tensor:
    *inputs, target = batch
    return F.cross_entropy(net(*inputs), target)


# ---------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------
def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def frozen_first_layer() -> nn.Module:
    model = mlp()
    model.get_submodule("0").requires_grad_(False)
    return model


class TiedWeights(nn.Module):
    """The output projection is the embedding's table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.project = nn.Linear(8, 11, bias=False)
        self.project.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.project(torch.tanh(self.mix(self.table(ids).mean(dim=1))))


class UnusedBranch(nn.Module):
    """Has a layer that forward never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.spare, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class Routed(nn.Module):
    """Each sample takes the branch its flag names; a branch no sample takes is not run."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.branches = nn.ModuleList([nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))])

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        out = torch.zeros_like(x)
        for number, branch in enumerate(self.branches):
            rows = (flag == number).nonzero().flatten()
            if len(rows):
                out = out.index_copy(0, rows, branch(x[rows]))
        return self.head(torch.tanh(out))


def conv_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def conv_frozen_statistics() -> nn.Module:
    model = conv_batch_norm()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def conv_channels_last() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3, stride=2), nn.Flatten(), nn.Linear(16, 3)
    )
    return model.to(memory_format=torch.channels_last)


class BagOfTokens(nn.Module):
    """An embedding whose table gets a dense or a sparse gradient."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, sparse=sparse)
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).mean(dim=1))


class Checkpointed(nn.Module):
    """Blocks whose activations are recomputed in backward; maybe the same block twice, maybe one unused."""

    def __init__(self, reentrant: bool, shared: bool = False, spare: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        first = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.blocks = nn.ModuleList([first, first if shared else nn.Sequential(nn.Linear(8, 8), nn.Tanh())])
        if spare:
            self.spare = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class MixedDtypes(nn.Module):
    """Branches in single, double and bfloat16, added up."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.float64, torch.bfloat16)
        self.branches = nn.ModuleList([mlp().to(dtype) for dtype in dtypes])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([b(x.to(b[0].weight.dtype)).double() for b in self.branches]).sum(dim=0)


class ComplexWeights(nn.Module):
    """A complex matrix between two real layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = (nn.Linear(*size, dtype=torch.float64) for size in ((6, 8), (8, 3)))
        self.turn = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.stem(x).to(self.turn.dtype) @ self.turn).abs())


class OddShapes(nn.Module):
    """A scalar parameter, an empty one, and one that is a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.across = nn.Parameter((torch.randn(3, 6) / 2).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x @ self.across) + self.empty.sum()


# ---------------------------------------------------------------------------------------------------------
# Edits after wrapping
# ---------------------------------------------------------------------------------------------------------
def unfreeze(module: nn.Module) -> None:
    module.requires_grad_(True)


def freeze(module: nn.Module) -> None:
    module.get_submodule("0").requires_grad_(False)
    module.zero_grad()


def replace(module: nn.Module) -> None:
    """The last layer's weight becomes another Parameter."""
    layer = module.get_submodule("4")
    layer.weight = nn.Parameter(layer.weight.detach() / 2)


# ---------------------------------------------------------------------------------------------------------
# The specimens
# ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Specimen:
    """One model and one way to train it.

    Attributes:
        name: as it stands in the test's id.
        build: the model; called with torch's seed set, on every rank alike.
        batch: (rank, step, micro-batch) -> inputs and target of that rank.
        loss: (net, batch) -> the mean loss over the batch's samples.
        program: how a step runs its forwards and backwards.
        micro_batches: how many of them a step has.
        wrapper: keyword arguments of the wrapper.
        couples: whether samples of a batch see each other (BatchNorm): one process then runs
            each rank's batch by itself, with buffers of its own, and rank 0's buffers go on.
        bypass: the loss is computed on `wrapper.module`, past the wrapper's forward.
        edit: what is done to the model after some steps; the optimizer is made anew then.
        momentum: of SGD.
        dtype: of the model's parameters; None leaves them as built.
        tolerance: relative and absolute, against one process.
        torch_wrong: why torch's DDP is no measure here; empty where it is right.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch] = vectors
    loss: Callable[[Net, Batch], Tensor] = squared
    program: Callable[[LossOf, NoSync, int], Tensor] = one_backward
    micro_batches: int = 1
    wrapper: dict[str, Any] = field(default_factory=dict)
    couples: bool = False
    bypass: bool = False
    edit: Callable[[nn.Module], None] | None = None
    momentum: float = 0.9
    dtype: torch.dtype | None = torch.float64
    tolerance: float = 1e-9
    torch_wrong: str = ""


FIND = {"find_unused_parameters": True}

ZOO = [
    Specimen("mlp", mlp),
    Specimen("mlp_single_precision", mlp, batch=single_vectors, dtype=torch.float32, tolerance=2e-5),
    Specimen("mlp_many_buckets", mlp, wrapper={"bucket_cap_mb": 0.0005}),
    Specimen("mlp_bucket_views", mlp, wrapper={"gradient_as_bucket_view": True}),
    Specimen("mlp_static_graph", mlp, wrapper={"static_graph": True}),
    Specimen("mlp_find_unused", mlp, wrapper=FIND),
    Specimen("tied_weights", TiedWeights, tokens, classified),
    Specimen("frozen_part", frozen_first_layer),
    Specimen("odd_shapes", OddShapes),
    Specimen("complex_weights", ComplexWeights, dtype=None),
    Specimen("mixed_dtypes", MixedDtypes, dtype=None, tolerance=3e-2),
    Specimen("unused_branch", UnusedBranch, wrapper=FIND),
    Specimen("branch_by_rank", Routed, routed_by_rank, wrapper=FIND),
    Specimen("branch_in_turn", Routed, routed_in_turn, wrapper=FIND),
    Specimen("branch_seldom", Routed, routed_seldom, wrapper=FIND),
    Specimen(
        "branch_in_turn_views", Routed, routed_in_turn, wrapper=FIND | {"gradient_as_bucket_view": True}
    ),
    Specimen("branch_accumulated", Routed, routed_in_turn, program=accumulate, micro_batches=2, wrapper=FIND),
    Specimen("conv_batch_norm", conv_batch_norm, images, couples=True),
    Specimen(
        "conv_batch_norm_accumulated",
        conv_batch_norm,
        images,
        program=accumulate,
        micro_batches=3,
        couples=True,
    ),
    Specimen(
        "conv_batch_norm_several_forwards",
        conv_batch_norm,
        images,
        program=several_forwards,
        micro_batches=2,
        couples=True,
    ),
    Specimen("conv_frozen_statistics", conv_frozen_statistics, images),
    Specimen("conv_channels_last", conv_channels_last, images),
    Specimen("embedding_dense", lambda: BagOfTokens(False), tokens, classified),
    Specimen("embedding_sparse", lambda: BagOfTokens(True), tokens, classified, momentum=0.0),
    Specimen("checkpoint", lambda: Checkpointed(False)),
    Specimen("checkpoint_find_unused", lambda: Checkpointed(False, spare=True), wrapper=FIND),
    Specimen("checkpoint_shared_block", lambda: Checkpointed(False, shared=True)),
    Specimen("reentrant", lambda: Checkpointed(True)),
    Specimen(
        "reentrant_find_unused",
        lambda: Checkpointed(True, spare=True),
        wrapper=FIND,
        torch_wrong="raises: parameter marked ready twice",
    ),
    Specimen(
        "reentrant_shared_block",
        lambda: Checkpointed(True, shared=True),
        torch_wrong="raises: parameter marked ready twice",
    ),
    Specimen(
        "reentrant_shared_static_graph",
        lambda: Checkpointed(True, shared=True),
        wrapper={"static_graph": True},
    ),
    Specimen("reentrant_accumulated", lambda: Checkpointed(True), program=accumulate, micro_batches=2),
    Specimen("accumulated", mlp, program=accumulate, micro_batches=3),
    Specimen(
        "accumulated_views",
        mlp,
        program=accumulate,
        micro_batches=3,
        wrapper={"gradient_as_bucket_view": True},
    ),
    Specimen(
        "accumulated_static_graph",
        mlp,
        program=accumulate,
        micro_batches=3,
        wrapper={"static_graph": True},
        torch_wrong="internal assertion fails when the first backward is under no_sync",
    ),
    Specimen("no_sync_around_backward", mlp, program=accumulate_around_backward, micro_batches=3),
    Specimen("several_forwards", mlp, program=several_forwards, micro_batches=3),
    Specimen("several_backwards", mlp, program=several_backwards, micro_batches=2),
    Specimen(
        "forwards_then_backwards",
        mlp,
        program=forwards_then_backwards,
        micro_batches=3,
        torch_wrong="later backwards are not averaged",
    ),
    Specimen("forward_bypassed", mlp, bypass=True, torch_wrong="not averaged without its forward"),
    Specimen(
        "unfrozen_after_wrapping",
        frozen_first_layer,
        edit=unfreeze,
        torch_wrong="unfrozen parameters are not averaged",
    ),
    Specimen("frozen_after_wrapping", mlp, edit=freeze, torch_wrong="waits for the frozen parameter"),
    Specimen("replaced_after_wrapping", mlp, edit=replace, torch_wrong="waits for the replaced parameter"),
]
BY_NAME = {specimen.name: specimen for specimen in ZOO}
