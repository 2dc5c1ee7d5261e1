"""Gradients that the user changes between backward and step: by a `GradScaler`, by clipping, or by hand."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

from support import run_ok, run_threads
from tutti.errors import ConfigError, RankLost
from tutti.job import distribute
from tutti.strategies import as_strategy
from tutti.world import World

STEPS = 7
SIZE = 3
VOID = 3
"""The step in which one rank has an infinite gradient."""

SERVED = ("ps:bsp", "ps:bsp,bucket_bytes=100", "ps:bsp,servers=1", "ps:softsync=3", "poseidon:bsp")
"""Servers whose steps do not depend on timing."""

Change = Callable[[nn.Module], None]
"""Something that changes gradients after backward."""


def momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def net() -> nn.Sequential:
    """The same every time, whatever other ranks draw meanwhile."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    """A batch of all ranks, whose size cannot always be divided evenly."""
    generator = torch.Generator().manual_seed(step)
    size = 12 + step % 3
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (size,), generator=generator)


def part(step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    x, y = batch(step)
    return x.tensor_split(size)[rank], y.tensor_split(size)[rank]


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_all_close(by_rank: list[list[Tensor]], expected: list[Tensor]) -> None:
    for got in by_rank:
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def reference(num_ranks: int, change: Change | None = None, clip: float | None = None, void: int = -1) -> list[Tensor]:
    """Train in plain torch on the mean of gradients of `num_ranks` parts, each changed by `change`."""
    model = net()
    optimizer = momentum(model)
    for step in range(STEPS):
        if step == void:
            continue
        total = [torch.zeros_like(p) for p in model.parameters()]
        touched = [False] * len(total)
        for rank in range(num_ranks):
            x, y = part(step, rank, num_ranks)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if change is not None:
                change(model)
            for number, p in enumerate(model.parameters()):
                if p.grad is not None:
                    touched[number] = True
                    total[number] += p.grad * len(x) / len(batch(step)[0])
        for number, p in enumerate(model.parameters()):
            p.grad = total[number] if touched[number] else None
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return parameters(model)


# Changes of gradients by hand.


def clip_norm(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), 0.1)


def clip_to_a_large_norm(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), 1e6)  # Changes no value.


def scale_by_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.data.mul_(0.5)  # No tensor version tells of it.


def replace(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = p.grad * 0.25


def drop(model: nn.Module) -> None:
    model[0].weight.grad = None


CHANGES = [clip_norm, clip_to_a_large_norm, scale_by_data, replace, drop]


def train_changed(world: World, strategy: str, change: Change, first: int = 0) -> list[Tensor]:
    """Train; gradients are changed from step `first` on."""
    model = net()
    optimizer = momentum(model)
    job = distribute(model, optimizer, as_strategy(strategy), world=world)
    num_workers = job.world.size
    for step in range(STEPS):
        x, y = part(step, world.rank, num_workers)
        F.cross_entropy(model(x), y).backward()
        if step >= first:
            change(model)
        optimizer.step()
        optimizer.zero_grad()
    job.finish()
    return parameters(model)


def workers(results: list[Any], strategy: str) -> list[Any]:
    """The results of ranks that train."""
    return results[: len(results) - as_strategy(strategy).num_dedicated_servers]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("strategy", SERVED)
@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
def test_changed_gradients_reach_servers(transport: str, strategy: str, change: Change) -> None:
    if "servers=" in strategy and transport == "shared_memory":
        pytest.skip("dedicated servers use messages on every transport")
    size = SIZE + as_strategy(strategy).num_dedicated_servers
    results = workers(run_ok(train_changed, strategy, change, size=size, transport=transport), strategy)
    assert_all_close(results, reference(SIZE, change))


def test_changed_gradients_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tutti"):
        run_ok(train_changed, "ps:bsp", clip_norm, size=2, transport="sockets")
    assert len([record for record in caplog.records if "changed between backward" in record.message]) == 1


@pytest.mark.parametrize("strategy", ["ps:bsp", "ps:ssp=3", "ps:async,locks", "poseidon:bsp"])
@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
def test_a_change_after_the_push_is_an_error(transport: str, strategy: str) -> None:
    """Nothing changed gradients in the first step, so later ones are pushed during backward."""
    errors = run_threads(train_changed, strategy, clip_norm, 2, size=2, transport=transport)
    refused = [error for error in errors if isinstance(error, ConfigError)]
    # The rank that is refused first takes its colocated server along, for which the other may be waiting.
    assert refused
    assert all(isinstance(error, ConfigError | RankLost) for error in errors)
    for error in refused:
        assert "overlap=False" in str(error)
        assert "clip=" in str(error)


def test_accumulation_from_the_first_step_needs_no_flag() -> None:
    def train(world: World) -> list[Tensor]:
        model = net()
        optimizer = momentum(model)
        job = distribute(model, optimizer, "ps:bsp", world=world)
        for step in range(STEPS):
            x, y = part(step, world.rank, world.size)
            for _ in range(2):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        job.finish()
        return parameters(model)

    def double(model: nn.Module) -> None:
        for p in model.parameters():
            p.grad *= 2

    for transport in ("shared_memory", "sockets"):
        assert_all_close(run_ok(train, size=SIZE, transport=transport), reference(SIZE, double))


# GradScaler.


def train_scaled(
    world: World,
    strategy: str,
    clip: float | None = None,
    make: Callable[[nn.Module], Optimizer] = momentum,
    non_finite_rank: int | None = None,
) -> tuple[list[Tensor], float, int]:
    """Train with loss scaling. One rank has an infinite gradient in step `VOID`: the last one unless stated."""
    model = net()
    optimizer = make(model)
    job = distribute(model, optimizer, as_strategy(strategy), world=world)
    non_finite_rank = job.world.size - 1 if non_finite_rank is None else non_finite_rank
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        x, y = part(step, world.rank, job.world.size)
        loss = F.cross_entropy(model(x), y)
        if step == VOID and world.rank == non_finite_rank:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    steps = job.steps
    job.finish()
    assert "_step_supports_amp_scaling" not in vars(optimizer)
    return parameters(model), scaler.get_scale(), steps


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("strategy", ["native", "ring", "poseidon", *SERVED])
@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
def test_scaled_losses_equal_one_worker(transport: str, strategy: str, clip: float | None) -> None:
    """An inf on one rank makes the step void for all of them."""
    if "servers=" in strategy and transport == "shared_memory":
        pytest.skip("dedicated servers use messages on every transport")
    if strategy == "ps:softsync=3":
        pytest.skip("only a worker's own update is void under soft-sync")
    num_servers = as_strategy(strategy).num_dedicated_servers
    results = workers(run_ok(train_scaled, strategy, clip, size=SIZE + num_servers, transport=transport), strategy)
    own = strategy in SERVED  # Gradients are the worker's own: it clips those, and its scale is its own.
    change = (lambda model: clip_grad_norm_(model.parameters(), clip)) if clip and own else None
    expected = reference(SIZE, change, None if own else clip, void=VOID)
    assert_all_close([result for result, _, _ in results], expected)
    scales = [scale for _, scale, _ in results]
    assert scales[-1] == 1024 * 2 * 0.5 * 2
    assert scales[0] == (1024 * 2 * 2 * 2 if own else scales[-1])


def test_scaled_losses_clipped_by_servers_equal_one_worker() -> None:
    for transport in ("shared_memory", "sockets"):
        results = run_ok(train_scaled, "ps:bsp,clip=0.1", size=SIZE, transport=transport)
        assert_all_close([result for result, _, _ in results], reference(SIZE, clip=0.1, void=VOID))


def fused(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01, fused=True)


def unfused(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


LOCAL = ("bmuf:every=3", "diloco:every=3", "averaging:every=2", "gossip", "gossip:graph=ring")
"""Strategies whose ranks step by themselves, and whose result does not depend on timing."""


def train_without(world: World, strategy: str) -> tuple[list[Tensor], int]:
    """Train without loss scaling; the batch of the last rank in step `VOID` does not count."""
    model = net()
    optimizer = unfused(model)
    job = distribute(model, optimizer, as_strategy(strategy), world=world)
    for step in range(STEPS):
        x, y = part(step, world.rank, world.size)
        if step == VOID and world.rank == world.size - 1:
            job.contributed(0)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    steps = job.steps
    job.finish()
    return parameters(model), steps


@pytest.mark.parametrize("strategy", LOCAL)
def test_a_void_local_step_changes_nothing_and_counts(strategy: str) -> None:
    expected = run_ok(train_without, strategy, size=SIZE, transport="sockets")
    for clip, make in ((None, unfused), (1e6, unfused)):
        results = run_ok(train_scaled, strategy, clip, make, size=SIZE, transport="sockets")
        assert_all_close([result for result, _, _ in results], expected[0][0])
        assert [steps for _, _, steps in results] == [steps for _, steps in expected]


def test_optimisers_that_handle_scaling_themselves() -> None:
    """A fused optimiser must not unscale a second time, and says afterwards what it said before."""

    def train(world: World, strategy: str, make: Callable[[nn.Module], Optimizer]) -> list[Tensor]:
        model = net().float()
        optimizer = make(model)
        job = distribute(model, optimizer, strategy, world=world)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(STEPS):
            x, y = part(step, world.rank, world.size)
            loss = F.cross_entropy(model(x.float()), y) * (float("inf") if step == VOID else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        job.finish()
        assert getattr(optimizer, "_step_supports_amp_scaling", False) == (make is fused)
        return parameters(model)

    for strategy in ("averaging:every=3", "ps:bsp"):
        expected = run_ok(train, strategy, unfused, size=2, transport="sockets")[0]
        for got in run_ok(train, strategy, fused, size=2, transport="sockets"):
            for one, other in zip(got, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["ps:ssp=3", "ps:ssp=3,clip=100", "ps:async,locks", "ps:softsync=2", "peers"])
@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
def test_only_the_workers_own_update_is_void(transport: str, strategy: str) -> None:
    """The gradient is the same for all parameters, so the sum of updates does not depend on staleness."""

    def train(world: World) -> tuple[Tensor, int]:
        model = nn.Linear(4, 1, bias=False).double()
        with torch.no_grad():
            model.weight.zero_()
        optimizer = SGD(model.parameters(), lr=1.0)
        job = distribute(model, optimizer, as_strategy(strategy), world=world)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(STEPS):
            loss = model(torch.full((2, 4), 1.0 + world.rank, dtype=torch.float64)).mean()
            if step == VOID and world.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        steps = job.steps
        job.finish()
        return model.weight.detach().clone(), steps

    # The gradients are 1 and 2. Under SSP and soft-sync a step is their mean, and one step that of the first alone.
    takes_means = strategy.startswith(("ps:ssp", "ps:softsync"))
    expected = -((STEPS - 1) * 1.5 + 1.0) if takes_means else -(STEPS * 1.0 + (STEPS - 1) * 2.0)
    for weight, steps in run_ok(train, size=2, transport=transport):
        torch.testing.assert_close(weight, torch.full_like(weight, expected), rtol=1e-10, atol=1e-10)
        assert steps == STEPS


def test_hogwild_leaves_a_void_step_out() -> None:
    results = run_ok(train_scaled, "ps:async", size=2, transport="shared_memory")
    for result, _, steps in results:
        assert all(torch.isfinite(tensor).all() for tensor in result)
        assert steps == STEPS


def test_running_statistics_of_a_void_step_count() -> None:
    """Forward passes have updated them, as on one machine."""

    def train(world: World, strategy: str) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).double()
        for p in model.parameters():
            nn.init.constant_(p, 0.1)
        optimizer = SGD(model.parameters(), lr=0.1)
        job = distribute(model, optimizer, strategy, world=world)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(STEPS):
            x, y = part(3, world.rank, world.size)
            loss = F.cross_entropy(model(x), y) * (float("inf") if (step, world.rank) == (VOID, 1) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        job.finish()
        return [*parameters(model), model[1].running_mean.clone(), model[1].running_var.clone()]

    expected = run_ok(train, "native", size=2, transport="sockets")[0]
    for transport in ("shared_memory", "sockets"):
        assert_all_close(run_ok(train, "ps:bsp", size=2, transport=transport), expected)
