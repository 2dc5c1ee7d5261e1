"""Blocks of local steps when a loss interrupts ranks at different places in a block: all end their blocks together."""

import os
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tutti

VICTIM, EARLY = 1, 0
"""The rank that is killed, and the one that hears of it two steps before the others."""
DIES_AT = 5
WAIT_S = 30.0


def train(strategy: str) -> tuple[int, list[float]]:
    """Train; return the size of the world and the parameters. Ranks also make a collective call after each epoch."""
    world = tutti.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = tutti.distribute(model, optimizer, strategy)
    data = TensorDataset(torch.randn(3 * 4 * 19, 4, dtype=torch.float64))  # Steps are no multiple of a block.
    batches = tutti.shard(DataLoader(data, batch_size=4))
    number, seen = int(os.environ["RANK"]), 0
    for epoch in batches.epochs(2):
        for (x,) in epoch:
            if job.steps == DIES_AT and number == VICTIM:
                os.kill(os.getpid(), signal.SIGKILL)
            deadline = time.monotonic() + WAIT_S
            assert world.elastic is not None
            # The others come to the end of their block, where they wait for the lost rank.
            while job.steps == DIES_AT and number == EARLY and world.size == 3 and not world.elastic.member.lost():
                assert time.monotonic() < deadline
                time.sleep(0.002)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += len(x)
        assert job.reduce(float(seen), "sum") > 0
    job.finish()
    return world.size, torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()


@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
@pytest.mark.parametrize("strategy", ["averaging:every=4", "bmuf:every=4", "averaging:every=4,overlap=1"])
def test_a_loss_inside_a_block(strategy: str, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTTI_ELASTIC", "1:3")
    found = tutti.launch(train, strategy, workers=3, transport=transport)
    assert [each is None for each in found] == [False, True, False]
    assert found[0] == found[2]
    assert found[0][0] == 2


def train_without_calls(strategy: str) -> int:
    """Train with ranks that are unequally fast, and so end their blocks after different steps; return the steps."""
    world = tutti.init()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = tutti.distribute(model, optimizer, strategy)
    batches = tutti.shard(DataLoader(TensorDataset(torch.randn(2 * 4 * 20, 4)), batch_size=4))
    for epoch in batches.epochs(1):
        for (x,) in epoch:
            time.sleep(0.004 * (1 + world.rank))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    job.finish()
    return job.steps


def test_ranks_that_end_blocks_by_the_clock_come_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTTI_ELASTIC", "1:2")
    assert tutti.launch(train_without_calls, "averaging:every=25ms", workers=2) == [20, 20]
