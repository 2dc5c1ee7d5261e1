"""`job.scale_learning_rate`: the rate of each step by the number of workers, and the schedule as it was."""

import os
import signal
import time
from math import sqrt
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, StepLR
from torch.utils.data import DataLoader, TensorDataset

import tutti
from support import run_ok
from tutti import Cluster, Link, simulate
from tutti.cluster import Compute
from tutti.errors import ConfigError, WorkerFailed
from tutti.launch.elastic_run import ElasticRun
from tutti.world import World

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}
SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda optimizer: StepLR(optimizer, 2, gamma=0.5),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, 7),
}


def take_steps(world: World, kind: str, schedule: str, num_workers: int | None) -> tuple[list[float], list[float]]:
    """Train a few steps; return the rates between the steps, and the parameters after them."""
    model = torch.nn.Linear(2, 1).double()
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.1)
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler: LRScheduler = SCHEDULERS[schedule](optimizer)
    rates, values = [], []
    with tutti.distribute(model, optimizer, "ring", world=world) as job:
        job.expect(same_batches=True)
        if num_workers is not None:
            job.scale_learning_rate(num_workers)
        for step in range(6):
            (model(torch.full((3, 2), 1.0 + step, dtype=torch.float64)) - 1).square().mean().backward()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            values += [each.item() for each in model.weight.detach().flatten()]
    return rates, values


def take_scaled_steps(world: World, kind: str, schedule: str, factor: float) -> tuple[list[float], list[float]]:
    """As `take_steps`, with every rate multiplied by hand."""
    made = OPTIMIZERS[kind]

    def scaled(parameters: Any) -> Any:
        optimizer = made(parameters)
        optimizer.param_groups[0]["lr"] *= factor
        return optimizer

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPTIMIZERS, kind, scaled)
        return take_steps(world, kind, schedule, None)


@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize(("kind", "factor"), [("SGD", 1 / 4), ("Adam", sqrt(1 / 4))])
def test_steps_are_those_of_a_scaled_rate_and_the_schedule_stays(kind: str, factor: float, schedule: str) -> None:
    plain, _ = run_ok(take_steps, kind, schedule, None, size=2, transport="sockets")[0]
    rates, values = run_ok(take_steps, kind, schedule, 8, size=2, transport="sockets")[0]
    _, wanted = run_ok(take_scaled_steps, kind, schedule, factor, size=1, transport="sockets")[0]
    assert rates == plain
    assert values == pytest.approx(wanted, rel=1e-9)


def test_with_the_number_that_the_rate_is_for_steps_have_the_same_bits() -> None:
    assert run_ok(take_steps, "SGD", "StepLR", 2, size=2, transport="sockets") == run_ok(
        take_steps, "SGD", "StepLR", None, size=2, transport="sockets"
    )


def fail_in_a_step(world: World) -> float:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    failures = [ZeroDivisionError()]

    def fail(*_: Any) -> None:
        if failures:
            raise failures.pop()

    with tutti.distribute(model, optimizer, "ring", world=world) as job:
        job.scale_learning_rate(4)
        optimizer.register_step_pre_hook(fail)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.5 / 4
        optimizer.step()
        return float(optimizer.param_groups[0]["lr"])


def test_a_step_that_fails_scales_the_next_one_once() -> None:
    assert run_ok(fail_in_a_step, size=1, transport="sockets") == [0.5]


def refusal(world: World, strategy: str, num_workers: Any) -> str:
    model = torch.nn.Linear(2, 1)
    job = tutti.distribute(model, torch.optim.SGD(model.parameters(), lr=0.5), strategy, world=world)
    with job, pytest.raises(ConfigError) as refused:
        job.scale_learning_rate(num_workers)
    return str(refused.value)


@pytest.mark.parametrize(
    ("strategy", "num_workers", "message"),
    [
        ("ring", 0, "the number of workers is 1 or more, got 0"),
        ("ring", 2.5, "got 2.5"),
        ("bmuf:every=2", 2, "under 'bmuf:every=2' workers do not step by the mean of their gradients"),
    ],
)
def test_what_cannot_be_scaled(strategy: str, num_workers: Any, message: str) -> None:
    assert message in run_ok(refusal, strategy, num_workers, size=2, transport="sockets")[0]


def train(keep: str) -> list[tuple[int, float, float]]:
    """Train, lose a worker, and get another one; return the number of workers and the rates in and after each step."""
    torch.set_num_threads(1)
    world = tutti.init()
    elastic: Any = world.elastic
    number = int(os.environ["RANK"])
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    job = tutti.distribute(model, optimizer, "ring")
    job.scale_learning_rate(3)
    batches = tutti.shard(DataLoader(TensorDataset(torch.randn(240, 4)), batch_size=4), keep=keep)  # type: ignore[arg-type]
    found: list[tuple[int, float, float]] = []
    inside: list[float] = []
    optimizer.register_step_pre_hook(lambda used, *_: inside.append(used.param_groups[0]["lr"]))
    for epoch in batches.epochs(1):
        for (x,) in epoch:
            if number == 1 and job.steps == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            deadline = time.monotonic() + 30
            while number < 3 and job.steps >= 5 and elastic.member.number < 2 and not is_asked_to_stop(elastic.member):
                assert time.monotonic() < deadline
                time.sleep(0.005)
            before = job.steps
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if job.steps > before:
                found.append((world.size, inside[-1], optimizer.param_groups[0]["lr"]))
    job.finish()
    return found


def is_asked_to_stop(member: Any) -> bool:
    return bool(member.member.known.changes.get(member.name) == member.number)


def test_the_rate_follows_the_workers_and_returns_exactly() -> None:
    results = tutti.launch(train, "local", workers=ElasticRun(minimum=1, maximum=3, restarts=1))
    wanted = {3: 0.3, 2: 0.3 * (2 / 3)}
    for each in (results[0], results[2], results[3]):
        assert each
        assert all((inside, after) == (wanted[size], 0.3) for size, inside, after in each)
    assert [size for size, _, _ in results[0]][:3] == [3, 3, 3]
    assert {size for size, _, _ in results[0]} == {2, 3}
    assert results[0][-1][0] == 3


def test_a_batch_that_stays_the_same_needs_no_other_rate(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerFailed):
        tutti.launch(train, "global", workers=ElasticRun(minimum=1, maximum=3, restarts=0))
    assert 'keep the batch per worker: tutti.shard(loader, keep="local")' in capfd.readouterr().err


def scale_twice(world: World) -> list[float]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    rates: list[float] = []
    with tutti.distribute(model, optimizer, "ring", world=world) as job:
        for number in (8, 4):
            job.scale_learning_rate(number)
        optimizer.register_step_pre_hook(lambda used, *_: rates.append(used.param_groups[0]["lr"]))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    optimizer.step()
    return rates


def test_the_last_call_counts_until_the_job_is_finished() -> None:
    assert run_ok(scale_twice, size=1, transport="sockets") == [[0.5 / 4, 0.5]]


def lose_two_in_steps() -> set[float]:
    """Gradients of the user's own, so that the exchange is in the step, and a loss is noticed there."""
    tutti.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    job = tutti.distribute(model, optimizer, "ring")
    job.scale_learning_rate(4)
    rates = set()
    for epoch in tutti.shard(DataLoader(TensorDataset(torch.randn(480, 3)), batch_size=4), keep="local").epochs(1):
        for (x,) in epoch:
            found = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), found, strict=True):
                parameter.grad = gradient
            optimizer.step()
            optimizer.zero_grad()
            rates.add(optimizer.param_groups[0]["lr"])
    job.finish()
    return rates


def test_a_loss_in_a_step_that_is_scaled_leaves_the_schedule() -> None:
    cluster = Cluster(link=Link("1gbit", "50us"), compute=Compute(sample_s=0.05))
    done = simulate(lose_two_in_steps, workers=(1, 4), chaos="kill 1 at 1s; kill 2 at 1.5s", cluster=cluster)
    assert sorted(done.lost) == [1, 2]
    assert [rates for rates in done.results if rates is not None] == [{0.4}] * 4
