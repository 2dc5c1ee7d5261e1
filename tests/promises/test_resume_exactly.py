"""A run that was saved, thrown away and resumed on the same world goes on to the bit, under every strategy."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support import run_ok
from tutti.job import Job, distribute
from tutti.strategies import as_strategy
from tutti.world import World

SAVED_AT, END = 4, 8


class Seen(nn.Module):
    """Keeps something of its own on every rank, as a layer with statistics of its inputs may."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.total += x.detach().mean()
        return x * (1 + 0.01 * self.total)


def net() -> nn.Module:
    """The same every time, whatever other ranks draw meanwhile."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        Seen(), nn.Linear(8, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def train(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(5 + world.rank, 8, generator=torch.Generator().manual_seed(100 * step + world.rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, job: Job) -> dict[str, Any]:
    """A checkpoint, as the leader writes it."""
    state = job.state_dict(everywhere=False)
    with job.consensus():
        return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "job": state})


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Everything that this rank has, in one order."""
    states = [optimizer.state[p] for p in model.parameters() if p in optimizer.state]
    return [
        *(value.detach().clone() for value in model.state_dict().values()),
        *(value.clone() for state in states for _, value in sorted(state.items()) if isinstance(value, Tensor)),
    ]


def run(world: World, strategy: str, saved: dict[str, Any] | None) -> tuple[Any, list[Tensor]]:
    """Train from the start, and save on the way; or resume."""
    # In this thread as well: otherwise its first matrix products take several threads, and are rounded otherwise.
    torch.set_num_threads(1)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    job = distribute(model, optimizer, strategy, world=world)
    checkpoint = None
    if saved is None:
        train(job.world, model, optimizer, range(SAVED_AT))
        checkpoint = save(model, optimizer, job)
    else:
        job.load_state_dict(saved["job"])
        assert job.steps == SAVED_AT
    train(job.world, model, optimizer, range(SAVED_AT, END))
    # Each rank's own, where ranks have models of their own; then the one that they agree on. Servers' last version may
    # have arrived or not.
    own = [] if "ps:" in strategy or strategy == "poseidon:bsp" else tensors(model, optimizer)
    with job.consensus():
        own += tensors(model, optimizer)
    job.finish()
    return checkpoint, own


MESSAGES = [
    *("ring", "ring:bucket_bytes=2000", "tree", "butterfly", "recursive_doubling", "cheapest:bucket_bytes=3000"),
    *("onebit:bucket_bytes=2000", "topk:0.1", "quantize:4", "lowrank", "randomk", "threshold", "bf16"),
    "native:skip_converged=0.3,check_every=3",
    *("averaging:every=3", "averaging:every=3,overlap=1", "averaging:every=3,optimizer_state=average"),
    *(
        "bmuf:every=3",
        "bmuf:every=3+onebit",
        "bmuf:every=3,overlap=1",
        "diloco:every=3",
        "diloco:every=3,overlap=1+quantize:4",
    ),
    *("poseidon", "poseidon:rule=broadcast", "poseidon:rule=owners", "poseidon:rule=sacp", "poseidon:bsp"),
    *(
        "ps:bsp",
        "ps:bsp,clip=0.1",
        "ps:bsp+onebit",
        "ps:bsp+quantize:4",
        "ps:bsp,servers=1",
        "ps:bsp,servers=1+topk:0.1",
    ),
    *("gossip", "gossip:graph=ring", "gossip:graph=random"),
]
MEMORY = ["native", "ring", "onebit", "averaging:every=3", "bmuf:every=3+onebit", "ps:bsp", "ps:bsp,clip=0.1", "gossip"]
ALONE = ["native", "onebit", "bmuf:every=3", "ps:bsp", "ps:async", "ps:ssp=2", "gossip", "peers", "auto"]
"""On one rank also those that depend on the order in which ranks come are deterministic."""

CASES = [
    *((strategy, "sockets", 3) for strategy in MESSAGES),
    *((strategy, "shared_memory", 2) for strategy in MEMORY),
    *((strategy, "shared_memory", 1) for strategy in ALONE),
]


@pytest.mark.parametrize(("strategy", "transport", "workers"), CASES)
def test_a_resumed_run_goes_on_to_the_bit(strategy: str, transport: str, workers: int) -> None:
    size = workers + as_strategy(strategy).num_dedicated_servers
    through = run_ok(run, strategy, None, size=size, transport=transport)[:workers]
    resumed = run_ok(run, strategy, through[0][0], size=size, transport=transport)[:workers]
    for rank, ((_, expected), (_, got)) in enumerate(zip(through, resumed, strict=True)):
        assert len(expected) == len(got)
        for number, (one, other) in enumerate(zip(expected, got, strict=True)):
            assert torch.equal(one, other), f"rank {rank}, tensor {number}: {(one - other).abs().max()}"
