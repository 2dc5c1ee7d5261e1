"""The planner at work: it chooses while training goes on, loses no step, and looks whether it was right."""

from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from support import run_ok
from tutti.cluster import Cluster, Compute, Link, format_time, parse_time
from tutti.errors import ConfigError
from tutti.job import Job, Metrics, distribute
from tutti.plan import price
from tutti.plan.auto import Auto, AutoExchange
from tutti.plan.auto import controller as auto
from tutti.plan.auto.step_recorder import StepRecorder, factorable_layers
from tutti.plan.profile.clock import Clock
from tutti.replica import HookedReplica
from tutti.replica.samples import SampleCounts
from tutti.simulation.network import Network
from tutti.simulation.runs.simulate import simulate
from tutti.strategies import AllReduce, Strategy, parse
from tutti.world import World

_one_at_a_time = Lock()


def perceptron() -> nn.Module:
    with _one_at_a_time, torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(100, 200), nn.ReLU(inplace=True), nn.Linear(200, 10)).double()


def train(
    world: World, strategy: Strategy, steps: int, between: Callable[[Job, int], None] | None = None
) -> tuple[list[Tensor], Metrics]:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(world.rank)
    with distribute(model, optimizer, strategy, world=world) as job:
        for step in range(steps):
            x = torch.randn(3 + world.rank % 2, 100, generator=generator, dtype=torch.float64)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if between is not None:
                between(job, step)
        metrics = job.metrics
    return [p.detach().clone() for p in model.parameters()], metrics


def on(link: str, strategy: Strategy, steps: int, **options: Any) -> list[Any]:
    cluster = Cluster(link=Link(link, "100us"), compute=Compute(sample_s="1ms", step_s="1ms"))
    return simulate(lambda: train(tutti.init(), strategy, steps, **options), workers=4, cluster=cluster).results


def assert_alike(results: list[Any], others: list[Any]) -> None:
    for parameters, _ in results:
        for mine, first, other in zip(parameters, results[0][0], others[0][0], strict=True):
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("link", "chosen"), [("10mbit", "poseidon"), ("100gbit", "native")])
def test_it_chooses_by_the_link_and_loses_no_step(link: str, chosen: str, capsys: pytest.CaptureFixture[str]) -> None:
    results = on(link, Auto(), 30)
    assert_alike(results, on(link, AllReduce(), 30))
    for _, metrics in results:
        assert metrics.steps == 30
        assert metrics.strategy["planned"].chosen == chosen
        planned = metrics.strategy["planned"]
        assert planned.step_s == pytest.approx(planned.predicted_s, rel=auto.TOLERANCE)
    said = capsys.readouterr().err
    assert said.count("auto:") == 1
    assert f"auto: {chosen} on " in said
    assert "a step predicted" in said


def test_lossy_only_if_allowed() -> None:
    (_, metrics), *_ = on("1mbit", Auto(lossy=True), 30)
    chosen = metrics.strategy["planned"].chosen
    assert any(name in chosen for name in ("onebit", "bmuf", "diloco"))


@pytest.mark.parametrize("transport", ["sockets", "shared_memory", "hosts"])
def test_over_real_transports(transport: str) -> None:
    results = run_ok(train, Auto(), 40, size=3, transport=transport)
    assert_alike(results, run_ok(train, AllReduce(), 40, size=3, transport=transport))
    assert all(metrics.strategy["planned"].predicted_s is not None for _, metrics in results)


def test_a_wrong_prediction_is_noticed_and_planned_again(capsys: pytest.CaptureFixture[str]) -> None:
    """As if the link had been a hundred times as fast when it was measured."""

    def between(job: Job, step: int) -> None:
        exchange = job._exchange
        assert isinstance(exchange, AutoExchange)
        if step == 25:
            exchange.controller.pending = None
            exchange.switch_to(AllReduce("tree"))
            exchange.controller.prediction = price(AllReduce("tree"), *PRICED)
        if step in (25, 150):
            seen.append((step, str(exchange.strategy)))

    seen: list[tuple[int, str]] = []
    steps = 4 * auto.CHECK_EVERY
    results = on("10mbit", Auto(), steps, between=between)
    assert {text for step, text in seen if step == 25} == {"tree"}
    assert {text for step, text in seen if step == 150} == {"poseidon"}
    assert_alike(results, on("10mbit", AllReduce(), steps))
    assert "planning again" in capsys.readouterr().err
    for _, metrics in results:
        planned = metrics.strategy["planned"]
        assert planned.step_s == pytest.approx(planned.predicted_s, rel=auto.TOLERANCE)


def test_a_link_that_becomes_slow_is_measured_anew(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hundred times as slow in mid-run: all ranks plan again, switch, and lose no step."""
    networks: list[Network] = []
    made = Network.__init__

    def keep(network: Network, *args: Any) -> None:
        made(network, *args)
        networks.append(network)

    monkeypatch.setattr(Network, "__init__", keep)
    monkeypatch.setattr(auto, "CHECK_EVERY", 20)

    def between(job: Job, step: int) -> None:
        if step == 40 and job.world.rank == 0:
            for pipe in networks[-1]._pipes.values():
                pipe.seconds_per_byte *= 100
        assert "planned" in job.metrics.strategy
        chosen.setdefault(step, set()).add(job.metrics.strategy["planned"].chosen)

    chosen: dict[int, set[str]] = {}
    steps = 6 * auto.CHECK_EVERY
    results = on("10gbit", Auto(), steps, between=between)
    assert chosen[40] == {"native"}
    assert chosen[steps - 1] == {"poseidon"}
    assert_alike(results, on("10gbit", AllReduce(), steps))
    said = capsys.readouterr().err
    assert "planning again" in said
    assert "auto: poseidon on 100mbit, 100us" in said
    for _, metrics in results:
        assert metrics.steps == steps
        planned = metrics.strategy["planned"]
        assert planned.step_s == pytest.approx(planned.predicted_s, rel=auto.TOLERANCE)


def test_what_turns_out_slower_is_left_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A formula that promises too much: ranks go back to what was before, and do not fall for it twice."""

    def work(strategy: Strategy) -> tuple[Metrics, Tensor]:
        with _one_at_a_time, torch.random.fork_rng():
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        world, optimizer = tutti.init(), torch.optim.SGD(model.parameters(), lr=0.01)
        with distribute(model, optimizer, strategy, world=world) as job:
            for _ in range(80):
                model(torch.ones(128, 64) * (1 + world.rank)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return job.metrics, torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    honest = price

    def promising(strategy: Strategy, *args: Any, **options: Any) -> Any:
        found = honest(strategy, *args, **options)
        return replace(found, step_s=found.step_s / 10) if strategy == parse("tree") else found

    cluster = Cluster(link=Link("100mbit", "50us"), compute=Compute(flops="20gflops"))
    monkeypatch.setattr("tutti.plan.scaling.price", promising)
    wanted = simulate(work, AllReduce(), workers=4, cluster=cluster).results[0][1]
    results = simulate(work, Auto(), workers=4, cluster=cluster).results
    said = capsys.readouterr().err
    assert "auto: tree on 100mbit" in said
    assert "more than native did: back to it" in said
    for metrics, parameters in results:
        assert metrics.strategy["planned"].chosen == "native"
        torch.testing.assert_close(parameters, wanted)


def test_batches_that_grow_are_watched_anew(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Poseidon pays where batches are small: it goes as it decided then, until ranks plan again."""

    def work(strategy: Strategy) -> tuple[Metrics, float]:
        with _one_at_a_time, torch.random.fork_rng():
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        world, optimizer = tutti.init(), torch.optim.SGD(model.parameters(), lr=0.01)
        with distribute(model, optimizer, strategy, world=world) as job:
            for step in range(90):
                before_s = world.transport.now()
                model(torch.ones(4 if step < 30 else 128, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 29:
                    first.append(job.metrics.strategy.get("planned"))
            return job.metrics, world.transport.now() - before_s

    first: list[Any] = []
    monkeypatch.setattr(auto, "CHECK_EVERY", 10)
    cluster = Cluster(link=Link("200mbit", "50us"), compute=Compute(flops="2gflops"))
    (wanted_s, *_) = (took_s for _, took_s in simulate(work, AllReduce(), workers=4, cluster=cluster).results)
    first.clear()
    results = simulate(work, Auto(), workers=4, cluster=cluster).results
    assert {planned.chosen for planned in first} == {"poseidon"}
    said = capsys.readouterr().err.splitlines()[-1]
    for metrics, took_s in results:
        assert took_s < 1.05 * wanted_s, "as in full, by whatever name"
        assert metrics.strategy["planned"].predicted_s == pytest.approx(took_s, rel=auto.TOLERANCE)
        assert f"{format_time(metrics.strategy['planned'].predicted_s)} a step predicted" in said
    computing_s = 128 * 6 * 2 * 64 * 256 / 2e9
    communication = parse_time(said.split("of which ")[1].split(" ")[0])
    assert communication == pytest.approx(results[0][0].strategy["planned"].predicted_s - computing_s, rel=0.1)


@pytest.mark.parametrize("in_place", [False, True])
def test_models_compiled_afterwards_stay_as_they_are(in_place: bool, capfd: pytest.CaptureFixture[str]) -> None:
    def work(world: World) -> Metrics:
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with distribute(model, optimizer, Auto(), world=world) as job:
            compiled: Any = model
            if in_place:
                model.compile(backend="aot_eager")
            else:
                compiled = torch.compile(model, backend="aot_eager")
            for _ in range(30):
                with _one_at_a_time:  # torch compiles in one thread at a time.
                    loss = compiled(torch.ones(3, 100, dtype=torch.float64)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return job.metrics

    torch._dynamo.reset()  # What others compiled counts towards a limit of this one, and the other way round.
    try:
        results = run_ok(work, size=2, transport="sockets")
    finally:
        torch._dynamo.reset()
    for metrics in results:
        assert metrics.steps == 30
        assert metrics.strategy["planned"].chosen == "native"
        assert metrics.strategy["planned"].predicted_s is None
    said = capfd.readouterr().err
    assert said.count("auto: ") == 1
    assert "forward passes cannot be seen, so it stays with native" in said


def test_what_is_never_changed_to_is_not_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """Compiled, say, after its steps were watched."""

    def blind(job: Job, step: int) -> None:
        exchange = job._exchange
        assert isinstance(exchange, AutoExchange)
        if exchange.controller.pending is not None:
            exchange._forward_hook.remove()
        assert exchange.metrics()["planned"].chosen == "native"
        assert str(exchange.strategy) == "native"

    results = on("10mbit", Auto(), 30, between=blind)
    assert_alike(results, on("10mbit", AllReduce(), 30))
    said = capsys.readouterr().err
    assert said.count("auto: ") == 1
    assert "so it stays with native" in said


def test_a_switch_that_fails_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(exchange: AutoExchange, strategy: Strategy) -> None:
        raise RuntimeError(f"cannot switch to {strategy}")

    def between(job: Job, step: int) -> None:
        exchange = job._exchange
        assert isinstance(exchange, AutoExchange)
        if step == 2:
            exchange.controller.pending = price(AllReduce("tree"), *PRICED), "never printed"
            with pytest.raises(RuntimeError, match="cannot switch to tree"):
                exchange.switch_if_due()
            assert exchange.controller.pending is None

    monkeypatch.setattr(AutoExchange, "switch_to", fail)
    for _, metrics in on("100gbit", Auto(), 5, between=between):
        assert metrics.strategy["planned"].chosen == "native"


class Behind(Clock):
    """As of a GPU on which all takes a second longer than what was before it, and is done when somebody waits."""

    def __init__(self) -> None:
        self.number = self.settled = 0

    def now(self) -> int:
        self.number += 1
        return self.number

    def seconds(self, earlier: int, later: int) -> float:
        assert later <= self.settled
        return float(later - earlier)

    def settle(self) -> None:
        self.settled = self.number


def test_moments_are_those_of_the_clock_of_the_device() -> None:
    model = perceptron()
    replica = HookedReplica(model, torch.optim.SGD(model.parameters(), lr=0.1), SampleCounts())
    watch = StepRecorder(replica, Behind(), factorable_layers(replica))
    for _ in range(2):
        model(torch.ones(3, 100, dtype=torch.float64)).sum().backward()
        step = watch.take()
        assert step.complete
        assert step.forward_s == 1.0
        assert sorted(step.ready_s.values()) == [1.0, 2.0, 3.0, 4.0]
        assert step.rows == {"0.weight": 3, "2.weight": 3}
    watch.detach()
    model(torch.ones(3, 100, dtype=torch.float64)).sum().backward()
    assert not watch.take().complete


def test_it_goes_on_from_what_was_saved() -> None:
    saved: dict[int, Any] = {}

    def save(job: Job, step: int) -> None:
        if step == 29:
            saved[job.world.rank] = job.state_dict()

    on("10mbit", Auto(), 30, between=save)

    def load(job: Job, step: int) -> None:
        if step == 0:
            job.load_state_dict(saved[job.world.rank])
            assert "planned" in job.metrics.strategy
            assert job.metrics.strategy["planned"].chosen == "poseidon"
            assert job.steps == 30

    on("10mbit", Auto(), 2, between=load)


def test_alone_it_is_plain_training_and_others_go_on_from_it() -> None:
    saved: list[Any] = []

    def save(job: Job, step: int) -> None:
        if step == 4:
            saved.append(job.state_dict())

    def load(job: Job, step: int) -> None:
        if step == 0:
            job.load_state_dict(saved[-1])
            assert job.steps == 5

    (result,) = run_ok(train, Auto(), 5, save, size=1, transport="sockets")
    assert result[1].strategy == {}
    on("10mbit", Auto(), 30, between=load)


def test_hooks_of_the_user_may_come_after() -> None:
    """An average of weights, say, which hooks of the optimiser that change meanwhile must not disturb."""

    def late(job: Job, step: int) -> None:
        if step == 0:
            job._replica.optimizer.register_step_post_hook(lambda *_: counted.append(step))

    counted: list[int] = []
    on("10mbit", Auto(), 30, between=late)
    assert len(counted) == 4 * 29


def test_texts() -> None:
    assert parse("auto") == Auto()
    assert parse("auto:lossy=1") == Auto(lossy=True)
    assert [str(parse(text)) for text in ("auto", "auto:lossy=1")] == ["auto", "auto:lossy=1"]
    for wrong in ("auto:lossy=2", "auto:every=3", "auto+onebit"):
        with pytest.raises(ConfigError, match="auto"):
            parse(wrong)
    with pytest.raises(ConfigError, match="lossy must be True or False, got 1"):
        Auto(lossy=1)  # type: ignore[arg-type]


def _priced() -> tuple[Any, int, Cluster]:
    from profiles import perceptron as profile

    return profile(100, 200, 10, computing_s=4e-3, num_samples=3), 4, Cluster(link=Link("1gbit", "100us"))


PRICED = _priced()
