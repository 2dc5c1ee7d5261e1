"""Killed workers: the others continue, reach the expected accuracy, and log who left."""

import os
import signal
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import tutti
from tutti.recipes import collate, recipe
from tutti.strategies import parse

DIE_AT = {1: 30, 2: 60}
"""The step at which each of these ranks is killed."""


def work(text: str) -> Any:
    torch.set_num_threads(1)
    tutti.init()
    made = recipe("digits")
    splits = made.data(None)
    torch.manual_seed(0)
    model = made.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    job = tutti.distribute(model, optimizer, parse(text))
    loader = tutti.shard(DataLoader(splits.train, batch_size=16, shuffle=True, collate_fn=collate))
    for _ in range(10):
        for x, y in loader:
            made.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if job.steps == DIE_AT.get(job.world.rank):
                os.kill(os.getpid(), signal.SIGKILL)
    job.finish()
    with torch.no_grad():
        x, y = next(iter(DataLoader(splits.test, batch_size=len(splits.test), collate_fn=collate)))
        return float(made.accuracy(model(x), y))


@pytest.mark.parametrize(("text", "processes"), [("ps:async", 4), ("ps:ssp=3,servers=1", 5)])
def test_two_of_four_workers_are_killed(text: str, processes: int, capfd: pytest.CaptureFixture[str]) -> None:
    found = tutti.launch(work, text, workers=processes)
    assert found[1:3] == [None, None]
    assert found[0] == found[3]
    assert found[0] > 0.93
    said = capfd.readouterr().err
    for rank in DIE_AT:
        assert f"[rank {rank}] was killed by SIGKILL: the others go on without it" in said
        assert f"worker {rank} left at clock" in said
