"""Blocks of local steps: each rule is compared with the same computed in one process."""

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tutti
from equivalence.scenarios import SCENARIOS, assert_close, assert_same_bits, train, train_plainly
from support import LEVELS, run_ok, run_threads
from tutti.cluster import Cluster, Compute, Link
from tutti.codecs import ErrorFeedback, OneBit, TopK
from tutti.errors import ConfigError, NonFiniteLoss, RankLost
from tutti.job import Job, distribute
from tutti.simulation.runs.simulate import simulate
from tutti.strategies import AllReduce, Averaging, BlockMomentum, DiLoCo, Strategy, parse
from tutti.world import World

STEPS = 14
Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """The same every time, with statistics, a counter and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 40)
        self.norm = nn.BatchNorm1d(40)
        self.frozen = nn.Linear(40, 40)
        self.head = nn.Linear(40, 3)
        generator = torch.Generator().manual_seed(3)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.frozen(self.norm(self.stem(x)))))
        return out


def batch(rank: int, step: int, rows: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.5)


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch) -> None:
    F.cross_entropy(model(data[0]), data[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def plain(rank: int, step: int) -> Batch:
    """Something that can be learnt."""
    x, _ = batch(rank, step)
    return x.float(), (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def rows_of(rank: int, step: int) -> int:
    return 4 + 3 * rank + step % 2


def trained(world: World, strategy: Strategy, steps: int = STEPS) -> dict[str, Tensor]:
    model = Net()
    optimizer = optimizer_of(model)
    with distribute(model, optimizer, strategy, world=world):
        for step in range(steps):
            step_on(model, optimizer, batch(world.rank, step, rows_of(world.rank, step)))
    return state(model)


class Alone:
    """The same rule in one process: ranks one after the other, everything written out."""

    def __init__(self, size: int, rule: tuple[float, float, bool], overlap: bool) -> None:
        self.momentum, self.lr, self.nesterov = rule
        self.overlap = overlap
        self.models = [Net() for _ in range(size)]
        self.optimizers = [optimizer_of(model) for model in self.models]
        self.start = self._values(0)
        self.velocity = {name: torch.zeros_like(value) for name, value in self.start.items()}
        self.bases = [dict(self.start) for _ in range(size)]
        self.weights = [0.0] * size
        self.pending: dict[str, Tensor] | None = None

    def _values(self, rank: int) -> dict[str, Tensor]:
        return {
            name: value.clone()
            for name, value in state(self.models[rank]).items()
            if not name.startswith("frozen") and value.is_floating_point()
        }

    def _load(self, rank: int, values: dict[str, Tensor]) -> None:
        self.models[rank].load_state_dict(values, strict=False)

    def step(self, number: int) -> None:
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            step_on(model, optimizer, batch(rank, number, rows_of(rank, number)))
            self.weights[rank] += rows_of(rank, number)

    def _mean_progress(self) -> dict[str, Tensor]:
        total = sum(self.weights)
        values = [self._values(rank) for rank in range(len(self.models))]
        return {
            name: sum(
                (
                    w / total * (mine[name] - base[name])
                    for w, mine, base in zip(self.weights, values, self.bases, strict=True)
                ),
                torch.zeros_like(self.start[name]),
            )
            for name in self.start
        }

    def _move(self, mean: dict[str, Tensor]) -> None:
        for name, g in mean.items():
            momentum, lr, nesterov = (0.0, 1.0, False) if "running" in name else (self.momentum, self.lr, self.nesterov)
            self.velocity[name] = momentum * self.velocity[name] + lr * g
            ahead = momentum * self.velocity[name] if nesterov else 0.0
            # Chen & Huo's W is the start without what it is ahead by.
            self.start[name] = self.start[name] + (lr * g + ahead if nesterov else self.velocity[name])

    def end_block(self) -> None:
        if not self.overlap:
            self._move(self._mean_progress())
            for rank in range(len(self.models)):
                self._load(rank, self.start)
            self.bases = [dict(self.start) for _ in self.models]
        else:
            progress = self._mean_progress()
            owns = [self._values(rank) for rank in range(len(self.models))]
            if self.pending is not None:
                self._move(self.pending)
            for rank, own in enumerate(owns):
                new = {name: self.start[name] + own[name] - self.bases[rank][name] for name in own}
                self._load(rank, new)
                self.bases[rank] = new
            self.pending = progress
        self.weights = [0.0] * len(self.models)

    def finish(self) -> dict[str, Tensor]:
        if self.pending is not None:
            self._move(self.pending)
        mean = self._mean_progress() if any(self.weights) else dict.fromkeys(self.start, 0.0)
        return {name: self.start[name] + mean[name] for name in self.start}


def reference(size: int, every: int, rule: tuple[float, float, bool], overlap: bool = False) -> dict[str, Tensor]:
    alone = Alone(size, rule, overlap)
    for number in range(STEPS):
        alone.step(number)
        if (number + 1) % every == 0:
            alone.end_block()
    return alone.finish()


RULES: dict[str, tuple[Strategy, tuple[float, float, bool]]] = {
    "averaging": (Averaging(4), (0.0, 1.0, False)),
    "classical": (BlockMomentum(4, nesterov=False), (2 / 3, 1.0, False)),  # 1 - 1/N of three workers.
    "rate": (BlockMomentum(3, momentum=0.0, lr=0.5), (0.0, 0.5, False)),
    "nesterov": (BlockMomentum(4, momentum=0.6, lr=0.8), (0.6, 0.8, True)),
    "diloco": (DiLoCo(5), (0.9, 0.7, True)),
}


# A rule is the same on every transport, and a transport does the same for every rule: all pairs, not all triples.
BLOCKS = [
    (name, transport, overlap)
    for row, name in enumerate(RULES)
    for column, transport in enumerate(LEVELS)
    for overlap in (False, True)
    if name == "nesterov" or (row + column + overlap) % 2 == 0
]


@pytest.mark.parametrize(("name", "transport", "overlap"), BLOCKS)
def test_blocks_do_what_the_formulas_say(name: str, transport: str, overlap: bool) -> None:
    strategy, rule = RULES[name]
    assert isinstance(strategy, Averaging | BlockMomentum)
    strategy = replace(strategy, overlap=overlap, bucket_bytes=1000)
    states = run_ok(trained, strategy, size=3, transport=transport)
    assert_same_bits(states)
    assert isinstance(strategy.every, int)
    expected = reference(3, strategy.every, rule, overlap)
    for key, value in expected.items():
        torch.testing.assert_close(
            states[0][key], value, rtol=1e-10, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize(
    ("scenario", "transport"),
    [
        *(("sgd", transport) for transport in LEVELS),
        *(("uneven batches", transport) for transport in LEVELS),
        *((scenario, "shared_memory") for scenario in ("accumulation", "zero_grad keeps zeros")),
    ],
)
def test_averaging_every_step_is_all_reduce_for_plain_sgd(scenario: str, transport: str) -> None:
    plain = replace(SCENARIOS[scenario], optimizer="sgd", steps=8)
    for size in (1, 2, 3) if scenario == "uneven batches" else (3,):
        states = run_ok(train, Averaging(1, bucket_bytes=1000), plain, size=size, transport=transport)
        parameters = [{k: v for k, v in each.items() if not k.endswith(".grad")} for each in states]
        assert_same_bits(parameters)
        assert_close(parameters[0], train_plainly(plain), 1e-10)


def test_averaging_at_the_end_is_the_mean_of_models_trained_alone() -> None:
    def alone(rank: int) -> dict[str, Tensor]:
        model = Net()
        optimizer = optimizer_of(model)
        for step in range(STEPS):
            step_on(model, optimizer, batch(rank, step))
        return state(model)

    def together(world: World) -> dict[str, Tensor]:
        model = Net()
        optimizer = optimizer_of(model)
        with distribute(model, optimizer, Averaging("end"), world=world) as job:
            for step in range(STEPS):
                step_on(model, optimizer, batch(world.rank, step))
            assert job.metrics.exchanges == 0
        return state(model)

    states = run_ok(together, size=2, transport="shared_memory")
    one, two = alone(0), alone(1)
    for name in ("stem.weight", "head.bias", "norm.running_mean"):
        torch.testing.assert_close(states[1][name], (one[name] + two[name]) / 2, rtol=1e-12, atol=1e-14)
    assert states[0]["norm.num_batches_tracked"] == STEPS  # A counter: the lowest rank's.


@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "simulated"])
@pytest.mark.parametrize("overlap", [False, True])
def test_consensus_is_the_mean_and_is_given_back(transport: str, overlap: bool) -> None:
    """In the middle of blocks and at their ends, and training goes on as if nobody had looked."""

    def looked_at(world: World, look: bool) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        model = Net()
        optimizer = optimizer_of(model)
        agreed = []
        with distribute(model, optimizer, BlockMomentum(4, overlap=overlap), world=world) as job:
            for step in range(STEPS):
                step_on(model, optimizer, batch(world.rank, step))
                if look and step % 3 == 0 and not overlap:
                    before = state(model)
                    with job.consensus():
                        agreed.append(state(model))
                    after = state(model)
                    assert all(torch.equal(before[name], after[name]) for name, _ in model.named_parameters())
                elif look and step % 3 == 0:
                    with job.consensus():
                        agreed.append(state(model))
        return agreed, state(model)

    seen = run_ok(looked_at, True, size=3, transport=transport)
    for agreed, _ in seen:
        for mine, first in zip(agreed, seen[0][0], strict=True):
            assert_same_bits([mine, first])
    if not overlap:  # Else what was under way counts from there on, not from the end of the block.
        unseen = run_ok(looked_at, False, size=3, transport=transport)
        names = [name for name, _ in Net().named_parameters()]
        assert_same_bits([{name: each[1][name] for name in names} for each in (seen[0], unseen[0])])


@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "hosts", "simulated"])
def test_ranks_may_take_different_numbers_of_steps(transport: str) -> None:
    def uneven(world: World) -> tuple[int, dict[str, Tensor]]:
        model = Net()
        optimizer = optimizer_of(model)
        with distribute(model, optimizer, Averaging(4), world=world) as job:
            for step in range(3 + 5 * world.rank):
                step_on(model, optimizer, batch(world.rank, step))
            with job.consensus():
                pass
            for step in range(6 - 2 * world.rank):
                step_on(model, optimizer, batch(world.rank, 50 + step))
        return job.steps, state(model)

    results = run_ok(uneven, size=3, transport=transport)
    assert [steps for steps, _ in results] == [9, 12, 15]
    assert_same_bits([after for _, after in results])


def test_a_batch_that_does_not_count_changes_nothing() -> None:
    def padded(world: World, extra: bool) -> dict[str, Tensor]:
        model = Net()
        optimizer = optimizer_of(model)
        with distribute(model, optimizer, Averaging("end"), world=world) as job:
            for step in range(6):
                step_on(model, optimizer, batch(world.rank, step))
                if extra and world.rank == 1 and step == 4:
                    job.contributed(0)
                    step_on(model, optimizer, batch(9, step))
        return {name: value for name, value in state(model).items() if "norm" not in name}

    plain = run_ok(padded, False, size=2, transport="shared_memory")
    extra = run_ok(padded, True, size=2, transport="shared_memory")
    assert_same_bits([plain[0], *extra])


def _slow(world: World, every: str, seconds: float) -> tuple[int, int]:
    model = Net()
    optimizer = optimizer_of(model)
    now = world.transport.now
    with distribute(model, optimizer, Averaging(every), world=world) as job:
        start, step = now(), 0
        while now() - start < seconds:
            step_on(model, optimizer, batch(world.rank, step))
            step += 1
        blocks = job._exchange.metrics()["blocks"]
    return job.steps, blocks


def test_blocks_of_time_have_more_steps_on_faster_ranks() -> None:
    """And nobody waits for the slow one longer than for the end of its step."""
    cluster = Cluster(link=Link("1gbit", "50us"), compute=Compute(sample_s=0.01 / 8), slow={2: 4.0})
    simulation = simulate(lambda: _slow(tutti.init(), "200ms", 4.0), workers=3, cluster=cluster)
    steps = [steps for steps, _ in simulation.results]
    assert steps[0] >= 3.5 * steps[2]
    assert steps[0] >= 0.8 * 4.0 / 0.01
    assert all(15 <= blocks <= 20 for _, blocks in simulation.results)


def test_what_is_done_in_a_block_of_time_counts_by_samples() -> None:
    def weigh(world: World) -> float:
        model = nn.Linear(1, 1, bias=False).double()
        with torch.no_grad():
            model.weight.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        job = distribute(model, optimizer, Averaging("1s"), world=world)
        for _ in range(2 if world.rank else 6):
            # Each step moves the weight by the rank's number plus one.
            (-(world.rank + 1) * model(torch.ones(5, 1, dtype=torch.float64)).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        job.finish()
        return float(model.weight.detach())

    cluster = Cluster(link=Link("1gbit", "50us"), compute=Compute(sample_s=1e-6))
    found = simulate(lambda: weigh(tutti.init()), workers=2, cluster=cluster).results
    assert found[0] == found[1] == pytest.approx((30 * 6 * 1 + 10 * 2 * 2) / 40, rel=1e-12)


@pytest.mark.parametrize("overlap", [False, True])
def test_auto_keeps_communication_to_its_share(overlap: bool) -> None:
    def measured(share: float) -> tuple[float, int]:
        model = Net()
        optimizer = optimizer_of(model)
        strategy = Averaging("auto", share=share, overlap=overlap)
        job = distribute(model, optimizer, strategy, world=tutti.init())
        for step in range(400):
            if step == 100:  # By then it has found its compute_clock.
                before = job.metrics
            step_on(model, optimizer, batch(tutti.world().rank, step))
        after, length = job.metrics, job._exchange._schedule.num_steps  # type: ignore[attr-defined]
        job.finish()
        return (after.waiting_s - before.waiting_s) / (after.seconds - before.seconds), length

    # About 5 KB at 1 Mbit/s between three: some 70 ms an exchange, and 20 ms a step.
    cluster = Cluster(link=Link("1mbit", "1ms"), compute=Compute(sample_s=0.020 / 8))
    lengths = []
    for share in (0.05, 0.2):
        results = simulate(measured, share, workers=3, cluster=cluster).results
        assert len({length for _, length in results}) == 1
        assert all(found <= 1.25 * share for found, _ in results)
        lengths.append(results[0][1])
    assert lengths[0] == lengths[1] < 8 if overlap else lengths[0] > 3 * lengths[1] > 30


def test_auto_takes_short_blocks_where_the_link_is_fast() -> None:
    def length() -> int:
        model = Net()
        optimizer = optimizer_of(model)
        job = distribute(model, optimizer, Averaging("auto"), world=tutti.init())
        for step in range(40):
            step_on(model, optimizer, batch(tutti.world().rank, step))
        found: int = job._exchange._schedule.num_steps  # type: ignore[attr-defined]
        job.finish()
        return found

    cluster = Cluster(link=Link("10gbit", "1us"), compute=Compute(sample_s=0.01))
    assert simulate(length, workers=3, cluster=cluster).results == [1, 1, 1]


def test_streaming_hides_a_link_up_to_a_whole_block() -> None:
    def seconds(overlap: bool, rate: str) -> float:
        def steps() -> float:
            model = Net()
            optimizer = optimizer_of(model)
            with distribute(model, optimizer, Averaging(10, overlap=overlap), world=tutti.init()) as job:
                for step in range(100):
                    step_on(model, optimizer, batch(tutti.world().rank, step))
                found = job.metrics.seconds
            return found

        cluster = Cluster(link=Link(rate, "1ms"), compute=Compute(sample_s=0.010 / 8))
        return max(simulate(steps, workers=2, cluster=cluster).results)

    computing = 100 * 0.010
    assert seconds(True, "1mbit") < 1.01 * computing  # 66 ms of link to a block of 100 ms.
    assert seconds(False, "1mbit") > 1.4 * computing


@pytest.mark.parametrize("how", ["keep", "average", "reset"])
def test_what_the_optimiser_remembers(how: Any) -> None:
    def momenta(world: World) -> list[dict[str, Tensor]]:
        model = Net()
        optimizer = optimizer_of(model)
        seen = []
        with distribute(model, optimizer, Averaging(3, optimizer_state=how), world=world):
            for step in range(3):
                step_on(model, optimizer, batch(world.rank, step))
                names = {p: name for name, p in model.named_parameters()}
                seen.append({names[p]: s["momentum_buffer"].clone() for p, s in optimizer.state.items()})
        return seen

    zero, one = run_ok(momenta, size=2, transport="shared_memory")
    assert not torch.equal(zero[1]["head.weight"], one[1]["head.weight"])
    if how == "reset":
        assert zero[2] == one[2] == {}
    elif how == "average":
        assert_same_bits([zero[2], one[2]])
    else:
        assert not torch.equal(zero[2]["head.weight"], one[2]["head.weight"])


def test_states_that_differ_are_not_averaged() -> None:
    """A rank that has taken no step remembers nothing: the others keep what they have."""

    def lazy(world: World) -> int:
        model = Net()
        optimizer = optimizer_of(model)
        with distribute(model, optimizer, Averaging(2, optimizer_state="average"), world=world):
            for step in range(2 if world.rank else 0):
                step_on(model, optimizer, batch(world.rank, step))
        return len(optimizer.state)

    assert run_ok(lazy, size=2, transport="sockets") == [0, 6]


COMPRESSED = (
    BlockMomentum(4, codec=ErrorFeedback(OneBit())),
    Averaging(4, codec=ErrorFeedback(TopK(0.1)), overlap=True),
)


@pytest.mark.parametrize("strategy", COMPRESSED, ids=str)
@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "hosts", "simulated"])
def test_codecs_leave_replicas_alike_and_say_the_rest_later(strategy: Strategy, transport: str) -> None:
    def compressed(world: World) -> tuple[dict[str, Tensor], int]:
        model = nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 3))
        generator = torch.Generator().manual_seed(0)  # Ranks that are threads share torch's own.
        for parameter in model.parameters():
            bound = parameter.shape[-1] ** -0.5
            parameter.data = torch.empty_like(parameter).uniform_(-bound, bound, generator=generator)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        with distribute(model, optimizer, strategy, world=world) as job:
            for step in range(80):
                step_on(model, optimizer, plain(world.rank, step % 4))
            with job.consensus():
                parts = [F.cross_entropy(model(x), y).item() for x, y in (plain(rank, rank) for rank in range(3))]
            sent = job.metrics.bytes_sent
        assert sum(parts) < 0.5 * 3.3, parts  # 3.3 at the start.
        return state(model), sent

    results = run_ok(compressed, size=3, transport=transport)
    assert_same_bits([model for model, _ in results])
    whole = 20 * 2 * (2400 + 1200) * 4
    if transport in ("sockets", "simulated"):
        assert all(sent < 0.4 * whole for _, sent in results)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("codec", [None, ErrorFeedback(OneBit())], ids=["exact", "compressed"])
@pytest.mark.parametrize("transport", ["shared_memory", "simulated"])
def test_going_on_from_a_saved_state_changes_nothing(transport: str, codec: Any, overlap: bool) -> None:
    """In the middle of a block, where every rank has parameters and momentum of its own."""
    strategy = DiLoCo(4, codec=codec, overlap=overlap)

    def make(world: World) -> tuple[nn.Module, torch.optim.Optimizer, Job]:
        model = nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 3)).double()
        generator = torch.Generator().manual_seed(0)  # Ranks that are threads share torch's own.
        for parameter in model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, distribute(model, optimizer, strategy, world=world)

    def whole(world: World, stop: bool) -> dict[str, Tensor]:
        model, optimizer, job = make(world)
        for step in range(20):
            if step == 10:
                saved, model_state, optimizer_state = job.state_dict(), state(model), optimizer.state_dict()
                assert len(saved["exchange"]["block"]["ranks"]) == world.size
                if stop:
                    job.finish()
                    model, optimizer, job = make(world)
                    model.load_state_dict(model_state)
                    optimizer.load_state_dict(optimizer_state)
                    job.load_state_dict(saved)
            step_on(model, optimizer, batch(world.rank, step))
        job.finish()
        return state(model)

    plain = run_ok(whole, False, size=2, transport=transport)
    resumed = run_ok(whole, True, size=2, transport=transport)
    assert_same_bits([*plain, *resumed])


def test_a_state_is_taken_over_by_another_number_of_ranks() -> None:
    kept: dict[str, Any] = {}

    def save(world: World) -> None:
        model = Net()
        optimizer = optimizer_of(model)
        job = distribute(model, optimizer, BlockMomentum(4, momentum=0.5), world=world)
        for step in range(6):
            step_on(model, optimizer, batch(world.rank, step))
        found = job.state_dict()
        with job.consensus():
            if world.rank == 0:
                kept.update(job=found, model=state(model), optimizer=optimizer.state_dict())
        job.finish()

    def load(world: World) -> dict[str, Tensor]:
        model = Net()
        optimizer = optimizer_of(model)
        job = distribute(model, optimizer, BlockMomentum(4, momentum=0.5), world=world)
        job.load_state_dict(kept["job"])
        loaded = state(model)
        job.finish()
        return loaded

    run_ok(save, size=3, transport="sockets")
    for loaded in run_ok(load, size=2, transport="sockets"):
        for name in ("stem.weight", "head.bias"):
            torch.testing.assert_close(loaded[name], kept["model"][name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_loss_that_is_not_finite_stops_everybody(overlap: bool) -> None:
    def watched(world: World) -> None:
        model = Net()
        optimizer = optimizer_of(model)
        with distribute(model, optimizer, Averaging(3, overlap=overlap), world=world) as job:
            for step in range(12):
                x, y = batch(world.rank, step)
                loss = F.cross_entropy(model(x), y) * (float("inf") if (world.rank, step) == (1, 4) else 1.0)
                job.watch(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    for result in run_threads(watched, size=3, transport="sockets"):
        assert isinstance(result, NonFiniteLoss)
        assert "rank 1" in str(result)


@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "simulated"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_that_fails_is_named(transport: str, overlap: bool) -> None:
    def failing(world: World) -> None:
        model = Net()
        optimizer = optimizer_of(model)
        with distribute(model, optimizer, Averaging(2, overlap=overlap), world=world):
            for step in range(12):
                if world.rank == 1 and step == 5:
                    raise ValueError("on purpose")
                step_on(model, optimizer, batch(world.rank, step))

    started = time.monotonic()
    zero, one, two = run_threads(failing, size=3, transport=transport)
    assert isinstance(one, ValueError)
    assert isinstance(zero, RankLost)
    assert isinstance(two, RankLost)
    assert any("rank 1 is gone" in str(result) for result in (zero, two))
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("call", ["consensus", "state_dict"])
@pytest.mark.parametrize(("every", "overlap"), [(3, False), (5, False), (3, True)])
def test_a_loss_in_a_collective_call_counts_no_step_twice(call: str, every: int, overlap: bool) -> None:
    """After 4 steps: in the middle of a block, at the first step of one, and while an exchange is pending."""

    def failing(world: World) -> Any:
        model = Net()
        optimizer = optimizer_of(model)
        job = distribute(model, optimizer, Averaging(every, overlap=overlap), world=world)
        for step in range(4):
            if world.rank == 1 and step == every - 1 and overlap:
                raise ValueError("on purpose")
            step_on(model, optimizer, batch(world.rank, step))
        if world.rank == 1:
            raise ValueError("on purpose")
        with pytest.raises(RankLost):
            getattr(job._exchange, call)()
        return job._exchange.state_after_loss()["block"]["ranks"].value

    own, _ = run_threads(failing, size=2, transport="sockets")
    num_steps = 4 if overlap else 4 % every
    assert (own["steps"], own["weight"]) == (num_steps, 8 * num_steps)


def test_ranks_that_come_together_for_different_things_are_told() -> None:
    def apart(world: World) -> None:
        model = Net()
        job = distribute(model, optimizer_of(model), Averaging(4), world=world)
        job.state_dict() if world.rank else job.finish()

    for result in run_threads(apart, size=2, transport="sockets"):
        assert isinstance(result, ConfigError)
        assert "rank 0 in finish(), rank 1 in state_dict()" in str(result)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Averaging(0), "every must be 1 step or more, got 0"),
        (lambda: Averaging(-3), "every must be 1 step or more, got -3"),
        (lambda: Averaging("0s"), "a time such as '2s' or '500ms', 'auto' or 'end', got '0s'"),
        (lambda: Averaging("soon"), "got 'soon'"),
        (lambda: Averaging(2.5), "got 2.5"),  # type: ignore[arg-type]
        (lambda: Averaging("auto", share=1.0), "share must be above 0 and below 1, got 1.0"),
        (lambda: BlockMomentum(momentum=1.0), "momentum must be 0 or more and below 1, got 1.0"),
        (lambda: BlockMomentum(momentum=-0.1), "momentum must be 0 or more and below 1, got -0.1"),
        (lambda: BlockMomentum(momentum=float("nan")), "momentum must be 0 or more and below 1, got nan"),
        (lambda: BlockMomentum(lr=0.0), "lr must be above 0, got 0.0"),
        (lambda: Averaging(optimizer_state="forget"), "one of keep, average, reset, got 'forget'"),  # type: ignore[arg-type]
        (lambda: Averaging(overlap=True, optimizer_state="reset"), "optimizer_state must be 'keep'"),
        (lambda: Averaging(codec="onebit"), "codec must be an object"),  # type: ignore[arg-type]
        (lambda: BlockMomentum(0, momentum=2.0), "every must be 1 step or more, got 0; momentum must be"),
        (lambda: parse("bmuf:momentum=much"), "bmuf: momentum= takes a number, got 'much'"),
        (lambda: parse("averaging:momentum=0.5"), "averaging: 'momentum' is not an option; it takes every=, overlap="),
        (lambda: parse("averaging:every=0"), "every must be 1 step or more, got 0"),
        (lambda: parse("diloco:nesterov=yes"), "nesterov= takes 0 or 1, got 'yes'"),
    ],
)
def test_bad_input(make: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make()
    assert said in str(refused.value)


TEXTS = {
    "averaging:every=16": Averaging(),
    "averaging:every=end": Averaging("end"),
    "averaging:every=2s,optimizer_state=average": Averaging("2s", optimizer_state="average"),
    "averaging:every=auto,share=0.05": Averaging("auto", share=0.05),
    "bmuf:every=16+onebit": BlockMomentum(codec=ErrorFeedback(OneBit())),
    "bmuf:every=8,overlap=1,momentum=0.5,nesterov=0": BlockMomentum(8, 0.5, nesterov=False, overlap=True),
    "diloco:every=100": DiLoCo(),
    "diloco:every=50,overlap=1": DiLoCo(50, overlap=True),
}


@pytest.mark.parametrize("text", TEXTS)
def test_strategies_print_as_the_texts_that_make_them(text: str) -> None:
    assert parse(text) == TEXTS[text]
    assert str(TEXTS[text]) == text


def test_bmuf_and_diloco_are_one_thing() -> None:
    assert DiLoCo(7) == BlockMomentum(7, momentum=0.9, lr=0.7, nesterov=True)
    assert str(AllReduce()) == "native"


@pytest.mark.parametrize("transport", ["sockets", "shared_memory"])
def test_a_slow_rank_is_waited_for_as_long_as_it_goes_on(transport: str) -> None:
    """Its steps take a small part of what a wait may last, and its block more than that."""

    def slow(world: World) -> int:
        model = Net()
        optimizer = optimizer_of(model)
        with distribute(model, optimizer, Averaging("end"), world=world) as job:
            for step in range(12 if world.rank else 1):
                if world.rank:
                    time.sleep(0.25)  # It computes: nothing is waited for here.
                step_on(model, optimizer, batch(world.rank, step))
        return job.steps

    assert run_threads(slow, size=2, transport=transport, timeout=timedelta(seconds=2)) == [1, 12]


def test_what_is_done_in_consensus_is_no_time_of_training() -> None:
    def blocks(look: bool) -> int:
        model = Net()
        optimizer = optimizer_of(model)
        world = tutti.init()
        with distribute(model, optimizer, Averaging("100ms"), world=world) as job:
            for step in range(100):  # Of 10 ms.
                step_on(model, optimizer, batch(world.rank, step))
                if look and step % 3 == 0:
                    with job.consensus():
                        world.transport.elapse(0.2)
            found = job.metrics.strategy["blocks"]
        return found

    cluster = Cluster(link=Link("1gbit", "50us"), compute=Compute(sample_s=0.010 / 8))
    plain, looked = (simulate(blocks, look, workers=2, cluster=cluster).results for look in (False, True))
    assert plain == looked
    assert 9 <= plain[0] <= 10


def test_parameters_may_get_other_memory() -> None:
    def swapped(world: World) -> dict[str, Tensor]:
        model = Net()
        optimizer = optimizer_of(model)
        with distribute(model, optimizer, Averaging(3), world=world):
            for step in range(9):
                if step == 4:
                    for parameter in model.parameters():
                        parameter.data = parameter.data.clone()
                step_on(model, optimizer, batch(world.rank, step))
        return state(model)

    assert_same_bits(run_ok(swapped, size=2, transport="sockets"))


def test_consensus_gives_back_every_buffer_and_refuses_to_train() -> None:
    def within(world: World) -> int:
        model = Net()
        optimizer = optimizer_of(model)
        job = distribute(model, optimizer, Averaging(4), world=world)
        for step in range(3 + 2 * world.rank):
            step_on(model, optimizer, batch(world.rank, step))
        with job.consensus():
            assert model.norm.num_batches_tracked == 3  # The lowest rank's.
            F.cross_entropy(model(batch(0, 0)[0]), batch(0, 0)[1]).backward()
            for wrong in (optimizer.step, job.finish, lambda: job.consensus().__enter__()):
                with pytest.raises(ConfigError, match=r"inside job.consensus\(\)"):
                    wrong()
            saved = job.state_dict()["exchange"]["block"]["ranks"][world.rank]["own"]["head.weight"]
            assert not torch.equal(saved, model.head.weight)  # Each rank's own, not the mean.
        found = int(model.norm.num_batches_tracked)
        assert torch.equal(saved, model.head.weight)
        optimizer.zero_grad()
        job.finish()
        return found

    assert run_ok(within, size=2, transport="sockets") == [3, 5]
