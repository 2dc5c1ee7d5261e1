"""Mistakes of the user's that would end in wrong weights: each is an error that names the remedy, on every rank."""

import copy
import gc
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from support import run_ok, run_threads
from tutti.collectives import mean, ring
from tutti.errors import NonFiniteLoss, NonFiniteValues, RankLost, ReplicaMismatch, TuttiError, WorkerFailed
from tutti.world import World

ALLREDUCE, SERVERS, GOSSIP, PEERS, BLOCKS = "native", "ps:bsp", "gossip", "peers", "bmuf:every=2"
EVERY_FAMILY = (ALLREDUCE, SERVERS, GOSSIP, PEERS, BLOCKS)
UNEQUAL = (SERVERS, GOSSIP, PEERS, BLOCKS)
"""Strategies under which ranks hold the same parameters at the end only."""


def _make_net(seed: int, norm: bool) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        middle = [nn.BatchNorm1d(5)] if norm else []
        return nn.Sequential(nn.Linear(4, 5), *middle, nn.Tanh(), nn.Linear(5, 3)).double()


# Made once: ranks are threads, and share one random generator.
_NETS = {(seed, norm): _make_net(seed, norm) for seed, norm in ((0, False), (0, True), (5, False))}


def _net(seed: int = 0, norm: bool = False) -> nn.Sequential:
    return copy.deepcopy(_NETS[seed, norm])


def _batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (6,), generator=generator)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def _started(world: World, strategy: str = ALLREDUCE) -> tuple[nn.Sequential, torch.optim.Optimizer, tutti.Job]:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, tutti.distribute(model, optimizer, strategy, world=world)


def _errors(function: Callable[..., Any], *args: Any, size: int = 2, transport: str = "shared_memory") -> list[str]:
    """The messages of the errors that all ranks raise."""
    results = run_threads(function, *args, size=size, transport=transport)
    assert all(isinstance(result, TuttiError) for result in results), results
    return [str(result) for result in results]


# The optimiser


def _other_optimizer(world: World, strategy: str, late: bool) -> None:
    model, optimizer, job = _started(world, strategy)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with job:
        for step in range(3):
            _step(model, other if late or step else optimizer, _batch(world.rank, step))


@pytest.mark.parametrize("strategy", EVERY_FAMILY)
@pytest.mark.parametrize("late", [True, False])
def test_another_optimizer_than_the_given_one(strategy: str, late: bool) -> None:
    for message in _errors(_other_optimizer, strategy, late):
        assert "an optimiser that tutti.distribute was not given (SGD) stepped" in message
        assert "Create the optimiser before tutti.distribute" in message


class _Wrapper(torch.optim.Optimizer):
    """An optimiser around another, as Lookahead and the like."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)


def _wrapped_optimizer(world: World) -> int:
    model, optimizer, job = _started(world)
    unrelated = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with job:
        for step in range(3):
            _step(model, _Wrapper(optimizer), _batch(world.rank, step))
            unrelated.step()
    return job.steps


def test_wrappers_and_unrelated_optimizers_may_step() -> None:
    assert run_ok(_wrapped_optimizer, size=2, transport="shared_memory") == [3, 3]


def _never_stepped(world: World, strategy: str) -> None:
    model, _, job = _started(world, strategy)
    with job:
        F.cross_entropy(model(_batch(world.rank, 0)[0]), _batch(world.rank, 0)[1]).backward()


def test_an_optimizer_that_never_stepped() -> None:
    for message in _errors(_never_stepped, SERVERS):
        assert "1 backward passes" in message
        assert "never stepped" in message


# Replicas that differ


def _loads_on_one_rank(world: World, strategy: str, at_step: int, steps: int) -> None:
    model, optimizer, job = _started(world, strategy)
    with job:
        for step in range(steps):
            if step == at_step and world.rank == 1:
                model.load_state_dict(_net(seed=5).state_dict())
            _step(model, optimizer, _batch(world.rank, step))


@pytest.mark.parametrize(("at_step", "steps"), [(0, 3), (6, 7)])  # Noticed in the second pass, and at the end.
def test_a_model_loaded_on_one_rank(at_step: int, steps: int) -> None:
    results = run_threads(_loads_on_one_rank, ALLREDUCE, at_step, steps, size=3, transport="shared_memory")
    for result in results:
        assert isinstance(result, ReplicaMismatch)
        assert "first in '0.weight' (4 of 4 tensors): different values on rank 1, rank 0 and rank 2" in str(result)
        assert "before distribute" in str(result)


def _unequal_end(world: World, strategy: str) -> None:
    model, optimizer, job = _started(world, strategy)
    finish = job._exchange.finish

    def finish_and_change() -> None:
        finish()
        if world.rank == 1:
            with torch.no_grad():
                model[0].bias[2] += 1

    job._exchange.finish = finish_and_change  # type: ignore[method-assign]
    with job:
        for step in range(3):
            _step(model, optimizer, _batch(world.rank, step))


@pytest.mark.parametrize("strategy", EVERY_FAMILY)
def test_replicas_are_compared_at_the_end(strategy: str) -> None:
    for message in _errors(_unequal_end, strategy):
        assert "the models differ between ranks after job.finish(), first in '0.bias' (1 of 4 tensors)" in message


# Batches


def _same_batches(world: World, strategy: str, allowed: bool, num_batches: int) -> None:
    model, optimizer, job = _started(world, strategy)
    if allowed:
        job.expect(same_batches=True)
    with job:
        for step in range(3):
            _step(model, optimizer, _batch(0, step % num_batches))


@pytest.mark.parametrize("strategy", EVERY_FAMILY)
def test_a_loader_that_is_not_sharded(strategy: str) -> None:
    for message in _errors(_same_batches, strategy, False, 2):
        assert "ranks 0 and 1 were given the same first two batches" in message
        assert "tutti.shard(loader)" in message


@pytest.mark.parametrize("strategy", [ALLREDUCE, GOSSIP])
def test_same_batches_on_purpose_and_a_single_batch(strategy: str) -> None:
    run_ok(_same_batches, strategy, True, 2, size=2, transport="shared_memory")
    run_ok(_same_batches, strategy, False, 1, size=2, transport="shared_memory")


def _shards_of_equal_rows(world: World) -> None:
    model, optimizer, job = _started(world)
    x = torch.ones(12, 4, dtype=torch.float64) * (torch.arange(12) // 4).double()[:, None]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.zeros(12, dtype=torch.int64)), 2)
    with job:
        for batch in tutti.shard(loader, world=world):
            _step(model, optimizer, batch)


def test_equal_rows_in_the_parts_of_shard() -> None:
    run_ok(_shards_of_equal_rows, size=2, transport="shared_memory")


# Losses that are sums


def _sum_loss(world: World, strategy: str, loss: Callable[[Tensor, Tensor], Tensor], kind: Any) -> list[Tensor]:
    model, optimizer, job = _started(world, strategy)
    if kind is not None:
        job.expect(loss=kind)
    x, y = _batch(0, 0)
    # Unequal parts, in which a mean would weigh samples differently.
    part = slice(0, 6) if world.size == 1 else (slice(0, 2), slice(2, 6))[world.rank]
    with job:
        for step in range(3):
            optimizer.zero_grad()
            with job.no_sync():
                loss(model(x[part] + step), y[part]).backward()
            loss(model(x[part] - step), y[part]).backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def _summed(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="sum")


@pytest.mark.parametrize("strategy", [ALLREDUCE, "ring", SERVERS, "poseidon"])
def test_a_sum_on_two_ranks_is_that_of_one(strategy: str) -> None:
    (alone,) = run_ok(_sum_loss, ALLREDUCE, _summed, "sum", size=1, transport="sockets")
    for parameters in run_ok(_sum_loss, strategy, _summed, "sum", size=2, transport="shared_memory"):
        torch.testing.assert_close(parameters, alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("strategy", [GOSSIP, PEERS, BLOCKS, "ps:async"])
def test_a_sum_has_no_meaning_where_gradients_are_not_averaged(strategy: str) -> None:
    for message in _errors(_sum_loss, strategy, _summed, "sum"):
        assert 'loss="sum" has no meaning under' in message


def _spread(output: Tensor, y: Tensor) -> Tensor:
    return (output - F.one_hot(y, 3)).pow(2)


SUMS = {
    "cross entropy": _summed,
    "squares": lambda output, y: F.mse_loss(output, F.one_hot(y, 3).double(), reduction="sum"),
    "sum": lambda output, y: _spread(output, y).sum(),
    "by dimensions": lambda output, y: _spread(output, y).sum(dim=(0, 1)),
    "negative": lambda output, y: -_spread(output, y).sum(),
    "with a term": lambda output, y: _summed(output, y) + -0.5 * output.pow(2).sum(),
    "two": lambda output, y: _summed(output, y) + _spread(output, y).sum(),
}
MEANS = {
    "cross entropy": F.cross_entropy,
    "mean": lambda output, y: _spread(output, y).mean(),
    "divided": lambda output, y: _spread(output, y).sum() / len(y),
    "multiplied": lambda output, y: _spread(output, y).sum() * (1 / len(y)),
    "penalty": lambda output, y: F.cross_entropy(output, y) + output.pow(2).sum(),
    "weighted": lambda output, y: (_spread(output, y) * torch.full((len(y), 1), 1 / len(y))).sum(),
    "several": lambda output, y: torch.stack([F.cross_entropy(output, y), _spread(output, y).mean()]).sum(),
    "joined": lambda output, y: torch.cat([F.cross_entropy(output, y)[None], _spread(output, y).mean()[None]]).sum(),
    "means of classes": lambda output, y: _spread(output, y).mean(0).sum(),
    "one number": lambda output, y: F.cross_entropy(output, y).reshape(1).sum(),
}


def test_sums_are_recognised_and_means_are_not() -> None:
    for name, loss in SUMS.items():
        for message in _errors(_sum_loss, ALLREDUCE, loss, None):
            assert "the loss is a sum over samples" in message, name
            assert 'job.expect(loss="sum")' in message, name
        run_ok(_sum_loss, ALLREDUCE, loss, "mean", size=2, transport="shared_memory")
    for loss in MEANS.values():
        run_ok(_sum_loss, ALLREDUCE, loss, None, size=2, transport="shared_memory")


def _sum_with_penalty(world: World, strategy: str) -> list[Tensor]:
    """Second derivatives: what `torch.autograd.grad` returns is no multiple."""
    model, optimizer, job = _started(world, strategy)
    job.expect(loss="sum")
    part = slice(0, 6) if world.size == 1 else (slice(0, 2), slice(2, 6))[world.rank]
    with job:
        for step in range(3):
            x, y = _batch(0, step)
            optimizer.zero_grad()
            loss = _summed(model(x[part]), y[part])
            slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            # Linear in the gradient, so that the parts of a batch add up.
            (loss + 0.1 * sum(slope.sum() for slope in slopes)).backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("strategy", [ALLREDUCE, SERVERS])
def test_a_sum_with_second_derivatives(strategy: str) -> None:
    (alone,) = run_ok(_sum_with_penalty, ALLREDUCE, size=1, transport="sockets")
    for parameters in run_ok(_sum_with_penalty, strategy, size=2, transport="shared_memory"):
        torch.testing.assert_close(parameters, alone, rtol=1e-10, atol=1e-10)


def _sum_by_own_gradients(world: World) -> list[Tensor]:
    model, optimizer, job = _started(world)
    job.expect(loss="sum")
    part = slice(0, 6) if world.size == 1 else (slice(0, 2), slice(2, 6))[world.rank]
    with job:
        for step in range(3):
            x, y = _batch(0, step)
            for p, grad in zip(
                model.parameters(),
                torch.autograd.grad(_summed(model(x[part]), y[part]), list(model.parameters())),
                strict=True,
            ):
                p.grad = grad
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_a_sum_of_gradients_that_backward_did_not_make() -> None:
    (alone,) = run_ok(_sum_by_own_gradients, size=1, transport="sockets")
    for parameters in run_ok(_sum_by_own_gradients, size=2, transport="shared_memory"):
        torch.testing.assert_close(parameters, alone, rtol=1e-10, atol=1e-10)


def _expects_late(world: World) -> None:
    model, _, job = _started(world)
    F.cross_entropy(model(_batch(world.rank, 0)[0]), _batch(world.rank, 0)[1]).backward()
    job.expect(loss="sum")


def test_expectations_after_a_backward_pass() -> None:
    for message in _errors(_expects_late):
        assert "before the first backward pass" in message


# What is infinite on purpose, and what users do with inputs, optimisers and jobs


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = _net()
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
        self.frozen = nn.Parameter(torch.tensor(float("inf")), requires_grad=False)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return self.net(x if other is None else x + torch.sparse.mm(other, x))


def _masked(world: World, strategy: str, sparse: bool) -> None:
    model = _Masked()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    neighbours = torch.eye(6, dtype=torch.float64).to_sparse() if sparse else None
    with tutti.distribute(model, optimizer, strategy, world=world):
        for step in range(4):
            x, y = _batch(world.rank, step)
            optimizer.zero_grad()
            F.cross_entropy(model(x, neighbours), y).backward()
            optimizer.step()


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse inputs"])
@pytest.mark.parametrize("strategy", [ALLREDUCE, BLOCKS])
def test_masks_and_sparse_inputs_are_no_mistake(strategy: str, sparse: bool) -> None:
    run_ok(_masked, strategy, sparse, size=2, transport="shared_memory")


class _EverySecond(torch.optim.Optimizer):
    """Steps another optimiser every second time, as wrappers for accumulation do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self._inner, self._calls = inner, 0

    def step(self, closure: Any = None) -> None:
        self._calls += 1
        if self._calls % 2 == 0:
            self._inner.step()


def _steps_by_wrapper(world: World) -> None:
    model, optimizer, job = _started(world)
    wrapper = _EverySecond(optimizer)
    with job:
        for step in range(4):
            F.cross_entropy(model(_batch(world.rank, step)[0]), _batch(world.rank, step)[1]).backward()
            wrapper.step()


def test_a_wrapper_that_steps_now_and_then_is_no_mistake() -> None:
    run_ok(_steps_by_wrapper, size=2, transport="shared_memory")


def _pair_first(world: World) -> None:
    """Two of three ranks have a job of their own before: all must still agree on the messages of the next one."""
    if world.rank < 2:
        pair = replace(world, size=2, transport=world.transport.channel("pair", [0, 1]))
        model, optimizer, job = _started(pair, BLOCKS)
        with job:
            for step in range(3):
                _step(model, optimizer, _batch(world.rank, step))
        pair.transport.close()
    model, optimizer, job = _started(world, BLOCKS)
    with job:
        for step in range(3):
            _step(model, optimizer, _batch(world.rank, step))


def test_jobs_of_some_ranks_only() -> None:
    run_ok(_pair_first, size=3, transport="sockets")


_collector = threading.Lock()
"""Held by the rank that collects garbage: ranks are threads."""


def _drops_its_job(world: World) -> bool:
    def trial() -> ref[nn.Module]:
        model, optimizer, _ = _started(world)
        _step(model, optimizer, _batch(world.rank, 0))
        return ref(model)

    dropped = trial()
    with _collector:
        for _ in range(3):  # A collection that starts while another thread's runs does nothing.
            gc.collect()
    return dropped() is None


def test_a_job_that_is_dropped_is_collected() -> None:
    assert all(run_ok(_drops_its_job, size=2, transport="shared_memory"))


def _keeps_no_batch(world: World) -> bool:
    model, optimizer, job = _started(world, BLOCKS)
    with job:
        for step in range(4):
            x, y = _batch(world.rank, step)
            _step(model, optimizer, (x, y))
        last = ref(x)
        del x, y
        return last() is None


def test_the_last_batch_is_not_kept() -> None:
    assert all(run_ok(_keeps_no_batch, size=2, transport="shared_memory"))


def _nan_on_one_rank_alone(world: World) -> None:
    model, optimizer, job = _started(world, "ring")
    with job:
        for step in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(_batch(world.rank, step)[0]), _batch(world.rank, step)[1]).backward()
            if world.rank == 0 and step == 2:
                for p in model.parameters():
                    p.grad.fill_(float("nan"))  # type: ignore[union-attr]
            optimizer.step()


def test_a_gradient_that_the_user_made_nan_on_one_rank() -> None:
    """The others are elsewhere, and do not answer: the rank says so itself, at once."""
    start_s = time.monotonic()
    first, second = run_threads(_nan_on_one_rank_alone, size=2, transport="sockets")
    assert isinstance(first, NonFiniteValues)
    assert isinstance(second, RankLost)
    assert time.monotonic() - start_s < 10


# Models that were changed


def _half(model: nn.Sequential) -> None:
    model.float()


def _part_cast(model: nn.Sequential) -> None:
    model[2].float()


def _weight_norm(model: nn.Sequential) -> None:
    nn.utils.parametrizations.weight_norm(model[0])


def _new_parameter(model: nn.Sequential) -> None:
    model[2].bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))


def _other_shape(model: nn.Sequential) -> None:
    model[0].weight.data = torch.zeros(5, 3, dtype=torch.float64)


CHANGES = {
    _half: "parameter '2.bias' is (3,) float32 on cpu and was (3,) float64 on cpu",
    _part_cast: "parameter '2.bias' is (3,) float32 on cpu and was (3,) float64 on cpu",
    _weight_norm: "parameter '0.weight' was replaced by another",
    _new_parameter: "parameter '2.bias' was replaced by another",
    _other_shape: "parameter '0.weight' is (5, 3) float64 on cpu and was (5, 4) float64 on cpu",
}


def _changed(world: World, strategy: str, change: Callable[[nn.Sequential], None]) -> None:
    model, optimizer, job = _started(world, strategy)
    with job:
        _step(model, optimizer, _batch(world.rank, 0))
        change(model)
        x, y = _batch(world.rank, 1)
        if change is _other_shape:
            x = x[:, :3]
        optimizer.zero_grad()
        x = x.to(model[0].weight.dtype)
        # A part that was cast fits the others by a conversion between them.
        output = model[2](model[0](x).tanh().float()) if change is _part_cast else model(x)
        F.cross_entropy(output, y).backward()
        optimizer.step()


@pytest.mark.parametrize("strategy", EVERY_FAMILY)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_was_changed(strategy: str, change: Callable[[nn.Sequential], None]) -> None:
    for message in _errors(_changed, strategy, change):
        # Servers notice by themselves that a parameter is not the one that they have sent.
        if strategy != SERVERS or "was changed between optimizer.step() and the next forward pass" not in message:
            assert CHANGES[change] in message
            assert "call tutti.distribute again" in message


def _on_meta(world: World) -> None:
    model = nn.Linear(2, 2, device="meta")
    tutti.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)


def test_a_model_without_values() -> None:
    for message in _errors(_on_meta):
        assert "the model is on the meta device" in message


# NaN and infinity


def _nan_gradient(world: World, strategy: str) -> None:
    model, optimizer, job = _started(world, strategy)
    with job:
        for step in range(6):
            x, y = _batch(world.rank, step)
            _step(model, optimizer, (x * (float("nan") if (step, world.rank) == (3, 1) else 1.0), y))


def test_a_gradient_that_is_not_finite() -> None:
    for result in run_threads(_nan_gradient, ALLREDUCE, size=2, transport="shared_memory"):
        assert isinstance(result, NonFiniteValues)
        assert "the gradient of '2.bias' is NaN or infinite at step 3, first on rank 1" in str(result)


@pytest.mark.parametrize("strategy", UNEQUAL)
def test_a_gradient_that_is_not_finite_under_other_strategies(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    for result in run_threads(_nan_gradient, strategy, size=2, transport="shared_memory"):
        assert isinstance(result, (NonFiniteLoss, NonFiniteValues))
    assert "rank 1: the gradient of '2.bias' has become NaN or infinite at step 3." in caplog.messages


def _nan_parameter(world: World, strategy: str, at_step: int) -> None:
    model, optimizer, job = _started(world, strategy)
    with job:
        for step in range(6):
            _step(model, optimizer, _batch(world.rank, step))
            if step == at_step:
                with torch.no_grad():
                    model[0].weight[1, 1] = float("inf")
                    model[2].weight[:, 1] = 0.0  # So that no gradient becomes NaN.


@pytest.mark.parametrize("at_step", [0, 5])
def test_a_parameter_that_is_not_finite(at_step: int) -> None:
    for result in run_threads(_nan_parameter, ALLREDUCE, at_step, size=2, transport="shared_memory"):
        assert isinstance(result, NonFiniteValues)
        assert "'0.weight' is NaN or infinite" in str(result)
        assert "rank 0 and rank 1" in str(result)


def _scaled(world: World, strategy: str, fused: bool) -> list[float]:
    model = _net().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)  # Overflows at first.
    job = tutti.distribute(model, optimizer, strategy, world=world)
    scales = []
    with job:
        for step in range(6):
            x, y = _batch(world.rank, step)
            optimizer.zero_grad()
            scaler.scale(100 * F.cross_entropy(model(x.float()), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("fused", [True, False])
def test_infinite_gradients_that_a_scaler_skips_are_no_error(fused: bool) -> None:
    scales = run_ok(_scaled, ALLREDUCE, fused, size=2, transport="shared_memory")
    assert scales[0][0] < 2.0**127  # A step was skipped.


# Collective calls


def _consensus_on_one_rank(world: World, strategy: str, norm: bool, at_the_end: bool) -> None:
    model = _net(norm=norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tutti.distribute(model, optimizer, strategy, world=world) as job:
        for step in range(4):
            _step(model, optimizer, _batch(world.rank, step))
            if step == (3 if at_the_end else 1) and world.rank == 0:
                with job.consensus():
                    model(_batch(0, 0)[0])


@pytest.mark.parametrize("strategy", ["native", "ring", "onebit", "poseidon"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("transport", ["sockets", "shared_memory"])
def test_consensus_on_one_rank_alone(strategy: str, norm: bool, transport: str) -> None:
    for rank, message in enumerate(_errors(_consensus_on_one_rank, strategy, norm, False, transport=transport)):
        where = "rank 0 is in job.consensus() after step 2, rank 1 began the backward pass of step 3"
        assert message.startswith(f"rank {rank}: {where}. Every rank must enter job.consensus() after the same step")


@pytest.mark.parametrize("strategy", [ALLREDUCE, SERVERS, "ps:async", BLOCKS])
def test_consensus_on_one_rank_while_the_other_finishes(strategy: str) -> None:
    for message in _errors(_consensus_on_one_rank, strategy, False, True):
        assert "consensus()" in message
        assert "finish()" in message


# Without a false alarm


def _trained(world: World, strategy: str) -> None:
    model = _net(norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with tutti.distribute(model, optimizer, strategy, world=world) as job:
        average = copy.deepcopy(model)
        for step in range(20):
            _step(model, optimizer, _batch(world.rank, step))
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)
            if step % 7 == 0:
                with job.consensus():
                    model(_batch(0, 0)[0])


@pytest.mark.parametrize("strategy", [*EVERY_FAMILY, "onebit", "poseidon", "ps:async", "auto"])
@pytest.mark.parametrize("transport", ["sockets", "shared_memory", "simulated"])
def test_no_alarm_in_ordinary_training(strategy: str, transport: str) -> None:
    run_ok(_trained, strategy, size=3, transport=transport)


# A run without `distribute`, in processes: what counts is how they end.


def _undistributed(communicates: bool) -> None:
    world = tutti.init()
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        F.cross_entropy(model(_batch(world.rank, step)[0]), _batch(world.rank, step)[1]).backward()
        if communicates:
            for parameter in model.parameters():
                assert parameter.grad is not None
                mean(parameter.grad, world.transport, ring)
        optimizer.step()


def test_distribute_was_forgotten(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerFailed):
        tutti.launch(_undistributed, False, workers=2)
    output = capfd.readouterr().err
    warning = "rank 0: an optimiser has stepped in a world of 2 ranks, and no model is distributed"
    assert warning in output
    assert f"ConfigError: {warning}" in output
    assert "Call tutti.distribute(model, optimizer) before it" in output


def _second_world() -> None:
    tutti.init().close()
    world = tutti.init()
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tutti.distribute(model, optimizer):
        for step in range(3):
            _step(model, optimizer, _batch(world.rank, step))


def test_a_world_that_was_closed_is_not_judged_by_the_next(capfd: pytest.CaptureFixture[str]) -> None:
    tutti.launch(_second_world, workers=2)
    assert "no model is distributed" not in capfd.readouterr().err


def test_a_script_that_averages_by_itself_is_not_judged(capfd: pytest.CaptureFixture[str]) -> None:
    tutti.launch(_undistributed, True, workers=2)
    assert "no model is distributed" not in capfd.readouterr().err
