"""Losses that are sums over samples, where training continues after the loss of a worker: the sum of those left."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import run_threads
from tutti.job import distribute
from tutti.world import World

WORKERS = 3
STEPS, LEFT_AFTER = 6, 2
_data = torch.Generator().manual_seed(3)
X = torch.randn(STEPS, WORKERS, 4, 5, generator=_data, dtype=torch.float64)
Y = torch.randn(STEPS, WORKERS, 4, 2, generator=_data, dtype=torch.float64)


def net() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).double()
    with torch.no_grad():
        for number, p in enumerate(layers.parameters()):
            p.copy_(torch.sin(3.0 * torch.arange(p.numel()) + number).view_as(p))
    return layers


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)


def train(world: World, strategy: str) -> Any:
    model = net()
    optimizer = sgd(model)
    job = distribute(model, optimizer, strategy, world=world)
    job.expect(loss="sum")
    rank = job.world.rank
    for step in range(STEPS):
        if rank == WORKERS - 1 and step == LEFT_AFTER:
            model(X[step, rank])  # Waits for the parameters that its last update is in.
            return None  # Its world is closed behind it.
        loss = F.mse_loss(model(X[step, rank]), Y[step, rank], reduction="sum")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    job.finish()
    return [p.detach().clone() for p in model.parameters()], [b.clone().double() for b in model.buffers()]


def alone() -> list[Tensor]:
    """Plain PyTorch on the batches of all workers, and from the loss on of those that are left."""
    model = net()
    optimizer = sgd(model)
    for step in range(STEPS):
        for rank in range(WORKERS if step < LEFT_AFTER else WORKERS - 1):
            F.mse_loss(model(X[step, rank]), Y[step, rank], reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("strategy", "transport"),
    [("ps:bsp", "shared_memory"), ("ps:bsp,servers=1", "sockets"), ("ps:bsp,servers=2,clip=1000", "sockets")],
)
def test_the_sum_is_that_of_the_workers_that_are_left(strategy: str, transport: str) -> None:
    servers = int(strategy.partition("servers=")[2][:1] or 0)
    results = run_threads(train, strategy, size=WORKERS + servers, transport=transport)
    for result in results[: WORKERS - 1]:
        assert not isinstance(result, BaseException), results
        parameters, buffers = result
        torch.testing.assert_close(parameters, alone(), rtol=1e-10, atol=1e-10)
        assert float(buffers[1].max()) < 10, "running statistics are means, and not sums"
