"""A peer that is killed: the others go on without a pause, and agree in the end."""

import os
import signal
import time

import pytest
import torch
from torch import nn

import tutti
from tutti.strategies import parse

WORKERS, VICTIM, STEPS, DIES_AT = 4, 2, 120, 40
LONGEST_PAUSE_SECONDS = 1.0


def work(text: str) -> tuple[float, float, int]:
    """The longest pause between steps, the sum of all parameters, and how many are left."""
    torch.set_num_threads(1)
    world = tutti.init()
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(32, 200), nn.Tanh(), nn.Linear(200, 50))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = tutti.distribute(model, optimizer, parse(text))
    last_s, longest_s = time.monotonic(), 0.0
    for step in range(STEPS):
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == VICTIM and step == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.005)
        if step > DIES_AT // 2:  # Connections and compilers are over.
            longest_s = max(longest_s, time.monotonic() - last_s)
        last_s = time.monotonic()
    left = len(job._exchange.context.group.alive)  # type: ignore[attr-defined]
    job.finish()
    total = sum(float(p.detach().double().sum()) for p in model.parameters())
    return longest_s, total, left


@pytest.mark.parametrize("text", ["peers+threshold", "gossip", "gossip:pairs=async"])
def test_one_of_four_is_killed(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = tutti.launch(work, text, workers=WORKERS)
    assert found[VICTIM] is None
    rest = [each for each in found if each is not None]
    assert len(rest) == WORKERS - 1
    pauses, totals, left = zip(*rest, strict=True)
    print(f"{text}: longest pauses {', '.join(f'{pause:.3f}' for pause in pauses)} s")
    assert max(pauses) < LONGEST_PAUSE_SECONDS
    assert len(set(totals)) == 1
    assert left == (WORKERS - 1,) * (WORKERS - 1)
    said = capfd.readouterr().err
    assert f"[rank {VICTIM}] was killed by SIGKILL: the others go on without it" in said
    assert f"rank 0: rank {VICTIM} is gone at clock" in said
