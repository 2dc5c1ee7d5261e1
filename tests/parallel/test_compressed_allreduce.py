"""`AllReduce` with a codec: equal results on all ranks, error feedback, and checkpoints."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from support import run_ok
from tutti.cluster import Cluster, Compute, Link
from tutti.codecs import Cast, Chain, Codec, ErrorFeedback, LowRank, OneBit, Quantize, RandomK, Threshold, TopK
from tutti.errors import ConfigError
from tutti.job import Job, distribute
from tutti.simulation.compute_clock import ComputeClock
from tutti.simulation.dry_replica import DryRunReplica
from tutti.simulation.workload import Workload
from tutti.strategies import AllReduce, parse
from tutti.strategies.compressed_state import owed
from tutti.world import World

CODECS: dict[str, Codec] = {
    "fp16": Cast("fp16"),
    "fp8": Cast("fp8"),
    "onebit": OneBit(),
    "quantize": Quantize(4),
    "threshold": Threshold(density=0.05),
    "topk": TopK(0.05),
    "momentum": TopK(0.05, warmup_steps=4, momentum=0.5),
    "randomk": RandomK(0.2),
    "lowrank": LowRank(2),
    "chain": Chain(TopK(0.05), Quantize(8)),
}
"""One of every kind; `TwoPhaseSum`, `GatheredSum` and `LinearSum` all have several."""

every_codec = pytest.mark.parametrize("codec", CODECS)

KINDS = ("onebit", "topk", "lowrank")
"""One codec for each class of compressed sums."""


def codecs_at(*places: Any) -> Any:
    """Every codec at one of the places in turn, and one of each kind, which decides what is sent, at all of them."""
    cases = [(codec, *places[number % len(places)]) for number, codec in enumerate(CODECS)]
    cases += [(codec, *place) for codec in KINDS for place in places if (codec, *place) not in cases]
    return pytest.mark.parametrize(("codec", "transport", "size"), cases)


def net() -> nn.Sequential:
    """Three layers to compress, the largest with several scale groups, and biases that are sent exactly."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 96), nn.Tanh(), nn.Linear(96, 50), nn.Tanh(), nn.Linear(50, 6))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def batch(rank: int, step: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(rows, 40, generator=generator)
    return x, (x[:, :6] + 0.1 * x[:, 6:12]).argmax(1)


def start(world: World, codec: Codec | None, **options: Any) -> tuple[nn.Module, Any, Job]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = AllReduce("native", 9000, codec, exact_below=options.pop("exact_below", 100))
    return model, optimizer, distribute(model, optimizer, strategy, world=world)


def go(world: World, model: nn.Module, optimizer: Any, steps: range) -> list[list[Tensor]]:
    """Train, and return the gradients after every backward pass."""
    seen = []
    for step in steps:
        x, y = batch(world.rank, step)
        F.cross_entropy(model(x), y).backward()
        seen.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return seen


def assert_same_bits(by_rank: list[Any]) -> None:
    for other in by_rank[1:]:
        for one, two in zip(by_rank[0], other, strict=True):
            assert torch.equal(one, two)


@codecs_at(("sockets", 3), ("simulated", 5), ("shared_memory", 2))
def test_all_ranks_end_with_the_same_bits(codec: str, transport: str, size: int) -> None:
    def train(world: World) -> list[Tensor]:
        model, optimizer, job = start(world, ErrorFeedback(CODECS[codec]))
        go(world, model, optimizer, range(6))
        job.finish()
        return [p.detach() for p in model.parameters()]

    assert_same_bits(run_ok(train, size=size, transport=transport))


@pytest.mark.parametrize("codec", KINDS)
@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("transport", ["hosts", "simulated_hosts"])
def test_hosts_with_several_ranks(codec: str, size: int, transport: str) -> None:
    def train(world: World) -> tuple[list[Tensor], int]:
        model, optimizer, job = start(world, ErrorFeedback(CODECS[codec]))
        go(world, model, optimizer, range(3))
        sent = job.metrics.bytes_sent
        job.finish()
        return [p.detach() for p in model.parameters()], sent

    results = run_ok(train, size=size, transport=transport)
    assert_same_bits([parameters for parameters, _ in results])
    assert results[1][1] < results[0][1] / 4  # Only the first rank of every host encodes and sends.


@pytest.mark.parametrize("codec", KINDS)
@pytest.mark.parametrize("transport", ["sockets", "hosts", "simulated", "simulated_hosts"])
def test_buckets_of_all_kinds_side_by_side(codec: str, transport: str) -> None:
    """Compressed buckets, exact ones and running statistics are under way at once."""

    def train(world: World) -> list[Tensor]:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Tanh()) for _ in range(2)]
        model = nn.Sequential(*blocks, nn.Linear(40, 6))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.linspace(-0.2, 0.2, parameter.numel()).view(parameter.shape))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = AllReduce("native", 100, ErrorFeedback(CODECS[codec]), exact_below=100)
        with distribute(model, optimizer, strategy, world=world):
            go(world, model, optimizer, range(4))
        return [*(p.detach() for p in model.parameters()), *model.buffers()]

    assert_same_bits(run_ok(train, size=4, transport=transport))


@every_codec
def test_what_was_sent_and_what_is_left_is_what_there_was(codec: str) -> None:
    """Over a run: the sum of the means, and of the residuals of all ranks, is the sum of the exact means."""
    if codec == "momentum":
        pytest.skip("what it adds up are velocities")
    steps = range(7)  # Over the cut of the buckets after the first backward, too.

    def gradients(world: World) -> tuple[list[Tensor], dict[str, Any]]:
        model, _, job = start(world, ErrorFeedback(CODECS[codec]))
        total = [torch.zeros_like(p) for p in model.parameters()]
        for step in steps:
            x, y = batch(world.rank, step, rows=4 + 3 * world.rank)  # Of unequal weight.
            F.cross_entropy(model(x), y).backward()
            torch._foreach_add_(total, [p.grad for p in model.parameters()])
            model.zero_grad()
        return total, job.state_dict()["exchange"]

    size = 3
    results = run_ok(gradients, size=size, transport="sockets")
    expected = [torch.zeros_like(p) for p in net().parameters()]
    for step in steps:
        model = net()
        parts = [batch(rank, step, rows=4 + 3 * rank) for rank in range(size)]
        x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
        F.cross_entropy(model(x), y).backward()
        torch._foreach_add_(expected, [p.grad for p in model.parameters()])
    total, state = results[0]
    left = owed(state["residuals"])
    assert all(part.any() for part in left.values())
    for (name, parameter), got, wanted in zip(net().named_parameters(), total, expected, strict=True):
        assert name not in left or left[name].shape == parameter.shape
        torch.testing.assert_close(got + left.get(name, 0.0), wanted, rtol=1e-4, atol=1e-5)


def test_small_gradients_are_exact() -> None:
    def train(world: World, codec: Codec | None) -> list[Tensor]:
        model, optimizer, _ = start(world, codec)
        return go(world, model, optimizer, range(1))[0]

    compressed = run_ok(train, ErrorFeedback(OneBit()), size=2, transport="sockets")[0]
    exact = run_ok(train, None, size=2, transport="sockets")[0]
    for one, other in zip(compressed, exact, strict=True):
        assert torch.equal(one, other) == (one.numel() < 100)


@every_codec
def test_without_feedback_too(codec: str) -> None:
    if codec == "momentum":
        pytest.skip("needs feedback")

    def train(world: World) -> list[Tensor]:
        model, optimizer, job = start(world, CODECS[codec])
        assert go(world, model, optimizer, range(3))
        assert all(saved["elements"] == {} for saved in job.state_dict()["exchange"]["residuals"]["ranks"])
        return [p.detach() for p in model.parameters()]

    assert_same_bits(run_ok(train, size=3, transport="simulated"))


@codecs_at(("sockets", 3), ("hosts", 4), ("simulated_hosts", 5))
def test_a_restored_run_goes_on_to_the_bit(codec: str, transport: str, size: int) -> None:
    def train(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model, optimizer, job = start(world, ErrorFeedback(CODECS[codec]))
        go(world, model, optimizer, range(4))
        saved = job.state_dict(), [p.detach().clone() for p in model.parameters()]
        go(world, model, optimizer, range(4, 8))
        job.finish()
        again, optimizer, job = start(world, ErrorFeedback(CODECS[codec]))
        with torch.no_grad():
            for parameter, value in zip(again.parameters(), saved[1], strict=True):
                parameter.copy_(value)
        job.load_state_dict(saved[0])
        go(world, again, optimizer, range(4, 8))
        job.finish()
        return [p.detach() for p in model.parameters()], [p.detach() for p in again.parameters()]

    for went_on, restored in run_ok(train, size=size, transport=transport):
        assert_same_bits([went_on, restored])


@pytest.mark.parametrize("codec", [*KINDS, "momentum"])
@pytest.mark.parametrize(("transport", "afters"), [("simulated", (1, 5)), ("simulated_hosts", (2, 3))])
def test_what_is_left_out_is_kept_when_the_number_of_ranks_changes(
    codec: str, transport: str, afters: tuple[int, ...]
) -> None:
    def before(world: World) -> dict[str, Any]:
        model, optimizer, job = start(world, ErrorFeedback(CODECS[codec]))
        go(world, model, optimizer, range(4))
        return job.state_dict()

    saved = run_ok(before, size=4, transport=transport)

    def restore(world: World) -> dict[str, Any]:
        model, optimizer, job = start(world, ErrorFeedback(CODECS[codec]))
        job.load_state_dict(saved[0])
        state = job.state_dict()
        go(world, model, optimizer, range(2))
        return state

    for key in _rows(saved[0]):
        rows = _rows(saved[0])[key]
        assert rows.abs().sum() > 0
        assert all(torch.equal(rows, _rows(other)[key]) for other in saved)
    for after in afters:
        restored = run_ok(restore, size=after, transport=transport)
        for key in _rows(saved[0]):
            then, now = (_rows(state)[key] for state in (saved[0], restored[0]))
            torch.testing.assert_close(then.sum(0) / len(then), now.sum(0) / len(now), rtol=1e-5, atol=1e-7)


def _rows(state: dict[str, Any]) -> dict[str, Tensor]:
    """A row for every rank of all parameters' state, by its name; zeros for ranks that do not encode."""
    ranks = [saved["elements"] for saved in state["exchange"]["residuals"]["ranks"]]
    flat = [{key: torch.cat([value.reshape(-1) for _, value in sorted(by_parameter.items())])
             for key, by_parameter in elements.items()} for elements in ranks]  # fmt: skip
    return {key: torch.stack([row.get(key, torch.zeros_like(flat[0][key])) for row in flat]) for key in flat[0]}


@every_codec
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_reaches_every_rank_and_does_not_stay(codec: str, value: float) -> None:
    """A gradient scaler skips a step on every rank or on none, and the next one is as if nothing had been."""

    def train(world: World) -> list[list[Tensor]]:
        model, optimizer, _ = start(world, ErrorFeedback(CODECS[codec]))
        seen = go(world, model, optimizer, range(2))
        x, y = batch(world.rank, 2)
        place = torch.tensor(7), torch.tensor(9)
        handle = model[2].weight.register_hook(
            lambda grad: grad.index_put(place, torch.tensor(value)) if world.rank == 1 else grad
        )
        F.cross_entropy(model(x), y).backward()
        seen.append([p.grad.clone() for p in model.parameters()])
        optimizer.zero_grad()
        handle.remove()
        return seen + go(world, model, optimizer, range(3, 6))

    for seen in run_ok(train, size=3, transport="simulated"):
        assert not seen[2][2].isfinite().all()
        assert all(grad.isfinite().all() for step in (0, 1, 3, 4, 5) for grad in seen[step])


@every_codec
def test_a_step_that_a_scaler_skips_leaves_what_is_owed(codec: str) -> None:
    """A gradient that is infinite all over, as an overflow of the loss makes it."""

    def train(world: World) -> tuple[Tensor, Tensor]:
        model, optimizer, job = start(world, ErrorFeedback(CODECS[codec]))
        go(world, model, optimizer, range(3))
        owed = []
        for factor in (math.inf, 1.0):
            rows = _rows(job.state_dict())
            owed.append(torch.cat([rows[key][world.rank] for key in rows]))
            x, y = batch(world.rank, 3)
            (factor * F.cross_entropy(model(x), y)).backward()
            assert all(p.grad.isfinite().all() for p in model.parameters()) == (factor == 1.0)
            optimizer.zero_grad()
        return owed[0], owed[1]

    for before, after in run_ok(train, size=3, transport="simulated"):
        assert before.any()
        torch.testing.assert_close(after, before)


def test_what_lies_between_tensors_stays_zero() -> None:
    """When buckets are cut anew, old values in the padding between tensors must not count as gradients."""

    def train(world: World) -> bool:
        model = nn.ModuleDict({name: nn.Linear(11, 13) for name in "abcd"})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        job = distribute(model, optimizer, AllReduce("native", 1500, ErrorFeedback(TopK(0.1)), 0), world=world)
        for _ in range(3):
            x = torch.randn(4, 11, generator=torch.Generator().manual_seed(world.rank))
            sum(model[name](x).square().mean() for name in "dbac").backward()
            optimizer.zero_grad()
        for bucket in job._replica.buckets:
            between = bucket.values.clone()
            for start, slot in zip(bucket.starts, bucket.slots, strict=True):
                between[start : start + slot.tensor.numel()] = 0
            assert not between.any()
        return True

    assert run_ok(train, size=2, transport="sockets") == [True, True]


def test_a_gradient_that_nobody_clears_or_touches_is_not_lost() -> None:
    def train(world: World) -> tuple[Tensor, Tensor]:
        model = nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 40)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        job = distribute(model, optimizer, AllReduce("native", 10**6, ErrorFeedback(OneBit()), 100), world=world)
        x, _ = batch(0, 0)
        for module in model:
            module(x).square().mean().backward()
        first = model[1].weight.grad + _owed(job, "1.weight", world)
        model[0].zero_grad()
        model[0](x).square().mean().backward()  # The other layer keeps its gradient, as on one machine.
        return first, model[1].weight.grad + _owed(job, "1.weight", world)

    for before, after in run_ok(train, size=2, transport="sockets"):
        torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)


def _owed(job: Job, name: str, world: World) -> Tensor:
    return owed(job.state_dict()["exchange"]["residuals"]).get(name, torch.zeros(40, 40))


@pytest.mark.parametrize("codec", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(codec: str, dtype: torch.dtype) -> None:
    def train(world: World) -> list[Tensor]:
        model = net().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        distribute(model, optimizer, AllReduce("native", 9000, ErrorFeedback(CODECS[codec]), 100), world=world)
        for step in range(3):
            x, y = batch(world.rank, step)
            F.cross_entropy(model(x.to(dtype)), y).backward()
            assert all(p.grad.dtype == dtype and p.grad.any() for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    assert_same_bits(run_ok(train, size=3, transport="sockets"))


@pytest.mark.parametrize("codec", KINDS)
def test_a_parameter_without_a_gradient_has_none_until_something_is_owed(codec: str) -> None:
    """The residual of a layer that is no longer used is still sent; after that it has no gradient."""

    def train(world: World) -> list[list[bool]]:
        model = nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 40)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        distribute(model, optimizer, AllReduce("native", 10**6, ErrorFeedback(CODECS[codec]), 100), world=world)
        has = []
        for used in ([0], [0, 1], [0], [0]):
            x, _ = batch(world.rank, 0)
            sum(model[number](x).square().mean() for number in used).backward()
            has.append([p.grad is not None for p in model.parameters()])
            optimizer.zero_grad()
        return has

    for has in run_ok(train, size=2, transport="sockets"):
        assert has[0] == [True, True, False, False]
        assert has[1] == [True] * 4
        assert has[2] == [True, True, True, False]  # The bias is exact: of it nothing is owed.


@pytest.mark.parametrize("codec", KINDS)
def test_accumulated_gradients_are_encoded_once(codec: str) -> None:
    def train(world: World) -> int:
        model, _, job = start(world, ErrorFeedback(CODECS[codec]))
        with job.no_sync():
            x, y = batch(world.rank, 0)
            F.cross_entropy(model(x), y).backward()
        assert job.metrics.exchanges == 0
        x, y = batch(world.rank, 1)
        F.cross_entropy(model(x), y).backward()
        return job.metrics.exchanges

    assert run_ok(train, size=2, transport="sockets") == [1, 1]


@pytest.mark.parametrize(("codec", "hosts"), [*((codec, None) for codec in CODECS), *((codec, 3) for codec in KINDS)])
def test_by_sizes_alone_it_sends_about_as_much(codec: str, hosts: int | None) -> None:
    strategy = AllReduce("native", 9000, ErrorFeedback(CODECS[codec]), 100)
    cluster = Cluster(link=Link("1gbit", "50us"), compute=Compute(sample_s="1ms"), ranks_per_host=2 if hosts else 1)
    workers = 2 * hosts if hosts else 4

    def with_values() -> int:
        world = tutti.init()
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = distribute(model, optimizer, strategy)
        go(world, model, optimizer, range(8))
        sent = job.metrics.bytes_sent
        job.finish()
        return sent

    def by_sizes() -> int:
        with torch.device("meta"):
            model = net_without_values()
            workload = Workload.from_model(model, (torch.empty(8, 40),), {})
        transport = tutti.init().transport.channel("job")
        replica = DryRunReplica(model, torch.optim.SGD(model.parameters(), lr=0.1), ComputeClock(transport, workload))
        exchange = strategy.attach(replica, transport)
        before = exchange.transport.bytes_sent
        for _ in range(8):
            replica.step(8)
        return exchange.transport.bytes_sent - before

    with_, without = (
        sum(tutti.simulate(fn, workers=workers, cluster=cluster).results) for fn in (with_values, by_sizes)
    )
    tolerance = 1.0 if codec == "momentum" else 0.25 if CODECS[codec].sparse else 0.05
    assert abs(without / with_ - 1) < tolerance


def net_without_values() -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, 96), nn.Tanh(), nn.Linear(96, 50), nn.Tanh(), nn.Linear(50, 6))


@pytest.mark.parametrize(
    "text",
    [
        "onebit",
        "topk:0.02",
        "lowrank:3,bucket_bytes=1000,exact_below=5",
        "fp8:feedback=0",
        "onebit:exact_below=5,feedback=0",
        "topk+quantize:8,bucket_bytes=1000",
        "topk:0.02,momentum=0.9,exact_below=0",
    ],
)
def test_strategies_with_codecs_print_as_the_text_that_makes_them(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: AllReduce(codec="onebit"), "such as ErrorFeedback(OneBit())"),  # type: ignore[arg-type]
        (lambda: AllReduce(codec=OneBit(), exact_below=-1), "exact_below"),
        (lambda: parse("ring+onebitt"), "Did you mean 'onebit'"),
        (lambda: parse("topk:2"), "density"),
        (lambda: parse("ring+"), "unknown codec"),
        (lambda: parse("ring+onebit"), "would change nothing. Write 'onebit'."),
        (lambda: parse("native:bucket_bytes=5+topk:0.02"), "Write 'topk:0.02,bucket_bytes=5'."),
        (lambda: parse("onebit:exact_below=5,exact_below=6"), "twice"),
        (lambda: parse("onebit:exact_below=few"), "not of the form"),
        (lambda: parse("onebit:skip_converged=0.1"), "skip_converged goes with exact gradients"),
        (lambda: AllReduce("ring", codec=OneBit()), "leave it out, as in AllReduce(codec=OneBit())"),
        (lambda: AllReduce("cheapest", codec=ErrorFeedback(LowRank())), "algorithm 'cheapest' would change nothing"),
    ],
)
def test_bad_input(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=None) as error:
        make()
    assert says in str(error.value)
