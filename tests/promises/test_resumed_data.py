"""Positions in the data of training jobs: steps that a `GradScaler` skips, accumulation, other numbers of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tutti
from support import run_ok
from tutti.world import World

NUM_SAMPLES = 24


def dataset(num_samples: int = NUM_SAMPLES) -> TensorDataset:
    x = torch.randn(num_samples, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x[:, :1].clone(), torch.arange(num_samples))


class Run:
    """A script that continues from a state of an earlier one."""

    def __init__(self, world: World, strategy: str, state: dict[str, Any] | None = None, **options: Any) -> None:
        self.model = nn.Linear(3, 1).double()
        nn.init.constant_(self.model.weight, 0.5)
        nn.init.constant_(self.model.bias, 0.1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        self.job = tutti.distribute(self.model, self.optimizer, strategy, world=world)
        self.data = tutti.shard(DataLoader(dataset(), **{"batch_size": 2, "shuffle": True, **options}), world=world)
        if state is not None:
            self.data.load_state_dict(state["data"])

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint would have."""
        optimizer = self.optimizer.state_dict()
        copies = {name: value.clone() for name, value in self.model.state_dict().items()}
        momentum = {
            number: {"momentum_buffer": buffer["momentum_buffer"].clone()}
            for number, buffer in optimizer["state"].items()
        }
        return {"model": copies, "optimizer": {**optimizer, "state": momentum}, "data": self.data.state_dict()}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.model(x) - y).square().mean()


# --- steps that a GradScaler skips ---


def _scaled(world: World, strategy: str, zero_first: bool, to_none: bool, num_steps: int) -> list[list[int]]:
    """The position after every step; the second one is void."""
    run = Run(world, strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    positions = []
    with run.job:
        for number, (x, y, _) in zip(range(num_steps), run.data, strict=False):
            if zero_first:
                run.optimizer.zero_grad(set_to_none=to_none)
            factor = torch.inf if number == 1 else 1.0
            scaler.scale(run.loss(x, y) * factor).backward()
            scaler.step(run.optimizer)
            scaler.update()
            if not zero_first:
                run.optimizer.zero_grad(set_to_none=to_none)
            positions.append(run.data.state_dict()["positions"][world.rank])
    return positions


@pytest.mark.parametrize(("zero_first", "to_none"), [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize("strategy", ["ring", "bmuf:every=2"])
def test_a_step_that_is_skipped_has_used_its_samples(strategy: str, zero_first: bool, to_none: bool) -> None:
    """The undisturbed run goes on with the next batch, so one that continues does too."""
    for positions in run_ok(_scaled, strategy, zero_first, to_none, 4, size=2, transport="sockets"):
        assert positions == [[0, 1], [0, 2], [0, 3], [0, 4]]


# --- gradient accumulation ---


def _accumulating(world: World, in_no_sync: bool) -> list[list[int]]:
    run = Run(world, "ring")
    positions = []
    with run.job:
        for number, (x, y, _) in enumerate(run.data):
            ends = number % 3 == 2
            if in_no_sync and not ends:
                with run.job.no_sync():
                    run.loss(x, y).backward()
            else:
                run.loss(x, y).backward()
            if ends:
                run.optimizer.step()
                run.optimizer.zero_grad()
            positions.append(run.data.state_dict()["positions"][world.rank])
    return positions


@pytest.mark.parametrize("in_no_sync", [False, True])
def test_batches_whose_gradients_accumulate_are_not_used_yet(in_no_sync: bool) -> None:
    for positions in run_ok(_accumulating, in_no_sync, size=2, transport="sockets"):
        assert positions == [[0, steps] for steps in (0, 0, 3, 3, 3, 6)]


# --- other numbers of ranks ---


def _steps(
    world: World, state: dict[str, Any] | None, num_steps: int
) -> tuple[dict[str, Any], list[int], list[Tensor]]:
    """Train for some steps, or to the end of the second epoch; what was used, and the state after it."""
    run = Run(world, "ring", state)
    used: list[int] = []
    with run.job:
        for epoch in run.data.epochs(2):
            for x, y, numbers in epoch:
                run.loss(x, y).backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
                used += [
                    int(number) + NUM_SAMPLES * run.data.epoch for number in numbers if world.sample_counts.num_samples
                ]
                num_steps -= 1
                if num_steps == 0:
                    return run.state(), used, []
        return run.state(), used, [parameter.detach().clone() for parameter in run.model.parameters()]


@pytest.mark.parametrize("sizes", [(2, 5, 1), (3, 2, 4)], ids=str)
def test_a_run_on_other_numbers_of_ranks_ends_where_the_undisturbed_one_ends(
    sizes: tuple[int, ...],
) -> None:
    """Where five ranks share a step of four samples, one of them takes part with weight 0."""
    state, used = None, []
    for number, size in enumerate(sizes):
        num_steps = -1 if number + 1 == len(sizes) else 3
        results = run_ok(_steps, state, num_steps, size=size, transport="sockets")
        state = results[0][0]
        used += [sample for _, part, _ in results for sample in part]
    assert sorted(used) == list(range(2 * NUM_SAMPLES))
    undisturbed = run_ok(_steps, None, -1, size=sizes[0], transport="sockets")[0][2]
    for mine, wanted in zip(results[0][2], undisturbed, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-12)


def _with_checkpoints(world: World, strategy: str, folder: Path, num_steps: int) -> tuple[int, int]:
    """Save after every step; stop after some steps of this world, or at the end of the second epoch."""
    run = Run(world, strategy)
    before = 0 if run.job.restore(folder, run.data) is None else run.job.steps
    for epoch in run.data.epochs(2):
        for x, y, _ in epoch:
            run.loss(x, y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.job.checkpoint(folder, run.data, every=1)
            if run.job.steps == before + num_steps:
                run.job.__exit__(KeyError, None, None)
                return before, num_steps
    steps = run.job.steps - before
    run.job.finish()
    return before, steps


@pytest.mark.parametrize("strategy", ["ring", "bmuf:every=2", "diloco:every=3", "gossip", "peers", "ps:async"])
def test_more_ranks_than_samples_in_a_step_take_the_same_steps_under_every_strategy(
    strategy: str, tmp_path: Path
) -> None:
    """Five ranks share steps of four samples: one that went without a step would be missing in collective calls."""
    run_ok(_with_checkpoints, strategy, tmp_path, 3, size=2, transport="sockets")
    results = run_ok(_with_checkpoints, strategy, tmp_path, -1, size=5, transport="sockets")
    assert results == [(3, 9)] * 5


def _uneven(world: World, strategy: str, folder: Path) -> int:
    run = Run(world, strategy)
    data = tutti.shard(dataset(NUM_SAMPLES + 1), world=world)
    with run.job:
        for epoch in data.epochs(2):
            for x, y, _ in epoch:
                run.loss(x[None], y[None]).backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
                run.job.checkpoint(folder, data, every=13)  # In the last step of an epoch.
        return run.job.steps


@pytest.mark.parametrize("strategy", ["ring", "bmuf:every=2", "gossip", "peers", "ps:async"])
def test_ranks_without_a_last_item_are_in_its_checkpoint(strategy: str, tmp_path: Path) -> None:
    assert run_ok(_uneven, strategy, tmp_path, size=2, transport="sockets") == [26, 26]
    assert sorted(folder.name for folder in tmp_path.glob("step-*")) == ["step-00000013", "step-00000026"]


# --- an asynchronous strategy: ranks at different positions ---


def _at_own_speed(world: World, state: dict[str, Any] | None, num_steps: list[int]) -> tuple[dict[str, Any], list[int]]:
    run = Run(world, "ps:async", state)
    used: list[int] = []
    left = num_steps[world.rank]
    for epoch in run.data.epochs(2):
        for x, y, numbers in epoch:
            if left == 0:
                break
            run.loss(x, y).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            left -= 1
            used += [
                int(number) + NUM_SAMPLES * run.data.epoch for number in numbers if world.sample_counts.num_samples
            ]
        if left == 0:
            break
    state = {"data": run.data.state_dict(), **{name: part for name, part in run.state().items() if name != "data"}}
    run.job.finish()
    return state, used


def test_asynchronous_ranks_that_are_apart_use_every_sample_once() -> None:
    used: list[int] = []
    state = None
    for num_steps in ([7, 3], [2, 4, 1], [-1, -1]):
        results = run_ok(_at_own_speed, state, num_steps, size=len(num_steps), transport="sockets")
        state = results[0][0]
        used += [sample for _, part in results for sample in part]
    assert sorted(used) == list(range(2 * NUM_SAMPLES))
