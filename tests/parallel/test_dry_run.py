"""Training by sizes alone takes as long, and sends as much, as training with values."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import tutti
from tutti.cluster import Cluster, Compute, Link
from tutti.simulation.compute_clock import ComputeClock
from tutti.simulation.dry_replica import DryRunReplica
from tutti.simulation.runs.scaling import ScalingCase, scaling
from tutti.simulation.workload import Workload
from tutti.strategies import Strategy, parse

CLUSTER = Cluster(
    link=Link("1gbit", "50us"), compute=Compute(sample_s="1ms", step_s="200us"), jitter=0.1, slow={1: 1.5}
)

ROWS, STEPS = 4, 5


def small() -> nn.Module:
    """Convolutions, running statistics, and layers whose gradients take unequal times."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(16 * 16, 50)
    )


def with_values(strategy: Strategy) -> tuple[list[float], int]:
    world = tutti.init()
    torch.manual_seed(0)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = tutti.distribute(model, optimizer, strategy)
    start_s, times = world.transport.now(), []
    for _ in range(STEPS):
        model(torch.randn(ROWS, 3, 8, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(world.transport.now() - start_s)
    sent = job.metrics.bytes_sent
    job.finish()
    return times, sent


def by_sizes(strategy: Strategy) -> tuple[list[float], int]:
    world = tutti.init()
    with torch.device("meta"):
        model = small()
        workload = Workload.from_model(model, (torch.empty(ROWS, 3, 8, 8),), {})
    transport = world.transport.channel("job")
    replica = DryRunReplica(model, torch.optim.SGD(model.parameters(), lr=0.01), ComputeClock(transport, workload))
    exchange = strategy.attach(replica, transport)
    start_s, sent, times = world.transport.now(), exchange.transport.bytes_sent, []
    for _ in range(STEPS):
        replica.step(ROWS)
        times.append(world.transport.now() - start_s)
    return times, exchange.transport.bytes_sent - sent


@pytest.mark.parametrize("per_host", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["ring", "tree", "butterfly", "hierarchical", "native"])
def test_a_rehearsal_takes_as_long_as_training(strategy: str, per_host: int) -> None:
    """From the third step on: in the first, ranks agree on the order of gradients, and it shows in the second."""
    cluster = replace(CLUSTER, ranks_per_host=per_host)
    real = tutti.simulate(with_values, parse(strategy), workers=4, cluster=cluster)
    sizes = tutti.simulate(by_sizes, parse(strategy), workers=4, cluster=cluster)
    for (times, sent), (rehearsed, rehearsed_sent) in zip(real.results, sizes.results, strict=True):
        steps, rehearsed_steps = _gaps(times), _gaps(rehearsed)
        assert rehearsed_steps[2:] == pytest.approx(steps[2:], rel=1e-6)
        assert rehearsed_sent == sent


def _gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *times])]


def test_scaling_of_a_ring_is_what_the_formula_says() -> None:
    """One bucket that is exchanged after backward: compute, then the ring, nothing hidden."""
    cluster = Cluster(link=Link("10gbit", "10us"), compute=Compute(sample_s="1ms", step_s="1ms"))
    strategy = tutti.AllReduce("ring", bucket_bytes=2**30)
    case = ScalingCase(model="alexnet", cluster=cluster, strategy=strategy, batch_size=32, steps=2)
    for row in scaling(case, [2, 8]):
        wire_s = 2 * (row.workers - 1) / row.workers * 4 * 61_100_840 * 8 / 1e10
        assert row.step_s == pytest.approx(33e-3 + wire_s, rel=0.02)
        assert row.efficiency == pytest.approx(33e-3 / row.step_s, rel=1e-6)
        assert row.images_per_s == pytest.approx(32 * row.workers / row.step_s)
        assert row.bytes_per_worker == pytest.approx(2 * (row.workers - 1) / row.workers * 4 * 61_100_840, rel=0.01)


def test_smaller_buckets_hide_more() -> None:
    cluster = Cluster(link=Link("10gbit", "10us"), compute=Compute(sample_s="4ms"))
    steps = {}
    for num_bytes in (4 * 2**20, 2**30):
        strategy = tutti.AllReduce("ring", bucket_bytes=num_bytes)
        case = ScalingCase(model="resnet50", cluster=cluster, strategy=strategy, batch_size=32, steps=2)
        steps[num_bytes] = next(iter(scaling(case, [4]))).step_s
    computing_s = 32 * 4e-3
    assert steps[4 * 2**20] - computing_s < 0.6 * (steps[2**30] - computing_s)


class TwoDtypes(nn.Module):
    """A half-precision layer between two others: its bucket fills while that of the others does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.middle.half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).half()).float())


def test_buckets_of_two_dtypes_are_all_exchanged() -> None:
    case = ScalingCase(
        model=TwoDtypes, cluster=CLUSTER, strategy=parse("ring"), batch_size=ROWS, steps=STEPS, sample=(8,)
    )
    (result,) = scaling(case, [2])
    # A ring of two sends as many bytes as there are: two buckets with a flag per gradient, and both weights.
    assert result.bytes_per_worker == 4 * (2 * 64 + 2) + 2 * (64 + 1) + 8 * 2
