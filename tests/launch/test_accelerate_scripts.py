"""A script written for Accelerate, with the calls that its own examples make, started by our launcher."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from tests.launch.launching import run, script

STEPS, BATCH, RANKS = 3, 4, 2
SCRIPT = f"""
import json, os
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
set_seed(0)
folder = os.environ["FOLDER"]
with accelerator.main_process_first():
    torch.manual_seed(0)
    inputs, targets = torch.randn({STEPS * BATCH * RANKS}, 3), torch.randn({STEPS * BATCH * RANKS}, 1)
net = torch.nn.Linear(3, 1)
net.load_state_dict({{"weight": torch.ones(1, 3), "bias": torch.zeros(1)}})
optimizer = torch.optim.SGD(net.parameters(), 0.1)
loader = DataLoader(TensorDataset(inputs, targets), {BATCH})
held_out = DataLoader(TensorDataset(torch.arange(7.0)), 2)
net, optimizer, loader, held_out = accelerator.prepare(net, optimizer, loader, held_out)
for step, (x, y) in enumerate(loader):
    with accelerator.accumulate(net):
        loss = (net(x) - y).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 1e6)
        optimizer.step()
        optimizer.zero_grad()
    if step == 0:
        accelerator.save_state(os.path.join(folder, "state"))
    if accelerator.is_local_main_process and step == {STEPS - 1}:
        accelerator.set_trigger()
    stop = accelerator.check_trigger()
seen = [value for (batch,) in held_out for value in accelerator.gather_for_metrics(batch).tolist()]
accelerator.wait_for_everyone()
ranks = gather_object([accelerator.process_index])
weights = [p.detach().flatten().tolist() for p in accelerator.unwrap_model(net).parameters()]
accelerator.load_state(os.path.join(folder, "state"))
again = [p.detach().flatten().tolist() for p in accelerator.unwrap_model(net).parameters()]
accelerator.end_training()
with open(os.path.join(folder, f"{{accelerator.process_index}}.json"), "w") as file:
    kind, world = str(accelerator.distributed_type), accelerator.num_processes
    json.dump([seen, ranks, weights, again, stop, kind, world], file)
"""


def single_process(steps: int) -> list[list[float]]:
    """The weights after some steps of one process on the joined batches."""
    torch.manual_seed(0)
    samples = STEPS * BATCH * RANKS
    inputs, targets = torch.randn(samples, 3), torch.randn(samples, 1)
    net = nn.Linear(3, 1)
    net.load_state_dict({"weight": torch.ones(1, 3), "bias": torch.zeros(1)})
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in list(zip(inputs.split(BATCH * RANKS), targets.split(BATCH * RANKS), strict=True))[:steps]:
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    return [p.detach().flatten().tolist() for p in net.parameters()]


def test_accelerates_calls(tmp_path: Path) -> None:
    job = script(tmp_path, SCRIPT)
    done = run("--cpu", "--num_processes", str(RANKS), job, FOLDER=str(tmp_path))
    assert done.returncode == 0, done.stderr
    for rank in range(RANKS):
        seen, ranks, weights, again, stop, kind, world = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen == [float(number) for number in range(7)]
        assert (ranks, stop, kind, world) == ([0, 1], True, "DistributedType.MULTI_CPU", RANKS)
        for found, steps in ((weights, STEPS), (again, 1)):
            wanted = single_process(steps)
            assert all(
                torch.allclose(torch.tensor(a), torch.tensor(b)) for a, b in zip(found, wanted, strict=True)
            )
