"""Checkpoints of a model on the GPU: continued to the bit, with the generator of the GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from support import run_ok
from tutti.job import distribute
from tutti.world import World

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def train(world: World, folder: Path, steps: int, save_at: int | None) -> list[Tensor]:
    torch.cuda.manual_seed(7)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.5), nn.Linear(64, 4)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    job = distribute(model, optimizer, world=world)
    job.restore(folder)
    for step in range(job.steps, steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + world.rank)).cuda()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == save_at:
            job.checkpoint(folder)
    job.finish()
    return [p.detach().cpu() for p in model.parameters()]


def test_a_continued_run_is_bit_identical(tmp_path: Path) -> None:
    def run(folder: str, steps: int, save_at: int | None) -> Any:
        # One rank: ranks that are threads would draw from one generator of the GPU.
        return run_ok(train, tmp_path / folder, steps, save_at, size=1, transport="sockets")[0]

    wanted = run("whole", 10, None)
    run("stopped", 5, 5)
    torch.cuda.manual_seed(99)
    assert all(map(torch.equal, run("stopped", 10, None), wanted))


def train_in_process(folder: str, steps: int, save_at: int | None) -> list[Tensor]:
    return train(tutti.init(), Path(folder), steps, save_at)


def test_two_ranks_continue(tmp_path: Path) -> None:
    """In processes, each with its own generator of the GPU."""
    wanted = tutti.launch(train_in_process, str(tmp_path / "x"), 4, None, workers=2)
    tutti.launch(train_in_process, str(tmp_path / "y"), 2, 2, workers=2)
    got = tutti.launch(train_in_process, str(tmp_path / "y"), 4, None, workers=2)
    for rank in range(2):
        assert all(map(torch.equal, got[rank], wanted[rank]))
