"""Peers' updates and gossip: results, flow control, and what happens when ranks are lost."""

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, WeightedRandomSampler

import tutti
from support import pairwise, run_ok, run_threads
from tutti.cluster import Cluster, Compute, Link
from tutti.codecs import ErrorFeedback, OneBit, TopK
from tutti.errors import ConfigError, NonFiniteLoss, RankLost
from tutti.job import Job, distribute
from tutti.simulation.runs.scaling import ScalingCase, scaling
from tutti.strategies import Gossip, Graph, PeerUpdates, Strategy, parse
from tutti.strategies.decentralised.graphs import topology_for
from tutti.strategies.decentralised.wire import PeerMessageHeader, PeerMessageKind
from tutti.transports.base import Operation
from tutti.world import World

TRANSPORTS = ("simulated", "sockets", "shared_memory", "hosts")
everywhere = pytest.mark.parametrize("transport", TRANSPORTS)
ALL = ("peers", "peers+threshold", "peers:graph=ring,inbox=2", "gossip", "gossip:graph=ring", "gossip:pairs=async")
LR = 0.05
WEB = Graph(4, ((0, 1), (1, 2), (2, 3), (3, 0), (0, 2)), directed=True)


def net() -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return model


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def start(world: World, strategy: Strategy) -> tuple[nn.Module, torch.optim.Optimizer, Job]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return model, optimizer, distribute(model, optimizer, strategy, world=world)


def go(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model(batch(job.world.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def gradient_step(values: Tensor, rank: int, step: int) -> Tensor:
    """What a step of a rank changes, computed in this process alone."""
    model = net()
    nn.utils.vector_to_parameters(values.clone(), model.parameters())
    model(batch(rank, step)).square().mean().backward()
    return -LR * torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def close(one: Tensor, two: Tensor) -> None:
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-13)


def same(found: list[Tensor]) -> None:
    assert all(torch.equal(each, found[0]) for each in found)


# Results


def watched(world: World, strategy: Strategy, steps: int) -> tuple[Tensor, Tensor]:
    """The rank's own parameters after all steps, and what all agree on."""
    model, optimizer, job = start(world, strategy)
    go(job, model, optimizer, range(steps))
    own = flat(model)
    with job.consensus():
        pass
    close(flat(model), own)
    job.finish()
    return own, flat(model)


def by_matrices(strategy: Gossip, size: int, steps: int) -> list[Tensor]:
    """D-PSGD, with push-sum weights, as its papers write it."""
    graph = topology_for(strategy.graph, size)
    x, w = torch.stack([flat(net())] * size), torch.ones(size, 1, dtype=torch.float64)
    for step in range(steps):
        mixing = torch.tensor(graph.mixing(step).copy())
        changes = torch.stack([gradient_step(x[rank] / w[rank], rank, step) for rank in range(size)])
        x, w = mixing @ x + changes, mixing @ w
    return list(x / w)


@pairwise(
    transport=TRANSPORTS,
    text=["gossip", "gossip:graph=ring", "gossip:graph=torus", "gossip:graph=random"],
    size=[2, 4],
)
def test_synchronous_gossip_follows_the_recurrence(transport: str, text: str, size: int) -> None:
    strategy = parse(text)
    assert isinstance(strategy, Gossip)
    found = run_ok(watched, strategy, 5, size=size, transport=transport)
    expected = by_matrices(strategy, size, 5)
    for (own, _), wanted in zip(found, expected, strict=True):
        close(own, wanted)
    same([agreed for _, agreed in found])
    close(found[0][1], torch.stack(expected).mean(0))


@pytest.mark.parametrize("transport", ["simulated", "sockets"])
@pytest.mark.parametrize(("size", "text"), [(4, f"gossip:graph={WEB}"), (7, "gossip"), (6, "gossip:graph=torus")])
def test_larger_and_directed_graphs(transport: str, size: int, text: str) -> None:
    strategy = parse(text)
    assert isinstance(strategy, Gossip)
    found = run_ok(watched, strategy, 4, size=size, transport=transport)
    for (own, _), wanted in zip(found, by_matrices(strategy, size, 4), strict=True):
        close(own, wanted)


def still(world: World, strategy: Strategy, steps: int) -> tuple[Tensor, Tensor]:
    """Ranks that differ at first and learn nothing: where mixing alone brings them."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    job = distribute(model, optimizer, strategy, world=world)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(world.rank)  # Seen as this rank's first change.
    go(job, model, optimizer, range(steps))
    own = flat(model)
    job.finish()
    return own, flat(model)


@pytest.mark.parametrize("transport", ["simulated", "sockets"])
def test_push_sum_finds_the_true_mean(transport: str) -> None:
    for own, _ in run_ok(still, Gossip(WEB), 150, size=4, transport=transport):
        torch.testing.assert_close(own, flat(net()) + 1.5, rtol=0, atol=1e-9)


def test_an_averaging_round_keeps_the_push_sum_mean() -> None:
    """When ranks come together while weights are still uneven, and go apart again as they were."""

    def average(world: World) -> Tensor:
        model, optimizer, job = start(world, Gossip(WEB))
        for step in range(150):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, -world.rank / LR if step == 0 else 0.0)
            optimizer.step()
            if step == 2:
                with job.consensus():
                    pass
        own = flat(model)
        job.finish()
        return own

    for own in run_ok(average, size=4, transport="simulated"):
        torch.testing.assert_close(own, flat(net()) + 1.5, rtol=0, atol=1e-9)


@everywhere
@pytest.mark.parametrize("graph", ["ring", "exponential", "random"])
def test_pair_averaging_keeps_the_sum(transport: str, graph: str) -> None:
    found = run_ok(still, Gossip(graph, "async"), 12, size=5, transport=transport)
    same([agreed for _, agreed in found])
    close(found[0][1], flat(net()) + 2.0)


def train_and_collect(world: World, strategy: PeerUpdates, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """All this rank's changes as the optimiser made them, what is not sent yet, and the model in the end."""
    model, optimizer, job = start(world, strategy)
    total = torch.zeros_like(flat(model))
    for step in range(steps):
        before = flat(model)
        model(batch(world.rank, step)).square().mean().backward()
        with torch.no_grad():
            total -= LR * torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(flat(model), before)
    exchange: Any = job._exchange
    left = torch.zeros_like(total)
    ((bucket, state),) = zip(exchange.context.model.buckets, exchange.algorithm.packets.states, strict=True)
    if state:
        named = dict(zip((slot.name for slot in bucket.slots), bucket.starts, strict=True))
        place = 0
        for name, p in model.named_parameters():
            at = named[name]
            if at < bucket.values.numel():
                left[place : place + p.numel()] = state["residual"][at : at + p.numel()]
            place += p.numel()
    job.finish()
    return total, left, flat(model)


@everywhere
@pytest.mark.parametrize("graph", ["all", "ring", "torus", "exponential"])
def test_exact_updates_add_up(transport: str, graph: str) -> None:
    found = run_ok(train_and_collect, PeerUpdates(None, graph, 3), 6, size=4, transport=transport)
    same([model for _, _, model in found])
    close(found[0][2], flat(net()) + sum(total for total, _, _ in found))


@everywhere
@pytest.mark.parametrize("codec", [ErrorFeedback(OneBit()), ErrorFeedback(TopK(0.05))], ids=str)
def test_sent_updates_and_residuals_add_up(transport: str, codec: Any) -> None:
    found = run_ok(train_and_collect, PeerUpdates(codec), 6, size=3, transport=transport)
    same([model for _, _, model in found])
    said = sum(total - left for total, left, _ in found)
    assert isinstance(said, Tensor)
    torch.testing.assert_close(found[0][2], flat(net()) + said, rtol=0, atol=1e-6)
    assert any(left.abs().max() > 1e-4 for _, left, _ in found)


# Flow control


def test_the_inbox_limits_how_far_a_rank_is_ahead() -> None:
    """A rank of a fifth of the speed: nobody is more than so many updates ahead of what it has applied."""

    def train(strategy: Strategy) -> dict[int, int]:
        world = tutti.init()
        model, optimizer, job = start(world, strategy)
        go(job, model, optimizer, range(12))
        job.finish()
        return job.metrics.strategy["staleness"]

    def seen(inbox: int, graph: str) -> int:
        cluster = Cluster(link=Link("1gbit", "50us"), slow={3: 8}, compute=Compute(sample_s=1e-3))
        found = tutti.simulate(train, PeerUpdates(None, graph, inbox), workers=4, cluster=cluster).results
        return max(found[3])

    for graph in ("all", "ring"):
        assert 0 < seen(2, graph) <= 6
        assert seen(64, graph) > 12


@pytest.mark.parametrize("call", ["shard", "finish", "distribute"])
def test_a_rank_that_is_ahead_does_not_wait_for_one_that_waits_for_it(call: str) -> None:
    """Rank 0 is ahead by more than an inbox of rank 1, which waits for it in a call that has nothing to do with it."""

    def train(world: World) -> None:
        model, optimizer, job = start(world, PeerUpdates(None, inbox=1))
        other = nn.Linear(2, 2)
        job_of_other = distribute(other, torch.optim.SGD(other.parameters(), lr=0.1), world=world)
        another = nn.Linear(2, 2)
        sampler = WeightedRandomSampler([1.0] * 8, 8)
        loader = tutti.shard(DataLoader(torch.arange(8), batch_size=4, sampler=sampler), world=world)
        if world.rank == 0:
            go(job, model, optimizer, range(6))
        if call == "shard":
            assert len(list(loader)) == 1
        elif call == "finish":
            job_of_other.finish()
        else:
            distribute(another, torch.optim.SGD(another.parameters(), lr=0.1), world=world).finish()
        if world.rank == 1:
            go(job, model, optimizer, range(6))
        job_of_other.finish()
        job.finish()

    run_ok(train, size=2, transport="sockets")


def test_each_update_arrives_once_along_a_graph() -> None:
    def train(world: World) -> list[int]:
        model, optimizer, job = start(world, PeerUpdates(None, "ring"))
        heard: list[tuple[int, int]] = []
        inbox: Any = job._exchange.algorithm._inbox  # type: ignore[attr-defined]
        accept = inbox.accept
        inbox.accept = lambda origin, number: (heard.append((origin, number)), accept(origin, number))[1]
        job.barrier()  # No update may come before this rank counts them.
        go(job, model, optimizer, range(5))
        job.finish()
        assert len(heard) == len(set(heard)) == 5 * (world.size - 1)
        return [job.world.rank]

    run_ok(train, size=5, transport="simulated")
    run_ok(train, size=5, transport="sockets")


def ranks_apart(cluster: Cluster, num_steps: int) -> float:
    """How far two ranks of asynchronous gossip are apart that have taken one step each, in opposite directions."""

    def train() -> float:
        world = tutti.init()
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        job = distribute(model, optimizer, Gossip(pairs="async"), world=world)
        before = model.weight.item()
        for step in range(num_steps):
            factor = (1.0 if world.rank else -1.0) if step == 0 else 0.0
            (factor * model(torch.ones(1, 1))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        apart = model.weight.item() - before
        job.finish()
        return apart

    first, second = tutti.simulate(train, workers=2, cluster=cluster).results
    return abs(first - second)


def test_pairs_that_ask_each_other_at_once_come_closer() -> None:
    """Both average: they would swap their values if each of two crossing requests moved both of them."""
    assert ranks_apart(Cluster(link=Link("1gbit", "50us"), compute=Compute(sample_s=1e-3)), 8) < 1e-6


def test_async_gossip_averages_also_where_steps_are_shorter_than_the_latency() -> None:
    assert ranks_apart(Cluster(link=Link("1gbit", "50ms"), compute=Compute(sample_s=1e-6)), 24) < 1e-3


@pytest.mark.parametrize("text", ["gossip", "gossip:graph=ring", "gossip:graph=random", "gossip:pairs=async"])
def test_bytes_do_not_grow_with_ranks(text: str) -> None:
    def sent(world: World) -> float:
        model, optimizer, job = start(world, parse(text))
        go(job, model, optimizer, range(8))
        sent = job.metrics.bytes_sent / 8
        job.finish()
        return sent

    few = sum(run_ok(sent, size=4, transport="simulated"))
    assert sum(run_ok(sent, size=16, transport="simulated")) / 16 <= 1.3 * few / 4


@everywhere
@pytest.mark.parametrize("text", ALL)
def test_leave_and_join(transport: str, text: str) -> None:
    def train(world: World) -> Tensor:
        model, optimizer, job = start(world, parse(text))
        go(job, model, optimizer, range(3))
        if world.rank == 1:
            with job.away(), pytest.raises(ConfigError, match="away"):
                go(job, model, optimizer, range(1))
        go(job, model, optimizer, range(3, 6 + world.rank))
        job.finish()
        return flat(model)

    same(run_ok(train, size=3, transport=transport))


# Lost ranks


def train_until_lost(strategy: Strategy, dies_at: dict[int, int], in_round: bool) -> Callable[[World], Tensor | None]:
    def train(world: World) -> Tensor | None:
        model, optimizer, job = start(world, strategy)
        for step in range(12):
            if step == dies_at.get(world.rank):
                world.close()
                return None
            go(job, model, optimizer, range(step, step + 1))
            if in_round and step % 4 == 3:
                with job.consensus():
                    pass
        job.finish()
        return flat(model)

    return train


@pytest.mark.parametrize("transport", ["simulated", "sockets"])
@pytest.mark.parametrize("text", ALL)
def test_the_other_ranks_continue_and_agree(transport: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    found = run_ok(train_until_lost(parse(text), {0: 3, 2: 6}, True), size=5, transport=transport)
    same([each for each in found if each is not None])
    assert [each is None for each in found] == [True, False, True, False, False]
    assert "rank 1: rank 0 is gone at clock" in caplog.text


@pytest.mark.parametrize("text", ALL)
def test_losses_at_any_time(text: str) -> None:
    """In virtual time, moments of death spread over steps, meetings and the end."""

    def train() -> Tensor:
        result = train_until_lost(parse(text), {}, True)(tutti.init())
        assert result is not None
        return result

    calm = Cluster(link=Link("100mbit", "300us"), compute=Compute(sample_s=2e-4), jitter=0.3, seed=1)
    whole_s = tutti.simulate(train, workers=4, cluster=calm).seconds
    for number in range(6):
        rng = np.random.default_rng(number)
        dying = rng.choice(4, size=1 + number % 2, replace=False)
        failures = {int(rank): float(rng.uniform(0.15, 1.0)) * whole_s for rank in dying}
        found = tutti.simulate(train, workers=4, cluster=replace(calm, failures=failures)).results
        same([each for each in found if each is not None])
        assert sum(each is not None for each in found) >= 4 - len(failures)


@pytest.mark.parametrize("text", ALL)
def test_a_result_that_one_rank_received_reaches_all(text: str) -> None:
    """The leader of a round is lost when it has sent the result to one rank only: that one sends it to the rest."""

    def train(world: World) -> Tensor | None:
        model, optimizer, job = start(world, parse(text))
        go(job, model, optimizer, range(4))
        if world.rank == 0:
            group: Any = job._exchange.context.group  # type: ignore[attr-defined]
            send = group.send
            group.send = lambda peer, header, *rest: (
                None if header.kind == PeerMessageKind.ROUND_RESULT and peer != 2 else send(peer, header, *rest)
            )
            job._exchange.consensus()
            agreed = flat(model)
            world.transport.elapse(0.1)
            world.close()
            return agreed
        job.finish()
        return flat(model)

    same(run_ok(train, size=4, transport="simulated"))


@pytest.mark.parametrize("transport", ["simulated", "sockets"])
def test_the_graph_is_rebuilt_over_the_remaining_ranks(transport: str) -> None:
    def train(world: World) -> tuple[Any, int] | None:
        model, optimizer, job = start(world, Gossip("ring"))
        go(job, model, optimizer, range(4))
        if world.rank == 1:
            world.close()
            return None
        go(job, model, optimizer, range(4, 12))
        algorithm: Any = job._exchange.algorithm  # type: ignore[attr-defined]
        members, size = algorithm._members, algorithm.topology.size
        job.finish()
        return members, size

    found = run_ok(train, size=5, transport=transport)
    assert [each for each in found if each] == [((0, 2, 3, 4), 4)] * 4


@pytest.mark.parametrize("transport", ["simulated", "sockets"])
def test_an_update_sent_twice_is_applied_once(transport: str) -> None:
    def train(world: World) -> tuple[Tensor, Tensor]:
        model, optimizer, job = start(world, PeerUpdates(None, "ring"))
        total = torch.zeros_like(flat(model))
        exchange: Any = job._exchange

        def again() -> Any:
            for peer in exchange.context.group.others:
                exchange.algorithm._sent.resend(peer)
            yield from ()

        for step in range(5):
            model(batch(world.rank, step)).square().mean().backward()
            total -= LR * torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
            exchange.context.wait(again())
        job.finish()
        return total, flat(model)

    found = run_ok(train, size=4, transport=transport)
    close(found[0][1], flat(net()) + sum(total for total, _ in found))


@pytest.mark.parametrize("text", [*ALL, "peers:inbox=1", "gossip:graph=random"])
def test_no_rank_waits_for_one_on_leave(text: str) -> None:
    def train() -> float:
        world = tutti.init()
        model, optimizer, job = start(world, parse(text))
        go(job, model, optimizer, range(2))
        if world.rank == 1:
            with job.away():
                world.transport.elapse(1000.0)
        go(job, model, optimizer, range(2, 10))
        stepped_s = world.transport.now()
        job.finish()
        return stepped_s

    cluster = Cluster(link=Link("1gbit", "50us"), compute=Compute(sample_s=1e-3))
    times = tutti.simulate(train, workers=4, cluster=cluster, timeout=timedelta(hours=1)).results
    assert times[1] > 1000
    assert max(times[0], *times[2:]) < 10


# The rest


@everywhere
@pytest.mark.parametrize("text", ALL)
def test_a_non_finite_loss_stops_all_ranks(transport: str, text: str) -> None:
    def train(world: World) -> None:
        model, optimizer, job = start(world, parse(text))
        for step in range(60):
            loss = model(batch(world.rank, step)).square().mean()
            loss = loss * float("nan") if world.rank == 1 and step == 3 else loss
            job.watch(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        job.finish()

    for rank, each in enumerate(run_threads(train, size=3, transport=transport)):
        assert isinstance(each, NonFiniteLoss), each
        assert str(each).startswith(f"rank {rank}: the loss on rank 1 is NaN or infinite")


@pytest.mark.parametrize("text", ALL)
def test_a_world_of_one_rank(text: str) -> None:
    ((own, agreed),) = run_ok(watched, parse(text), 3, size=1, transport="sockets")
    expected = flat(net())
    for step in range(3):
        expected = expected + gradient_step(expected, 0, step)
    close(own, expected)
    close(agreed, expected)


@pytest.mark.parametrize("text", ALL)
def test_statistics_counters_and_mixed_dtypes(text: str) -> None:
    def train(world: World) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 30))
        model[2].double()
        model[0].bias.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        job = distribute(model, optimizer, parse(text), world=world)
        for step in range(4 + world.rank):
            x = model[1](model[0](batch(world.rank, step).float()))
            model[2](x.double()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        job.finish()
        return [each.detach().clone() for each in model.state_dict().values()]

    found = run_ok(train, size=3, transport="sockets")
    for each in found:
        assert all(torch.equal(one, two) for one, two in zip(each, found[0], strict=True))
        assert (each[5] > 0).all()
        assert int(each[6]) == 4, "a counter is the lowest living rank's"


def test_a_graph_of_another_size_is_refused() -> None:
    for strategy in (Gossip(WEB), PeerUpdates(None, WEB)):
        for each in run_threads(start, strategy, size=3, transport="sockets"):
            assert isinstance(each, ConfigError)
            assert "a graph of 4 ranks in a world of 3" in str(each)


def test_the_spectral_gap_is_reported() -> None:
    def gap(world: World, text: str) -> float | None:
        model, optimizer, job = start(world, parse(text))
        go(job, model, optimizer, range(1))
        gap = job.metrics.strategy.get("spectral_gap")
        job.finish()
        return gap

    assert run_ok(gap, "gossip:graph=ring", size=4, transport="simulated") == pytest.approx([2 / 3] * 4)
    assert run_ok(gap, "peers", size=2, transport="simulated") == [None, None]


@pytest.mark.parametrize("text", ALL)
def test_dry_runs_count_bytes(text: str) -> None:
    def bytes_of(workers: int) -> float:
        cluster = Cluster(link=Link("1tbit", "50us"))  # Which carries all that is sent within a step.
        case = ScalingCase(model="alexnet", cluster=cluster, strategy=parse(text), batch_size=8, steps=3)
        (row,) = scaling(case, [workers])
        return row.bytes_per_worker

    grows = bytes_of(8) / bytes_of(4)
    assert (grows > 1.5) == text.startswith("peers")


@pytest.mark.parametrize("text", ["peers", "gossip", "gossip:pairs=async"])
def test_a_dropped_rank_learns_of_it_and_stops(text: str) -> None:
    """It sent what can be no message: the others go on without it, and it must not train, and save, by itself."""
    kinds = {"peers": PeerMessageKind.UPDATE, "gossip": PeerMessageKind.VALUES}
    kind = kinds.get(text, PeerMessageKind.PAIR_REQUEST)

    def train(world: World) -> Tensor:
        model, optimizer, job = start(world, parse(text))
        exchange: Any = job._exchange
        go(job, model, optimizer, range(5))
        if world.rank == 0:
            nonsense = torch.zeros(8, dtype=torch.uint8)

            def speak() -> Operation:
                header = PeerMessageHeader(kind, 6, world.rank, 6, nonsense.nbytes)
                exchange.context.group.send_to_all(header, nonsense)
                yield from ()

            exchange._channel.spawn(speak()).wait()
        go(job, model, optimizer, range(5, 10))
        job.finish()
        return flat(model)

    zero, *others = run_threads(train, size=4, transport="sockets")
    assert isinstance(zero, RankLost)
    assert "the others have gone on without this rank" in str(zero)
    same(others)


@pytest.mark.parametrize("where", ["in finish", "away"])
@pytest.mark.parametrize("text", ["peers", "gossip", "gossip:graph=ring"])
def test_memory_is_bounded_while_others_continue(text: str, where: str) -> None:
    def held(algorithm: Any) -> int:
        return sum(len(getattr(algorithm, name, ())) for name in ("_received", "_inbox", "_sent"))

    def train() -> int:
        world = tutti.init()
        model, optimizer, job = start(world, parse(text))
        algorithm: Any = job._exchange.algorithm  # type: ignore[attr-defined]
        most = 0
        for step in range(5 if world.rank == 1 else 80):
            go(job, model, optimizer, range(step, step + 1))
            most = max(most, held(algorithm))
        if world.rank == 1 and where == "away":
            with job.away():
                world.transport.elapse(1.0)
            most = max(most, held(algorithm))
        receive = algorithm.receive

        def counted(*args: Any) -> None:
            nonlocal most
            receive(*args)
            most = max(most, held(algorithm))

        algorithm.receive = counted
        job.finish()
        return most

    cluster = Cluster(link=Link("1gbit", "50us"), compute=Compute(sample_s=0.01 / 4))
    assert max(tutti.simulate(train, workers=3, cluster=cluster).results) <= 24


@pytest.mark.parametrize("text", ALL)
def test_a_rank_that_finishes_early_ends_with_the_same_model(text: str) -> None:
    def train(world: World) -> Tensor:
        model, optimizer, job = start(world, parse(text))
        go(job, model, optimizer, range(4))
        for step in range(4, 4 + 3 * world.rank):
            with job.consensus():
                go_no_further = flat(model)
            assert go_no_further.isfinite().all()
            go(job, model, optimizer, range(step, step + 1))
        job.finish()
        return flat(model)

    same(run_ok(train, size=3, transport="sockets"))


def call_consensus(job: tutti.Job) -> None:
    with job.consensus():
        raise AssertionError("a user may save a model here, which is not the job's")


@pytest.mark.parametrize("call", [call_consensus, lambda job: job.reduce(1.0), lambda job: job.gather(1)])
@pytest.mark.parametrize("text", ["peers", "gossip"])
def test_a_rank_that_is_cut_off_concludes_nothing_alone(text: str, call: Callable[[tutti.Job], Any]) -> None:
    def cut_off() -> None:
        raise RankLost("rank 1: this process cannot go on: it is cut off.")

    def train(world: World) -> None:
        if world.rank == 1:
            world = replace(world, confirm=cut_off)
        model, optimizer, job = start(world, parse(text))
        with job.consensus():  # Nobody is lost, so there is nothing to confirm.
            job.reduce(1.0)
        go(job, model, optimizer, range(2))
        if world.rank == 0:
            world.close()  # As if it were lost: rank 1 goes on alone.
            return
        with pytest.raises(RankLost, match="it is cut off"):
            call(job)
        job._release()

    assert run_threads(train, size=2, transport="sockets") == [None, None]


@pytest.mark.parametrize("text", ["peers", "gossip"])
def test_a_rank_that_is_cut_off_does_not_finish_alone(text: str) -> None:
    tolerated: list[bool] = []

    def cut_off() -> None:
        raise RankLost("rank 1: this process cannot go on: it is cut off.")

    def train(world: World) -> None:
        if world.rank == 1:
            world = replace(world, confirm=cut_off, tolerate_loss=tolerated.append)
        model, optimizer, job = start(world, parse(text))
        go(job, model, optimizer, range(2))
        job.finish()

    results = run_threads(train, size=2, transport="sockets")
    assert results[0] is None
    assert "it is cut off" in str(results[1])
    assert tolerated == [True]  # The launcher still takes it for one that the others go on without.
