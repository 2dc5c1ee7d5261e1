"""Guarantees of each consistency, checked against what simulated workers read and servers applied."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tutti
from tutti.cluster import Cluster, Compute, Jitter, Link, Pauses
from tutti.events import APPLY, READ, Event
from tutti.strategies import BSP, SSP, Async, ParameterServer, SoftSync, StalenessAware
from tutti.strategies.parameter_server import Consistency
from tutti.strategies.parameter_server.messages.server import Server

STRAGGLER = Cluster(link=Link("1gbit", "50us"), compute=Compute(sample_s=1e-3), slow={1: 5.0})


@dataclass
class Run:
    """What was read and applied in one simulation."""

    steps: list[int]
    """Of each worker."""
    reads: list[list[Event]]
    """Of each worker."""
    applies: list[Event]
    """Of all servers."""
    parameters: list[list[Tensor]]
    """Each worker's, in the end."""

    def __post_init__(self) -> None:
        self.versions: dict[tuple[int, int, int], int] = {}
        """By shard, worker and clock of an update: the first version that it is in."""
        for event in self.applies:
            shard, version, worker, clock = event.about
            assert (shard, worker, clock) not in self.versions, f"applied twice: {event.about}"
            self.versions[shard, worker, clock] = version

    @property
    def shards(self) -> set[int]:
        return {event.about[0] for event in self.applies}


@contextmanager
def noted_servers() -> Iterator[list[Server]]:
    """All servers that start within it, also those of ranks that only serve."""
    found: list[Server] = []
    start = Server.start

    def noted(server: Server) -> None:
        found.append(server)
        start(server)

    with patch.object(Server, "start", noted):
        yield found


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 60), nn.Tanh(), nn.Linear(60, 20)).double()


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(2, 24, generator=generator, dtype=torch.float64)


def train(strategy: ParameterServer, steps: list[int], start: int = 0) -> tuple[list[Event], list[Tensor]]:
    world, model = tutti.init(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    job = tutti.distribute(model, optimizer, strategy)
    job.start_synchronously(start)
    for step in range(steps[world.rank]):
        model(batch(world.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    reads = [event for event in job.events if event.kind == READ]
    job.finish()
    return reads, [p.detach() for p in model.parameters()]


def run(rule: Consistency, steps: list[int], cluster: Cluster, start: int = 0, **options: Any) -> Run:
    strategy = ParameterServer(rule, bucket_bytes=options.pop("bucket_bytes", 10_000), **options)
    num_servers = 0 if strategy.servers == "colocated" else int(strategy.servers)
    with noted_servers() as servers:
        found = tutti.simulate(train, strategy, steps, start, workers=len(steps) + num_servers, cluster=cluster).results
    reads, parameters = zip(*found[: len(steps)], strict=True)
    applies = [event for server in servers for event in server.events if event.kind == APPLY]
    return Run(steps, list(reads), applies, list(parameters))


# The checks


def check_all_applied(found: Run) -> None:
    """Every update of every worker is applied, once."""
    sent = {(shard, w, clock) for shard in found.shards for w, most in enumerate(found.steps) for clock in range(most)}
    assert found.versions.keys() == sent


def check_reads(found: Run, bound: int, start: int = 0) -> None:
    """What a worker read in iteration c holds all updates of the iterations before c - bound; before c in the start."""
    for worker, reads in enumerate(found.reads):
        for event in reads:
            shard, clock, version = event.about
            for other, most in enumerate(found.steps):
                for old in range(min(most, clock - (bound if clock >= start else 0))):
                    there = found.versions[shard, other, old]
                    assert there <= version, (
                        f"worker {worker} read version {version} of shard {shard} in iteration {clock}, but update "
                        f"{old} of worker {other} is in version {there}"
                    )


def check_distance(found: Run, bound: int) -> None:
    """Nobody is more than `bound` iterations ahead of anybody who has not finished."""
    pushed: dict[tuple[int, int], list[float]] = defaultdict(list)
    for worker, reads in enumerate(found.reads):
        for event in reads:
            pushed[worker, event.about[0]].append(event.start_s)
    for worker, reads in enumerate(found.reads):
        for event in reads:
            shard, clock, _ = event.about
            for other, most in enumerate(found.steps):
                done = sum(time <= event.start_s for time in pushed[other, shard])
                assert clock - min(done, clock) <= bound or done == most, (
                    f"worker {worker} is in iteration {clock} of shard {shard} when worker {other} has done {done}"
                )


def check_own(found: Run) -> None:
    """What a worker read holds all its own earlier updates."""
    for worker, reads in enumerate(found.reads):
        for event in reads:
            shard, clock, version = event.about
            assert all(found.versions[shard, worker, old] <= version for old in range(clock))


def check_steps(found: Run, rule: Consistency) -> None:
    """Versions follow each other without gaps, each of as many updates as the rule says."""
    for shard in found.shards:
        sizes: dict[int, int] = defaultdict(int)
        for (number, _, clock), version in found.versions.items():
            if number == shard:
                sizes[version] += 1
                assert rule.bound is None or version == clock + 1
        assert sorted(sizes) == list(range(1, len(sizes) + 1))
        if rule.bound is None:
            assert max(sizes.values()) <= rule.quorum


def check(found: Run, rule: Consistency) -> None:
    check_all_applied(found)
    check_steps(found, rule)
    if rule.bound is None:
        check_own(found)
    else:
        check_reads(found, rule.bound)
        check_distance(found, rule.bound)
    for other in found.parameters[1:]:  # After finish, all have the same.
        assert all(torch.equal(one, two) for one, two in zip(found.parameters[0], other, strict=True))


# Random clusters


@st.composite
def clusters(draw: st.DrawFn, num_workers: int) -> Cluster:
    return Cluster(
        link=Link(draw(st.sampled_from(["10mbit", "100mbit", "10gbit"])), draw(st.sampled_from(["5us", "2ms"]))),
        compute=Compute(sample_s=1e-3),
        slow=draw(st.dictionaries(st.integers(0, num_workers - 1), st.sampled_from([0.5, 1.5, 4.0, 20.0]))),
        jitter=draw(st.sampled_from([None, Jitter(0.5), Jitter(0.9, "exponential")])),
        pauses=draw(st.sampled_from([None, Pauses("5ms", "10ms")])),
        seed=draw(st.integers(0, 1000)),
    )


def rules(num_workers: int) -> st.SearchStrategy[Consistency]:
    plain = st.one_of(
        st.just(BSP()),
        st.integers(0, 3).map(SSP),
        st.integers(1, num_workers).map(SoftSync),
        st.just(Async()),
    )
    return st.one_of(plain, plain.map(StalenessAware))


@settings(max_examples=20)
@given(data=st.data())
def test_every_consistency_keeps_its_guarantee(data: st.DataObject) -> None:
    num_workers = data.draw(st.integers(2, 6), "workers")
    rule = data.draw(rules(num_workers), "rule")
    steps = data.draw(st.lists(st.integers(1, 8), min_size=num_workers, max_size=num_workers), "steps")
    cluster = data.draw(clusters(num_workers), "cluster")
    servers = data.draw(st.sampled_from(["colocated", 1, 2]), "servers")
    overlap = data.draw(st.booleans(), "overlap")
    bucket_bytes = 10_000
    if rule.bound is None and rule.quorum > 1:  # Several shards may wait for each other: see the end of this file.
        servers, bucket_bytes = 1, 2**20
    check(run(rule, steps, cluster, servers=servers, overlap=overlap, bucket_bytes=bucket_bytes), rule)


@settings(max_examples=10)
@given(data=st.data())
def test_guarantees_hold_with_a_synchronous_start(data: st.DataObject) -> None:
    num_workers = data.draw(st.integers(2, 4), "workers")
    rule = data.draw(st.builds(SSP, st.integers(1, 3), st.booleans()), "rule")
    steps = data.draw(st.lists(st.integers(1, 10), min_size=num_workers, max_size=num_workers), "steps")
    start = data.draw(st.integers(1, 8), "start")
    cluster = data.draw(clusters(num_workers), "cluster")
    servers = data.draw(st.sampled_from(["colocated", 2]), "servers")
    clip = data.draw(st.sampled_from([None, 0.01]), "clip")
    found = run(rule, steps, cluster, start, servers=servers, clip=clip)
    check(found, rule)
    check_reads(found, rule.staleness, start)


@settings(max_examples=15)
@given(data=st.data())
def test_without_a_bound_the_start_has_one_of_zero(data: st.DataObject) -> None:
    """Until each worker is past it: then an update of its own is enough again."""
    num_workers = data.draw(st.integers(2, 4), "workers")
    counting = st.one_of(st.just(Async()), st.integers(1, num_workers).map(SoftSync), st.just(StalenessAware(Async())))
    rule = data.draw(counting, "rule")
    steps = data.draw(st.lists(st.integers(1, 10), min_size=num_workers, max_size=num_workers), "steps")
    start = data.draw(st.integers(1, 8), "start")
    cluster = data.draw(clusters(num_workers), "cluster")
    joint = {"servers": 1, "bucket_bytes": 2**20}  # As above.
    options = joint if rule.quorum > 1 else {"servers": data.draw(st.sampled_from(["colocated", 2]), "servers")}
    found = run(rule, steps, cluster, start, **options)
    check_all_applied(found)
    check_own(found)
    check_reads(found, max(steps), start)
    for other in found.parameters[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found.parameters[0], other, strict=True))


@settings(max_examples=10)
@given(data=st.data())
def test_guarantees_hold_with_clipping(data: st.DataObject) -> None:
    """Servers wait for each other's norms then."""
    num_workers = data.draw(st.integers(2, 4), "workers")
    rule = data.draw(rules(1), "rule")
    steps = data.draw(st.lists(st.integers(1, 5), min_size=num_workers, max_size=num_workers), "steps")
    cluster = data.draw(clusters(num_workers), "cluster")
    servers = data.draw(st.sampled_from(["colocated", 2]), "servers")
    check(run(rule, steps, cluster, servers=servers, clip=0.01), rule)


@settings(max_examples=6)
@given(data=st.data())
def test_ssp_of_staleness_0_is_bsp(data: st.DataObject) -> None:
    num_workers = data.draw(st.integers(2, 4), "workers")
    steps = data.draw(st.lists(st.integers(2, 6), min_size=num_workers, max_size=num_workers), "steps")
    cluster = data.draw(clusters(num_workers), "cluster")
    lockstep, none = (run(rule, steps, cluster).parameters[0] for rule in (BSP(), SSP(0)))
    assert all(torch.equal(one, two) for one, two in zip(lockstep, none, strict=True))


@settings(max_examples=15)
@given(data=st.data())
def test_a_worker_may_be_lost_at_any_time(data: st.DataObject) -> None:
    """The others go on, keep their promises to each other, and end alike."""
    rule = data.draw(rules(1), "rule")
    clip = data.draw(st.sampled_from([None, 0.01]), "clip")
    servers = data.draw(st.sampled_from([1, 2]), "servers")
    dies_ms = data.draw(st.sampled_from([10, 12, 15, 20, 30, 50]), "when, in ms")
    cluster = replace(data.draw(clusters(3), "cluster"), failures={1: dies_ms / 1000}, link=Link("100mbit", "200us"))
    strategy = ParameterServer(rule, bucket_bytes=10_000, servers=servers, clip=clip)
    start = data.draw(st.sampled_from([0, 5]), "start") if strategy.synchronous_start is not None else 0
    with noted_servers() as noted:
        simulation = tutti.simulate(train, strategy, [8, 8, 8], start, workers=3 + servers, cluster=cluster)
    applies = [event for server in noted for event in server.events if event.kind == APPLY and event.about[2] != 1]
    living = [simulation.results[0], simulation.results[2]]
    found = Run([8, 0, 8], [living[0][0], [], living[1][0]], applies, [parameters for _, parameters in living])
    check_all_applied(found)
    if rule.bound is None:
        check_own(found)
        check_reads(found, 8, start)
    else:
        check_reads(found, rule.bound, start)
    assert all(torch.equal(one, two) for one, two in zip(*found.parameters, strict=True))


# The checks themselves


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_a_larger_bound_fails_the_check_of_a_smaller_one(bound: int) -> None:
    """With a straggler the bound is used up: so the checks notice one that is too large."""
    found = run(SSP(bound + 1), [8, 8, 8], STRAGGLER)
    check(found, SSP(bound + 1))
    with pytest.raises(AssertionError, match="is in version"):
        check_reads(found, bound)
    with pytest.raises(AssertionError, match="when worker 1 has done"):
        check_distance(found, bound)


def test_without_a_bound_fast_workers_run_ahead() -> None:
    found = run(Async(), [8, 8, 8], STRAGGLER)
    check(found, Async())
    with pytest.raises(AssertionError, match="when worker 1 has done"):
        check_distance(found, 3)


def test_the_check_notices_a_read_without_the_readers_own_update() -> None:
    found = run(SoftSync(2), [4, 4, 4], STRAGGLER, servers=1, bucket_bytes=2**20)
    check(found, SoftSync(2))
    first = min(found.versions, key=lambda key: found.versions[key])
    found.versions[first] += 100
    with pytest.raises(AssertionError):
        check_own(found)


def test_a_straggler_slows_down_bsp_only() -> None:
    def seconds(rule: Consistency) -> float:
        return max(event.start_s for event in run(rule, [6, 6, 6], STRAGGLER, servers=1).reads[0])

    lockstep, bounded, none = seconds(BSP()), seconds(SSP(2)), seconds(Async())
    assert none < 0.3 * lockstep
    assert none < bounded < lockstep


# Staleness-aware steps


def replay(found: Run, scale: Any) -> list[Tensor]:
    """One process takes the very steps that the logs tell of, with gradients at what was read."""
    model = net()
    parameters = list(model.parameters())
    history = [[p.detach().clone() for p in parameters]]
    read = {(w, event.about[1]): event.about[2] for w, reads in enumerate(found.reads) for event in reads}
    order = sorted((event.about[1], event.about[2], event.about[3]) for event in found.applies)
    for version, worker, clock in order:
        base = read[worker, clock]
        with torch.no_grad():
            for p, old in zip(parameters, history[base], strict=True):
                p.copy_(old)
        grads = torch.autograd.grad(model(batch(worker, clock)).square().mean(), parameters)
        factor = 0.05 * scale(version - 1 - base)
        history.append([old - factor * grad for old, grad in zip(history[-1], grads, strict=True)])
    return history[-1]


def train_plainly(strategy: ParameterServer, steps: int) -> tuple[list[Event], list[Tensor], dict[int, int]]:
    world, model = tutti.init(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job = tutti.distribute(model, optimizer, strategy)
    for step in range(steps):
        model(batch(world.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    job.finish()
    reads = [event for event in job.events if event.kind == READ]
    return reads, [p.detach() for p in model.parameters()], job.metrics.strategy["staleness"]


@pytest.mark.parametrize("factor", [None, lambda staleness: 0.5**staleness], ids=["inverse", "own"])
def test_stale_updates_are_scaled_down(factor: Any) -> None:
    rule = StalenessAware(Async()) if factor is None else StalenessAware(Async(), factor)
    strategy = ParameterServer(rule, servers=1)
    with noted_servers() as servers:
        results = tutti.simulate(train_plainly, strategy, 10, workers=3, cluster=STRAGGLER).results[:2]
    applies = [event for server in servers for event in server.events if event.kind == APPLY]
    found = Run([10, 10], [reads for reads, _, _ in results], applies, [final for _, final, _ in results])
    assert len(found.shards) == 1
    staleness = results[1][2]
    assert max(staleness) >= 3, "worker 1 is a straggler"
    assert sum(staleness.values()) == 10
    expected = replay(found, factor or (lambda late: 1 / max(1, late)))
    for one, two in zip(found.parameters[0], expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-13)
    unscaled = replay(found, lambda _: 1.0)
    assert any((one - two).abs().max() > 1e-6 for one, two in zip(found.parameters[0], unscaled, strict=True))


def test_soft_sync_of_several_shards() -> None:
    """Worker 1 leaves when of one shard only worker 0's update waits for a second, of another only worker 2's."""
    check(run(SoftSync(2), [4, 4, 4], STRAGGLER), SoftSync(2))
