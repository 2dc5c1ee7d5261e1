"""Ranks that are killed anywhere, under strategies that go on without them: every sample of every epoch once."""

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tutti

NUM_SAMPLES, NUM_EPOCHS, WORKERS = 96, 3, 3
NUM_STEPS = NUM_SAMPLES // (4 * WORKERS) * NUM_EPOCHS

STRATEGIES = [
    *("ps:bsp", "ps:ssp=2", "ps:softsync=2", "ps:async", "ps:async,locks"),
    *("peers", "peers+threshold", "gossip", "gossip:pairs=async"),
]


def work(folder: str, strategy: str, victim: int, dies_at: int, in_step: bool) -> tuple[int, int, int]:
    """Train, and write down which samples each step uses; return the loops, the changes and the samples lost."""
    torch.set_num_threads(1)
    world = tutti.init()
    rank = world.rank
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(NUM_SAMPLES, 8), torch.randint(0, 3, (NUM_SAMPLES,)), torch.arange(NUM_SAMPLES))
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job = tutti.distribute(model, optimizer, strategy)
    batches = tutti.shard(DataLoader(data, batch_size=4, shuffle=True))
    speed, num_loops = random.Random(rank), 0
    with open(Path(folder) / str(rank), "w") as log:
        for epoch in batches.epochs(NUM_EPOCHS):
            num_loops += 1
            for x, y, numbers in epoch:
                weighs = world.sample_counts.num_samples > 0
                print(json.dumps([batches._cursor.epoch, numbers.tolist() if weighs else []]), file=log, flush=True)
                F.cross_entropy(model(x), y).backward()
                if rank == victim and job.steps == dies_at and in_step:
                    os.kill(os.getpid(), signal.SIGKILL)
                before = job.steps
                optimizer.step()
                optimizer.zero_grad()
                if job.steps == before:  # The step was void.
                    print("null", file=log, flush=True)
                if rank == victim and job.steps == dies_at and not in_step:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.01 * speed.random())  # Ranks are apart.
    changes = job.metrics.changes
    job.finish()
    return num_loops, changes.generations, changes.lost_samples


def steps_of(log: Path) -> list[list[tuple[int, int]]]:
    """The samples of each step that was not void."""
    steps: list[list[tuple[int, int]]] = []
    for line in map(json.loads, log.read_text().splitlines()):
        if line is None:
            steps.pop()
        else:
            steps.append([(line[0], number) for number in line[1]])
    return steps


@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_sample_is_used_once(
    strategy: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = random.Random(f"{strategy} {transport}")
    victim, dies_at, in_step = drawn.randrange(WORKERS), drawn.randrange(1, NUM_STEPS), drawn.random() < 0.5
    monkeypatch.setenv("TUTTI_ELASTIC", f"1:{WORKERS}")
    found = tutti.launch(work, str(tmp_path), strategy, victim, dies_at, in_step, workers=WORKERS, transport=transport)
    assert [found[rank] is None for rank in range(WORKERS)] == [rank == victim for rank in range(WORKERS)]
    lost_samples = set()
    for each in found:
        if each is not None:
            num_loops, num_changes, most = each
            assert (num_loops, num_changes) == (NUM_EPOCHS, 1)
            lost_samples.add(most)
    assert len(lost_samples) == 1, "all count alike"
    used = Counter(
        sample
        for rank in range(WORKERS)
        if rank != victim
        for step in steps_of(tmp_path / str(rank))
        for sample in step
    )
    assert set(used.values()) == {1}, "no sample comes twice"
    # What is left for the lost rank are its first steps: those that are in the model.
    rest = {(epoch, number) for epoch in range(NUM_EPOCHS) for number in range(NUM_SAMPLES)} - set(used)
    own = steps_of(tmp_path / str(victim))
    num_steps = 0
    while rest and num_steps < len(own) and rest.issuperset(own[num_steps]):
        rest -= set(own[num_steps])
        num_steps += 1
    # Of parameters that were lost with their server, nobody knows what was in them.
    assert len(rest) <= max(lost_samples) * (transport == "sockets" and strategy.startswith("ps:"))
    if strategy.startswith("ps:") and transport == "shared_memory":
        assert num_steps in ({dies_at, dies_at + 1} if in_step else {dies_at}), "all that was pushed is in the model"
