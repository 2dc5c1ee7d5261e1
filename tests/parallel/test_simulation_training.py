"""Training in virtual time: what is computed, how long that takes, and that it is the same every time."""

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from inspect import getsource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tutti
from support import run_ok
from tutti import AllReduce, Cluster, Link, Simulation, simulate
from tutti.cluster import Compute, Host, Jitter, Pauses
from tutti.collectives import ALGORITHMS
from tutti.transports import Transport
from tutti.world import World

LINK = Link("1gbit", "50us")


def times(
    num_steps: int = 1,
    *,
    model: Callable[[], nn.Module] = lambda: nn.Linear(4, 3, bias=False),
    rows: int = 8,
    strategy: AllReduce | None = None,
    loop: Callable[[nn.Module, Tensor, torch.optim.Optimizer, Any], None] | None = None,
) -> list[float]:
    """Train for a few steps, into each of which all ranks go at once; how long each took."""
    torch.manual_seed(0)
    link = tutti.init().transport
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    job = tutti.distribute(net, optimizer, strategy)
    first = next(net.parameters())
    x = torch.ones(rows, first.shape[1], device=first.device)
    assert link.cluster is not None
    took = []
    for number in range(1, num_steps + 1):
        link.elapse((100 * number - link.now()) / link.cluster.slow.get(link.rank, 1.0))
        start_s = link.now()
        (loop or usual)(net, x, optimizer, job)
        took.append(link.now() - start_s)
    job.finish()
    return took


def usual(net: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, job: Any) -> None:
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def alone(compute: Compute, **how: Any) -> float:
    """The steps of a rank that has nobody to talk to."""
    cluster = Cluster(compute=compute, **{key: how.pop(key) for key in ("slow", "jitter") if key in how})
    steps = simulate(lambda: times(**how), workers=1, cluster=cluster).results[0]
    return sum(steps)


# What computing costs


def test_elapse_moves_one_clock_only() -> None:
    def work() -> float:
        world = tutti.init()
        world.transport.elapse(1.5 * world.rank)
        world.transport.elapse(0.25)
        return world.transport.now()

    found = simulate(work, workers=3)
    assert found.results == [0.25, 1.75, 3.25]
    assert [rank.busy_s for rank in found.ranks] == found.results
    assert found.seconds == 3.25


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_elapse_takes_seconds(seconds: float) -> None:
    def work() -> None:
        with pytest.raises(tutti.TuttiError, match="elapse takes seconds"):
            tutti.init().transport.elapse(seconds)

    simulate(work, workers=1)


def test_a_step_costs_forward_backward_and_the_step_itself() -> None:
    assert alone(Compute(sample_s=0.3, step_s=0.1)) == pytest.approx(8 * 0.3 + 0.1)
    assert alone(Compute(sample_s=0.3, forward=0.9), rows=3) == pytest.approx(3 * 0.3)


def test_operations_are_counted_where_no_time_is_given() -> None:
    flops = 2 * 4 * 3  # Of a matrix of 3 × 4, each way: one forward, two backward.
    assert alone(Compute(flops=1e6)) == pytest.approx(3 * 8 * flops / 1e6)
    deep = alone(Compute(flops=1e6), model=lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    assert deep == pytest.approx(3 * 8 * 2 * (4 * 6 + 6 * 3) / 1e6)
    convolution = nn.Conv2d(1, 2, 3, bias=False)

    def forward_s() -> float:
        link, net = tutti.init().transport, nn.Sequential(convolution)
        tutti.distribute(net, torch.optim.SGD(net.parameters(), lr=0.1))
        start_s = link.now()
        with torch.no_grad():
            net(torch.zeros(5, 1, 10, 10))
        return link.now() - start_s

    found = simulate(forward_s, workers=1, cluster=Cluster(compute=Compute(flops=1e6)))
    assert found.results[0] == pytest.approx(5 * 2 * (9 * 2 * 8 * 8) / 1e6)


def test_evaluation_costs_forward_only() -> None:
    def evaluate(net: nn.Module, x: Tensor, *_: Any) -> None:
        with torch.no_grad():
            net(x)

    def both(net: nn.Module, x: Tensor, optimizer: Any, job: Any) -> None:
        evaluate(net, x)
        usual(net, x, optimizer, job)

    assert alone(Compute(sample_s=0.3), loop=evaluate) == pytest.approx(8 * 0.1)
    assert alone(Compute(sample_s=0.3), loop=both, num_steps=2) == pytest.approx(2 * 8 * 0.4)


def test_several_passes_forward_before_one_backward() -> None:
    def twice(net: nn.Module, x: Tensor, *_: Any) -> None:
        (net(x).sum() + net(x[:2]).sum()).backward()

    assert alone(Compute(sample_s=0.3), loop=twice) == pytest.approx(10 * 0.3)
    assert alone(Compute(sample_s=0.3), loop=twice, num_steps=3) == pytest.approx(3 * 10 * 0.3)


def test_a_model_of_which_only_parts_are_called_trains() -> None:
    def train() -> list[float]:
        tutti.init()
        net = nn.ModuleDict({"part": nn.Linear(2, 1, bias=False)})
        nn.init.zeros_(net["part"].weight)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        tutti.distribute(net, optimizer)
        net["part"](torch.ones(4, 2)).mean().backward()
        optimizer.step()
        return net["part"].weight.detach().flatten().tolist()  # type: ignore[union-attr, operator]

    assert simulate(train, workers=2).results == [[-1.0, -1.0]] * 2


def test_accumulation_computes_twice_and_exchanges_once() -> None:
    seen: list[int] = []

    def twice(net: nn.Module, x: Tensor, optimizer: Any, job: Any) -> None:
        with job.no_sync():
            net(x).sum().backward()
        usual(net, x, optimizer, job)
        seen.append(job.metrics.exchanges)

    compute = Compute(sample_s=0.3, step_s=0.5)
    found = simulate(lambda: times(3, loop=twice), workers=2, cluster=Cluster(link=LINK, compute=compute))
    exchange_s = simulate(times, workers=2, cluster=Cluster(link=LINK, compute=compute)).results[0][0] - 8 * 0.3 - 0.5
    assert 0 < exchange_s < 1e-3
    assert found.results[0] == pytest.approx([2 * 8 * 0.3 + 0.5 + exchange_s] * 3)
    assert seen == [1, 1, 2, 2, 3, 3]


def test_a_slow_rank_and_a_slow_host_slow_themselves() -> None:
    assert alone(Compute(sample_s=0.3, step_s=0.1), slow={0: 2.0}) == pytest.approx(2 * (8 * 0.3 + 0.1))
    hosts = (Host(name="old", speed=0.5), Host(name="new", speed=4.0))

    def work() -> float:
        link = tutti.init().transport
        link.elapse(1.0)
        return link.now()

    assert simulate(work, workers=2, cluster=Cluster(hosts=hosts, slow={1: 3.0})).results == [2.0, 0.75]


def test_a_synchronous_step_is_as_slow_as_the_slowest_rank() -> None:
    def run(**uneven: Any) -> Simulation:
        cluster = Cluster(link=LINK, compute=Compute(sample_s=0.3), **uneven)
        return simulate(lambda: times(3), workers=4, cluster=cluster)

    even, uneven = run(), run(slow={3: 2.0})
    exchange_s = even.results[0][0] - 8 * 0.3
    assert 0 < exchange_s < 1e-3
    for steps in uneven.results:
        assert steps == pytest.approx([2 * 8 * 0.3] * 3, abs=exchange_s * 1.01)
        assert min(steps) > 2 * 8 * 0.3
    assert [rank.waiting_s > 3 * 8 * 0.29 for rank in uneven.ranks] == [True, True, True, False]


@pytest.mark.parametrize("shape", ["lognormal", "uniform", "exponential"])
def test_jitter_has_mean_one_and_lasts_a_step(shape: Any) -> None:
    compute, jitter = Compute(sample_s=0.1, step_s=0.2), Jitter(0.3, shape)
    steps = np.array(
        simulate(lambda: times(400), workers=1, cluster=Cluster(compute=compute, jitter=jitter)).results[0]
    )
    assert steps.mean() == pytest.approx(1.0, abs=0.05)
    assert steps.std() == pytest.approx(0.3, abs=0.06)


def test_ranks_jitter_apart() -> None:
    def work() -> float:
        return times(1, loop=lambda net, x, *_: net(x))[0]

    cluster = Cluster(compute=Compute(sample_s=0.1), jitter=0.3)  # type: ignore[arg-type]
    assert len(set(simulate(work, workers=5, cluster=cluster).results)) == 5


def test_pauses_add_what_they_say() -> None:
    def work() -> float:
        link = tutti.init().transport
        for _ in range(2000):
            link.elapse(1.0)
        return link.now()

    cluster = Cluster(pauses=Pauses("10s", "1s"))
    one, two = simulate(work, workers=2, cluster=cluster).results
    assert one != two
    assert one - 2000 == pytest.approx(200, rel=0.3)
    assert two - 2000 == pytest.approx(200, rel=0.3)


def test_pauses_that_pass_while_a_rank_waits_cost_nothing() -> None:
    def work() -> float:
        world = tutti.init()
        if world.rank == 1:
            world.transport.elapse(1000.0)
            world.transport.isend(torch.ones(1), 0).wait()
            return 0.0
        world.transport.irecv(torch.ones(1), 1).wait()
        start_s = world.transport.now()
        world.transport.elapse(1.0)
        return world.transport.now() - start_s

    took = simulate(work, workers=2, cluster=Cluster(pauses=Pauses("1s", "0.5s")), timeout=timedelta(hours=1)).results[
        0
    ]
    assert 1.0 <= took < 10.0  # Some 670 pauses went by.


# Overlap


WIDTH = 240
"""So that the ring sends a block whole: in chunks some latency would be hidden, too."""


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))


@pytest.mark.parametrize("sample_s", [1e-5, 1e-3, 1e-2], ids=["communication", "both", "computation"])
@pytest.mark.parametrize("algorithm", ["ring", "native"])
def test_the_last_layers_travel_while_the_first_are_computed(sample_s: float, algorithm: Any) -> None:
    compute = Compute(sample_s=sample_s)
    forward_s, backward_s = 8 * sample_s / 3, 8 * sample_s * 2 / 3

    def step(bucket_bytes: int) -> float:
        strategy = AllReduce(algorithm, bucket_bytes)
        cluster = Cluster(link=LINK, compute=compute)
        steps = simulate(lambda: times(3, model=two_layers, strategy=strategy), workers=2, cluster=cluster).results
        assert steps[0][2] == pytest.approx(steps[1][2], rel=1e-4)
        return steps[0][2]  # In the first one, buckets are cut anew.

    layer_bytes = 4 * (WIDTH * WIDTH + 1)
    formula = ALGORITHMS["ring" if algorithm == "ring" else "hierarchical"].cost  # Native is the cheapest of those.
    one_s, both_s = (formula(2, count * layer_bytes, LINK) for count in (1, 2))
    weights_s = LINK.seconds(2 * 8)
    weights_there_s = forward_s + backward_s / 2 + weights_s  # They set out with the first gradient.
    assert step(2**30) == pytest.approx(max(weights_there_s, forward_s + backward_s) + both_s, rel=1e-4)
    assert step(1) == pytest.approx(max(weights_there_s + one_s, forward_s + backward_s) + one_s, rel=1e-4)


def test_within_a_host_too() -> None:
    within = Link("1gbit", "10us")
    cluster = Cluster(ranks_per_host=2, within=within, compute=Compute(sample_s=3e-3))
    strategy = AllReduce(bucket_bytes=1)
    steps = simulate(lambda: times(3, model=two_layers, strategy=strategy), workers=2, cluster=cluster).results[0]
    sum_s = 2 * within.seconds(4 * (WIDTH * WIDTH + 1))
    assert steps[2] == pytest.approx(8 * 3e-3 + sum_s, rel=1e-4)  # The other one is hidden.


# The same every time


def fingerprint(found: Simulation) -> Any:
    """Everything that a simulation tells, to the bit."""
    ranks = [(each.busy_s, each.communicating_s, each.waiting_s, each.strip.seconds.tolist()) for each in found.ranks]
    links = {name: (traffic.num_bytes, traffic.busy_s) for name, traffic in found.links.items()}
    return found.results, found.seconds, ranks, links, [list(log) for log in found.events], found.num_messages


def train_a_little(algorithm: Any = "ring") -> tuple[str, float]:
    world = tutti.init()
    torch.manual_seed(world.rank)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with tutti.distribute(net, optimizer, AllReduce(algorithm, bucket_bytes=200)):
        for _ in range(4):
            net(torch.randn(6, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    data = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    return hashlib.sha256(data).hexdigest(), world.transport.now()


UNEVEN = Cluster(
    link=LINK,
    ranks_per_host=2,
    compute=Compute(sample_s=1e-3, step_s=1e-3),
    jitter=Jitter(0.4),
    pauses=Pauses("10ms", "2ms"),
    slow={1: 1.7},
    seed=5,
)


@pytest.mark.parametrize("algorithm", ["ring", "native", "cheapest"])
def test_the_same_every_time(algorithm: Any) -> None:
    torch.manual_seed(0)
    random.seed(0)
    runs = [fingerprint(simulate(train_a_little, algorithm, workers=5, cluster=UNEVEN)) for _ in range(2)]
    assert runs[0] == runs[1]
    assert len({weights for weights, _ in runs[0][0]}) == 1


def test_another_seed_gives_other_times_and_the_same_weights() -> None:
    one = simulate(train_a_little, workers=3, cluster=UNEVEN)
    two = simulate(train_a_little, workers=3, cluster=replace(UNEVEN, seed=6))
    assert one.seconds != two.seconds
    assert [weights for weights, _ in one.results] == [weights for weights, _ in two.results]


_IMPORTS = """
import hashlib, sys
from typing import Any
import torch
from torch import nn
import tutti
from tutti import AllReduce, Cluster, Simulation, simulate
"""

_MAIN = """
found = fingerprint(simulate(train_a_little, workers=5, cluster=Cluster.load(sys.argv[1])))
print(hashlib.sha256(repr(found).encode()).hexdigest())
"""


def test_hashes_of_texts_play_no_part(tmp_path: Path) -> None:
    script = "\n".join([_IMPORTS, getsource(fingerprint), getsource(train_a_little), _MAIN])
    (tmp_path / "uneven.toml").write_text(UNEVEN.to_toml())
    other = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "uneven.toml")],
        env={**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    here = fingerprint(simulate(train_a_little, workers=5, cluster=UNEVEN))
    assert other.stdout.strip() == hashlib.sha256(repr(here).encode()).hexdigest()


# Random numbers


def draws(link: Transport | None, rank: int, seeded: bool) -> list[Any]:
    """Draw from all generators, with something between that lets other ranks run."""
    found: list[Any] = []
    if seeded:
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
    for _ in range(5):
        found += [torch.randn(2).tolist(), F.dropout(torch.ones(8), 0.5).tolist(), torch.randperm(5).tolist()]
        found += [
            random.random(),
            random.gauss(0, 1),
            np.random.randn(),
            np.random.rand(),
            np.random.permutation(4).tolist(),
        ]
        if link is not None:
            work = link.irecv(torch.zeros(1), (rank - 1) % link.size)
            link.isend(torch.zeros(1), (rank + 1) % link.size)
            work.wait()
    return found


@pytest.mark.parametrize("seeded", [True, False])
def test_ranks_draw_what_they_would_alone(seeded: bool) -> None:
    def start() -> None:
        torch.manual_seed(11)
        random.seed(11)
        np.random.seed(11)
        random.gauss(0, 1)
        np.random.randn()  # NumPy draws normal numbers in pairs: the next one is ready.

    def work() -> list[Any]:
        world = tutti.init()
        return draws(world.transport, world.rank, seeded)

    expected = []
    for rank in range(3):
        start()
        expected.append(draws(None, rank, seeded))
    start()
    mine = draws(None, 0, False)
    start()
    assert simulate(work, workers=3).results == expected
    assert draws(None, 0, False) == mine  # As if nothing had been.


def test_the_callers_generators_come_back_after_a_failure_too() -> None:
    def work() -> None:
        draws(None, 0, True)
        raise ValueError("on purpose")

    torch.manual_seed(3)
    np.random.seed(3)
    expected = torch.randn(3).tolist(), np.random.randn(3).tolist()
    torch.manual_seed(3)
    np.random.seed(3)
    with pytest.raises(tutti.TuttiError):
        simulate(work, workers=2)
    assert (torch.randn(3).tolist(), np.random.randn(3).tolist()) == expected


def test_the_callers_threads_and_mode_come_back() -> None:
    before = torch.get_num_threads()
    simulate(lambda: torch.set_num_threads(1), workers=2)
    assert torch.get_num_threads() == before
    assert torch.is_grad_enabled()
    assert simulate(torch.is_grad_enabled, workers=2).results == [True, True]


# What a user would write


DATA = TensorDataset(
    torch.randn(46, 6, generator=torch.Generator().manual_seed(1)),
    torch.randint(0, 3, (46,), generator=torch.Generator().manual_seed(2)),
)


def fresh_net() -> nn.Module:
    """The same every time, also where ranks are threads that share their generators."""
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return net


def usual_script(world: World) -> list[float]:
    """All that the library has, in one training loop."""
    net = tutti.sync_batchnorm(fresh_net(), world=world)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader = tutti.shard(
        DataLoader(DATA, batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(5)), world=world
    )
    losses = []
    with tutti.distribute(net, optimizer, AllReduce("cheapest"), world=world) as job:
        for _ in range(2):
            for x, y in loader:
                loss = F.cross_entropy(net(x), y)
                job.watch(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            with job.consensus() as agreed, torch.no_grad():
                agreed.eval()
                losses.append(float(F.cross_entropy(agreed(DATA.tensors[0]), DATA.tensors[1])))
                agreed.train()
        assert job.metrics.steps == job.metrics.exchanges
        job.load_state_dict(job.state_dict())
    return losses


@pytest.mark.parametrize("transport", ["simulated", "simulated_memory", "simulated_hosts"])
def test_a_usual_script_gives_the_same_in_virtual_time(transport: str) -> None:
    real = run_ok(usual_script, size=3, transport="shared_memory")
    simulated = run_ok(usual_script, size=3, transport=transport)
    assert simulated[0] == simulated[1] == simulated[2]
    assert simulated[0] == pytest.approx(real[0], rel=1e-5)
    assert simulated[0][1] < simulated[0][0]


def test_metrics_are_in_virtual_seconds() -> None:
    def train() -> tuple[Any, float]:
        link, net = tutti.init().transport, nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        job = tutti.distribute(net, optimizer)
        start_s = link.now()
        for _ in range(3):
            usual(net, torch.ones(4, 2), optimizer, job)
        return job.metrics, link.now() - start_s

    found = simulate(train, workers=2, cluster=Cluster(link=LINK, compute=Compute(sample_s=10.0), slow={1: 3.0}))
    for (metrics, took_s), waited_s in zip(found.results, (240.0, 0.0), strict=True):
        assert metrics.seconds == pytest.approx(took_s) == pytest.approx(360.0, rel=1e-3)
        assert metrics.waiting_s == pytest.approx(waited_s, abs=0.1)
        assert metrics.steps == metrics.exchanges == 3


@pytest.mark.parametrize("link", [LINK, Link("25gbit", "8us"), Link("10mbit", "20ms")], ids=str)
def test_measuring_finds_the_link_of_the_cluster(link: Link) -> None:
    def work() -> Link:
        tutti.init()
        return tutti.measure_link().link

    for found in simulate(work, workers=3, cluster=Cluster(link=link)).results:
        assert found.bits_per_s == pytest.approx(link.bits_per_s, rel=0.01)
        assert found.latency_s == pytest.approx(link.latency_s, rel=0.01)


# Sizes only


def train_sizes(device: str, algorithm: Any) -> tuple[int, float]:
    world = tutti.init()
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 300), nn.Linear(300, 10)
    ).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.zeros(4, 3, 8, 8, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    job = tutti.distribute(net, optimizer, AllReduce(algorithm, bucket_bytes=100_000))
    start_s = world.transport.now()  # Until now, ranks told each other of what kind their tensors are, in words.
    for _ in range(3):
        loss = F.cross_entropy(net(x), y)
        job.watch(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with job.consensus():
        pass
    sent = job.metrics.bytes_sent
    job.finish()
    return sent, round(world.transport.now() - start_s, 9)


@pytest.mark.parametrize(
    ("algorithm", "per_host"),
    [
        *((name, 2) for name in ("ring", "native", "hierarchical", "butterfly", "cheapest")),
        *((name, per_host) for name in ("native", "cheapest") for per_host in (1, 4)),
    ],
)
def test_a_model_without_values_takes_the_same_time_and_bytes(algorithm: Any, per_host: int) -> None:
    cluster = Cluster(link=LINK, ranks_per_host=per_host, compute=Compute(flops=1e9), jitter=Jitter(0.1))
    full, bare = (simulate(train_sizes, device, algorithm, workers=4, cluster=cluster) for device in ("cpu", "meta"))
    assert bare.results == full.results
    assert full.results[0][0] > 0
    assert bare.num_messages == full.num_messages
    assert bare.links.keys() == full.links.keys()


def test_a_model_without_values_that_has_trained_can_be_distributed_again() -> None:
    def train() -> int:
        tutti.init()
        net = nn.Linear(4, 2, device="meta")
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(2):
            with tutti.distribute(net, optimizer) as job:
                usual(net, torch.ones(4, 4, device="meta"), optimizer, job)
        return len(optimizer.state)

    assert simulate(train, workers=2).results == [2, 2]
