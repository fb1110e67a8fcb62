"""Lightning's strategies train the same with our class in the place of torch's."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, TensorDataset

from paceline import DistributedDataParallel
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="Lightning is not installed"
)
TORCHS = nn.parallel.DistributedDataParallel
WORLD_SIZE = 2


@dataclass
class Fit:
    """What is trained, and with which options of Lightning's.

    Attributes:
        head: the module's last layer is used in every batch, or only in even ones.
        losses: how many backwards a batch has, each with a step of its own; 0 leaves all to Lightning.
        strategy: options of its strategy.
        trainer: options of its Trainer.
    """

    head: str = "always"
    losses: int = 0
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


FITS = {
    "plain": Fit(),
    "accumulation": Fit(trainer={"accumulate_grad_batches": 2}),
    "clipping": Fit(trainer={"gradient_clip_val": 0.1}),
    "bfloat16": Fit(trainer={"precision": "bf16-mixed"}),
    "unused": Fit(head="sometimes", strategy={"find_unused_parameters": True}),
    "static graph": Fit(strategy={"static_graph": True}),
    "hook": Fit(strategy={"ddp_comm_hook": default_hooks.fp16_compress_hook}),
    "manual": Fit(losses=1),
    "manual, two losses": Fit(losses=2),
    "manual, unused": Fit(head="sometimes", losses=1, strategy={"find_unused_parameters": True}),
    "manual, static graph": Fit(losses=1, strategy={"static_graph": True}),
}


def lightning_module(fit: Fit) -> Any:
    import lightning.pytorch as lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh())
            self.out, self.head = nn.Linear(6, 1), nn.Linear(6, 1)
            self.automatic_optimization = fit.losses == 0

        def loss_of(self, batch: Any, index: int) -> Any:
            x, y = batch
            hidden = self.body(x)
            loss = (self.out(hidden) - y).square().mean()
            used = fit.head == "always" or index % 2 == 0
            return loss + self.head(hidden).square().mean() if used else loss

        def training_step(self, batch: Any, index: int) -> Any:
            for _ in range(fit.losses):
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(self.loss_of(batch, index))
                optimizer.step()
            return None if fit.losses else self.loss_of(batch, index)

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("loss", self.loss_of(batch, 0), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return Net()


def environment_of(rank: int, world_size: int) -> Any:
    from lightning.fabric.plugins.environments import LightningEnvironment

    class Started(LightningEnvironment):
        creates_processes_externally = True

        def global_rank(self) -> int:
            return rank

        def local_rank(self) -> int:
            return rank

        def world_size(self) -> int:
            return world_size

    return Started()


def trained(fit: Fit, rank: int, world_size: int, folder: str) -> tuple[dict[str, torch.Tensor], float]:
    """The final state and the loss over the validation data."""
    import lightning.pytorch as lightning
    from lightning.pytorch.strategies import DDPStrategy

    torch.manual_seed(1)
    x = torch.randn(24, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=3)
    net = lightning_module(fit)
    strategy = DDPStrategy(cluster_environment=environment_of(rank, world_size), **fit.strategy)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        **fit.trainer,
    )
    trainer.fit(net, loader, loader)
    state = {name: value.detach().clone() for name, value in net.state_dict().items()}
    return state, float(trainer.callback_metrics["loss"])


def trained_with(ddp: type, rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with mock.patch("lightning.pytorch.strategies.ddp.DistributedDataParallel", ddp):
        return {name: trained(fit, rank, world_size, folder) for name, fit in FITS.items()}


def trained_with_both(rank: int, world_size: int, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    return tuple(trained_with(ddp, rank, world_size, folder) for ddp in (DistributedDataParallel, TORCHS))


def test_lightning_trains_and_validates_the_same(tmp_path):
    found = run_ranks(trained_with_both, WORLD_SIZE, str(tmp_path), timeout=100)
    for name, fit in FITS.items():
        (state, loss), (wanted_state, wanted_loss) = (trained[name] for trained in found[0])
        torch.testing.assert_close(state, wanted_state, msg=lambda text, name=name: f"{name}: {text}")
        if fit.losses == 0:  # else Lightning keeps torch's class from sending buffers: its ranks differ
            assert loss == pytest.approx(wanted_loss, rel=1e-5), name
        other_state, other_loss = found[1][0][name]
        assert loss == other_loss, name
        for key, value in state.items():
            assert torch.equal(value, other_state[key]), (name, key)
