"""Fused optimisers and models in `channels_last`: a state that was sent or saved has the parameters' memory order."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from support import run_ok
from tutti.job import Job, distribute
from tutti.world import World


class Run:
    """A convolution in channels_last, whose optimiser goes through memory and looks at no strides."""

    def __init__(self, fused: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)
        self.model = nn.Conv2d(3, 4, 3)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.model = self.model.to(memory_format=torch.channels_last)
        self.optimizer = Adam(self.model.parameters(), lr=0.01, fused=fused)

    def distribute(self, world: World, strategy: str) -> Job:
        job = distribute(self.model, self.optimizer, strategy, world=world)
        job.expect(same_batches=True)
        return job

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            self.model(torch.randn(2, 3, 8, 8, generator=generator)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def alone(fused: bool) -> list[Tensor]:
    run = Run(fused)
    run.steps(0, 6)
    return run.parameters


def check(found: list[Tensor]) -> None:
    """They are those of one worker that was never stopped, also of one whose optimiser looks at strides."""
    for wanted in (alone(fused=True), alone(fused=False)):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "strategy", ["native", "bmuf:every=2", "diloco:every=3", "gossip", "ps:bsp", "ps:bsp,servers=1"]
)
def test_a_continued_run_has_the_state_of_each_element(strategy: str, tmp_path: Path) -> None:
    def train(world: World, first: int, last: int) -> list[Tensor]:
        run = Run()
        with run.distribute(world, strategy) as job:
            assert (job.restore(tmp_path) is None) == (first == 0)
            run.steps(first, last)
            job.checkpoint(tmp_path)
        return run.parameters

    def undisturbed(world: World) -> list[Tensor]:
        run = Run()
        with run.distribute(world, strategy):
            run.steps(0, 6)
        return run.parameters

    size = 3 if "servers" in strategy else 2
    run_ok(train, 0, 3, size=size, transport="sockets")
    found = run_ok(train, 3, 6, size=size, transport="sockets")[0]
    for mine, wanted in zip(found, run_ok(undisturbed, size=size, transport="sockets")[0], strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)
    if strategy not in ("bmuf:every=2", "diloco:every=3"):
        check(found)


def test_a_state_that_rank_0_brings_along_is_that_of_each_element_on_all_ranks() -> None:
    def train(world: World) -> list[Tensor]:
        run = Run()
        run.steps(0, 3)
        with run.distribute(world, "native"):
            run.steps(3, 6)
        return run.parameters

    for found in run_ok(train, size=2, transport="sockets"):
        check(found)


def test_training_goes_on_alone_with_the_state_that_servers_had() -> None:
    def train(world: World) -> list[Tensor]:
        run = Run()
        with run.distribute(world, "ps:bsp"):
            run.steps(0, 3)
        run.steps(3, 6)
        return run.parameters

    for found in run_ok(train, size=2, transport="sockets"):
        check(found)
