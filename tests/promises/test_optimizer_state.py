"""The optimiser's state after a job, and inside a consensus: what servers had is there, to be saved or used."""

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from support import run_ok
from tutti.job import Job, distribute
from tutti.strategies import as_strategy
from tutti.world import World

SIZE = 3
SERVED = ("ps:bsp", "ps:bsp,bucket_bytes=100", "ps:bsp,servers=1", "ps:softsync=3", "poseidon:bsp")


def net() -> nn.Sequential:
    """The same every time, whatever other ranks draw meanwhile."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 4), nn.Linear(4, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def make(name: str, model: nn.Module) -> Optimizer:
    if name == "adamw":
        return AdamW(model.parameters(), lr=0.01)
    return SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def go(model: nn.Module, optimizer: Optimizer, steps: range, rank: int = 0, size: int = 1) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(13, 6, generator=generator, dtype=torch.float64).tensor_split(size)[rank]
        F.mse_loss(model(x), x[:, :1]).backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: Optimizer) -> tuple[list[Tensor], dict[str, Any]]:
    return [p.detach().clone() for p in model.parameters()], copy.deepcopy(optimizer.state_dict())


def alone(name: str, steps: int) -> tuple[list[Tensor], dict[str, Any]]:
    model = net()
    optimizer = make(name, model)
    go(model, optimizer, range(steps))
    return state_of(model, optimizer)


def assert_alike(got: tuple[list[Tensor], dict[str, Any]], expected: tuple[list[Tensor], dict[str, Any]]) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got[1]["state"], expected[1]["state"], rtol=1e-10, atol=1e-12)


def start(world: World, strategy: str, name: str) -> tuple[nn.Module, Optimizer, Job]:
    model = net()
    optimizer = make(name, model)
    return model, optimizer, distribute(model, optimizer, as_strategy(strategy), world=world)


def change_strategy(world: World, strategy: str, name: str) -> list[Any]:
    """Two steps, a consensus, one step, then two under all-reduce. Return the states after each."""
    model, optimizer, job = start(world, strategy, name)
    size = job.world.size
    go(model, optimizer, range(2), world.rank, size)
    with job.consensus():
        states = [state_of(model, optimizer)]
    with job.consensus(optimizer=False):
        pass
    go(model, optimizer, range(2, 3), world.rank, size)
    job.finish()
    states.append(state_of(model, optimizer))
    if size == world.size:  # Dedicated servers are gone.
        job = distribute(model, optimizer, "native", world=world)
        go(model, optimizer, range(3, 5), world.rank, size)
        job.finish()
        states.append(state_of(model, optimizer))
    return states


@pytest.mark.parametrize("name", ["momentum", "adamw"])
@pytest.mark.parametrize("strategy", SERVED)
@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
def test_the_optimiser_has_the_state_of_servers(transport: str, strategy: str, name: str) -> None:
    """A run that changes from servers to all-reduce ends where an uninterrupted one does."""
    if "servers=" in strategy and transport == "shared_memory":
        pytest.skip("dedicated servers use messages on every transport")
    num_servers = as_strategy(strategy).num_dedicated_servers
    for states in run_ok(change_strategy, strategy, name, size=SIZE + num_servers, transport=transport)[:SIZE]:
        for got, steps in zip(states, (2, 3, 5), strict=False):
            assert_alike(got, alone(name, steps))


@pytest.mark.parametrize("strategy", ["ps:async", "ps:async,locks", "ps:ssp=2", "peers", "gossip", "bmuf:every=2"])
def test_every_strategy_leaves_a_state(strategy: str) -> None:
    """What it is depends on timing, or on the rank; that there is one does not."""

    def train(world: World) -> list[dict[str, Any]]:
        model, optimizer, job = start(world, strategy, "adamw")
        # One rank that is ready early has not seen all of the shared state yet.
        go(model, optimizer, range(1 if world.rank else 3), world.rank, world.size)
        with job.consensus():
            inside = copy.deepcopy(optimizer.state_dict())
        go(model, optimizer, range(3, 5), world.rank, world.size)
        job.finish()
        return [inside, optimizer.state_dict()]

    by_rank = run_ok(train, size=2, transport="shared_memory")
    for states in by_rank:
        for state in states:
            assert len(state["state"]) == 6
            assert all(torch.isfinite(entry["exp_avg"]).all() for entry in state["state"].values())
    if strategy.startswith("ps:"):
        for first, second in zip(*by_rank, strict=True):
            torch.testing.assert_close(first["state"], second["state"], rtol=0, atol=0)


def test_an_empty_state_is_not_saved_silently(caplog: pytest.LogCaptureFixture) -> None:
    def train(world: World) -> tuple[int, int]:
        model, optimizer, job = start(world, "ps:bsp", "adamw")
        go(model, optimizer, range(1), world.rank, world.size)
        outside = len(optimizer.state_dict()["state"])
        job.finish()
        return outside, len(optimizer.state_dict()["state"])

    with caplog.at_level(logging.WARNING, "tutti"):
        assert run_ok(train, size=1, transport="sockets") == [(0, 6)]
    assert [record.message for record in caplog.records if "job.consensus()" in record.message]
    assert len(caplog.records) == 1
