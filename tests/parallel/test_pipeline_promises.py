"""Unusual models and uses of a pipeline: each trains as in one process, or is refused with a clear error."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from support import run_ok, run_threads
from tutti.errors import ConfigError, RankLost
from tutti.job import distribute
from tutti.launch import init
from tutti.parallel import Mesh, Pipeline
from tutti.simulation.runs.simulate import simulate
from tutti.strategies import AllReduce
from tutti.world import World

everywhere = pytest.mark.parametrize("transport", ["sockets", "shared_memory"])


def _alone(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> list[Tensor]:
    model = copy.deepcopy(model)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _piped(world: World, model: nn.Module, x: Tensor, y: Tensor, settings: Pipeline, steps: int) -> list[Tensor]:
    model = copy.deepcopy(model)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    mesh = Mesh(pipe=world.size, pipeline=settings)
    with distribute(model, optimizer, world=world, mesh=mesh, example=x) as job:
        pipeline = job.pipeline(F.mse_loss)
        for _ in range(steps):
            optimizer.zero_grad()
            pipeline(x, y)
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


class Masked(nn.Module):
    """Multiplies by a table that several modules share."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) * self.table
        return output


class WithPosition(nn.Module):
    """Adds a parameter of one row, whose gradient is that of its output where there is one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.position = nn.Parameter(torch.randn(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) + self.position
        return output


def _same_table() -> nn.Module:
    table = torch.rand(8).double()
    return nn.Sequential(*(Masked(table) for _ in range(4))).double()


def _in_place() -> nn.Module:
    layers = [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)]
    return nn.Sequential(*layers).double()


def _with_positions() -> nn.Module:
    return nn.Sequential(*(WithPosition() for _ in range(3))).double()


CASES: dict[str, tuple[Any, int, Pipeline]] = {
    "one table in several stages": (_same_table, 2, Pipeline()),
    "in-place layers, also at the start of a stage": (_in_place, 2, Pipeline(cut=[1, 4])),
    "gradients that are received tensors": (_with_positions, 3, Pipeline(schedule="zero-bubble", microbatches=4)),
}


@everywhere
@pytest.mark.parametrize(("make", "size", "settings"), CASES.values(), ids=CASES)
def test_trains_as_one_process(make: Any, size: int, settings: Pipeline, transport: str) -> None:
    torch.manual_seed(0)
    model, x, y = make(), *(torch.randn(4, 8, dtype=torch.float64) for _ in range(2))
    wanted = _alone(model, x, y, 3)
    for found in run_ok(_piped, model, x, y, settings, 3, size=size, transport=transport):
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


@everywhere
def test_a_loss_function_may_keep_the_output(transport: str) -> None:
    """Also if the last stage returns a view of its input."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 4)))

    def train(world: World) -> bool:
        mine, kept, copies = copy.deepcopy(model), list[Tensor](), list[Tensor]()

        def loss(output: Tensor, _: Tensor) -> Tensor:
            kept.append(output.detach())
            copies.append(output.detach().clone())
            return output.square().mean()

        generator = torch.Generator().manual_seed(0)
        mesh = Mesh(pipe=2, pipeline=Pipeline(cut=[1, 1]))
        x = torch.randn(4, 4)
        with distribute(mine, SGD(mine.parameters(), lr=0.1), world=world, mesh=mesh, example=x) as job:
            pipeline = job.pipeline(loss)
            for _ in range(4):
                x = torch.randn(4, 4, generator=generator)
                pipeline(x, x)
        return all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))

    assert run_ok(train, size=2, transport=transport) == [True, True]


@everywhere
def test_lower_precision_than_the_example(transport: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)

    def train(world: World) -> float:
        mine = copy.deepcopy(model)
        mesh = Mesh(pipe=2)
        with distribute(mine, SGD(mine.parameters(), lr=0.1), world=world, mesh=mesh, example=x) as job:
            pipeline = job.pipeline(F.mse_loss)
            with torch.autocast("cpu", torch.bfloat16):
                return float(pipeline(x, x))

    wanted = F.mse_loss(model(x), x).item()
    assert run_ok(train, size=2, transport=transport) == [pytest.approx(wanted, rel=0.05)] * 2


@everywhere
def test_no_step_is_possible_after_one_that_failed(transport: str) -> None:
    """On the rank that failed, and on those that waited for it."""

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if bool((x > 100).any()):
                raise IndexError("too large")
            return x

    torch.manual_seed(0)
    model, x = nn.Sequential(Fails(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)

    def train(world: World) -> tuple[Any, Any]:
        mine = copy.deepcopy(model)
        mesh = Mesh(pipe=2, pipeline=Pipeline(cut=[2, 2]))
        job = distribute(mine, SGD(mine.parameters(), lr=0.1), world=world, mesh=mesh, example=x)
        pipeline = job.pipeline(F.mse_loss)
        pipeline(x, x)
        with pytest.raises((IndexError, RankLost)) as first:
            pipeline(x + 1000, x)
        with pytest.raises(ConfigError, match=rf"rank {world.rank}: an earlier step of this pipeline failed"):
            pipeline(x, x)
        return first.type, world.rank

    assert run_ok(train, size=2, transport=transport) == [(IndexError, 0), (RankLost, 1)]


def test_batches_of_different_lengths_are_refused_on_all_ranks() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(8, 8)

    def train(world: World) -> None:
        mine = copy.deepcopy(model)
        with distribute(mine, SGD(mine.parameters(), lr=0.1), world=world, mesh=Mesh(pipe=2), example=x) as job:
            mine_x = x[: 8 - world.rank]
            job.pipeline(F.mse_loss)(mine_x, mine_x)

    for error in run_threads(train, size=2, transport="sockets"):
        assert isinstance(error, ConfigError)
        assert "were given different batches" in str(error)


@pytest.mark.parametrize("kind", ["several numbers", "a longer sequence"])
def test_errors_name_the_rank(kind: str) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 3, 8)

    def train(world: World) -> None:
        mine = copy.deepcopy(model)
        with distribute(mine, SGD(mine.parameters(), lr=0.1), world=world, mesh=Mesh(pipe=2), example=x) as job:
            if kind == "several numbers":
                job.pipeline(lambda output, _: output.flatten(1).mean(1))(x, x)
            else:
                job.pipeline(F.mse_loss)(x.repeat(1, 2, 1), x.repeat(1, 2, 1))

    first, second = run_threads(train, size=2, transport="sockets")
    refused, lost = (second, first) if kind == "several numbers" else (first, second)
    assert isinstance(refused, ConfigError)
    assert isinstance(lost, RankLost)
    wanted = "rank 1: the loss must be one number" if kind == "several numbers" else "rank 0: stage 0 made tensors of"
    assert wanted in str(refused)


def test_no_sync_defers_the_exchange() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
    data = torch.randn(2, 4, 8, dtype=torch.float64)

    def train(world: World) -> tuple[int, int, list[Tensor]]:
        mine = copy.deepcopy(model)
        optimizer = SGD(mine.parameters(), lr=0.1)
        mesh = Mesh(data=2, pipe=2)
        job = distribute(mine, optimizer, AllReduce(), world=world, mesh=mesh, example=data[0])
        pipeline, x = job.pipeline(F.mse_loss), data[job.world.rank]
        with job.no_sync():
            pipeline(x, x)
        within = job.metrics.exchanges
        pipeline(x, x)
        optimizer.step()
        after = job.metrics.exchanges
        job.finish()
        return within, after, [parameter.detach() for parameter in mine.parameters()]

    alone = copy.deepcopy(model)
    (2 * F.mse_loss(alone(data), data)).backward()
    for within, after, found in run_ok(train, size=4, transport="sockets"):
        assert (within, after) == (0, 1)
        for got, want in zip(found, alone.parameters(), strict=True):
            assert want.grad is not None
            torch.testing.assert_close(got, want.detach() - 0.1 * want.grad, rtol=0, atol=1e-10)


def _without_values() -> float:
    world = init()
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with distribute(model, optimizer, world=world, mesh=Mesh(pipe=2), example=x) as job:
        job.pipeline(F.mse_loss)(x, x)
        optimizer.step()
    return world.transport.now()


def test_models_on_the_meta_device_run_in_virtual_time() -> None:
    assert all(seconds > 0 for seconds in simulate(_without_values, workers=2).results)
