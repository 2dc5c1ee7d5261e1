"""The link as a job measures it while it trains: right whatever the latency, and soon done."""

import math

import pytest

import tutti
from tutti.cluster import Cluster, Host, Link
from tutti.plan.network import measure_network
from tutti.simulation.runs.simulate import simulate


def measured(size: int, cluster: Cluster) -> tuple[Link, float]:
    """What all ranks found, and how long it took in virtual time."""

    def work() -> tuple[list[float], float]:
        transport = tutti.init().transport
        start_s = transport.now()
        found = measure_network(transport, quickly=True)
        return list(found["links"]["link"]), transport.now() - start_s

    results = simulate(work, workers=size, cluster=cluster).results
    links = [link for link, _ in results]
    assert links == links[:1] * size
    return Link(*links[0]), max(taken_s for _, taken_s in results)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 16])
@pytest.mark.parametrize(
    ("rate", "latency"),
    [("100mbit", "50ms"), ("100mbit", "1ms"), ("1mbit", "100us"), ("1mbit", "20ms"), ("10gbit", "20us")],
)
def test_rate_and_latency_are_told_apart(size: int, rate: str, latency: str) -> None:
    link, taken_s = measured(size, Cluster(link=Link(rate, latency)))
    true = Link(rate, latency)
    assert link.bits_per_s == pytest.approx(true.bits_per_s, rel=0.15)
    # Formulas of collectives of short messages are nearest where sizes are powers of two.
    assert link.latency_s == pytest.approx(true.latency_s, rel=0.25, abs=1e-4)
    # Four messages, and six sums of three messages for each doubling at most.
    assert taken_s < 0.5 + (4 + 18 * math.floor(math.log2(size))) * true.latency_s


def test_many_ranks_are_measured_as_soon() -> None:
    link, taken_s = measured(32, Cluster(link=Link("100mbit", "1ms")))
    assert link.bits_per_s == pytest.approx(1e8, rel=0.15)
    assert taken_s < 0.5


def test_the_slowest_link_of_a_ring_counts() -> None:
    hosts = tuple(Host(name=f"host{rank}", link=Link("1mbit" if rank == 2 else "1gbit", "1ms")) for rank in range(4))
    link, _ = measured(4, Cluster(hosts=hosts))
    assert link.bits_per_s == pytest.approx(1e6, rel=0.15)


def test_a_kilobyte_may_take_a_second() -> None:
    link, taken_s = measured(4, Cluster(link=Link("10kbit", "1ms")))
    assert link.bits_per_s == pytest.approx(1e4, rel=0.15)
    assert taken_s < 10
