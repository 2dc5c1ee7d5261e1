"""Virtual time of messages: against closed forms, in the order of arrival, and without loss."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import tutti
from tutti import Cluster, Link, Simulation, simulate
from tutti.cluster import Host, Tier
from tutti.collectives import ALGORITHMS, all_gather, broadcast, reduce_scatter, run
from tutti.collectives.hierarchical import TYPICAL_LINK
from tutti.transports import ANY, Transport

FAST = Link("1gbit", "50us")
SLOW = Link("100mbit", "1ms")


def zeros(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def send(num_bytes: int, dst: int, tag: int = 0) -> float:
    """Send and wait; when its last byte has left."""
    link = tutti.world().transport
    link.isend(zeros(num_bytes), dst, tag).wait()
    return link.now()


def receive(num_bytes: int, src: int, tag: int = 0) -> float:
    """Receive; when that was."""
    link = tutti.world().transport
    link.irecv(zeros(num_bytes), src, tag).wait()
    return link.now()


def by_rank(*functions: Callable[[], Any] | None, **how: Any) -> Simulation:
    """Each rank runs its own function, or nothing."""

    def work() -> Any:
        function = functions[tutti.init().rank]
        return None if function is None else function()

    return simulate(work, workers=len(functions), **how)


def close(seconds: float) -> Any:
    return pytest.approx(seconds, rel=1e-9, abs=1e-15)


# Messages against closed forms


@given(
    num_bytes=st.integers(0, 10**9),
    rate=st.floats(1e3, 1e12),
    latency_s=st.floats(0, 10),
    start_s=st.floats(0, 10),
    same_host=st.booleans(),
)
@settings(max_examples=40)
@example(num_bytes=0, rate=1e9, latency_s=0.0, start_s=0.0, same_host=False)
def test_a_lone_message_takes_what_its_link_says(
    num_bytes: int, rate: float, latency_s: float, start_s: float, same_host: bool
) -> None:
    link = Link(rate, latency_s)
    other = Link("7mbit", "3ms")
    cluster = Cluster(
        link=other if same_host else link, within=link if same_host else other, ranks_per_host=2 if same_host else 1
    )

    def work() -> tuple[float, float]:
        world, extent = tutti.init(), torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        if world.rank == 0:
            world.transport.elapse(start_s)
        (world.transport.isend(extent, 1) if world.rank == 0 else world.transport.irecv(extent, 0)).wait()
        return world.transport.now()

    sent_s, received_s = simulate(work, workers=2, cluster=cluster).results
    assert sent_s == close(start_s + num_bytes * link.seconds_per_byte)
    assert received_s == close(start_s + link.seconds(num_bytes))


def test_messages_of_one_host_queue_at_its_card() -> None:
    n = 10**6

    def both() -> list[float]:
        link = tutti.world().transport
        works = [link.isend(zeros(n), dst) for dst in (1, 2)]
        return [(work.wait(), link.now())[1] for work in works]

    found = by_rank(both, lambda: receive(n, 0), lambda: receive(n, 0), cluster=Cluster(link=FAST))
    byte_s = FAST.seconds_per_byte
    assert found.results[0] == [close(n * byte_s), close(2 * n * byte_s)]
    assert found.results[1:] == [close(FAST.seconds(n)), close(FAST.latency_s + 2 * n * byte_s)]
    assert found.links["host0 out"].num_bytes == 2 * n
    assert found.links["host0 out"].busy_s == close(2 * n * byte_s)
    assert found.links["host2 in"].num_bytes == n


def test_two_ranks_of_one_host_share_its_card() -> None:
    n = 10**6
    found = by_rank(
        lambda: send(n, 2),
        lambda: send(n, 3),
        lambda: receive(n, 0),
        lambda: receive(n, 1),
        cluster=Cluster(link=FAST, ranks_per_host=2),
    )
    assert sorted(found.results[2:]) == [close(FAST.seconds(n)), close(FAST.latency_s + 2 * n * FAST.seconds_per_byte)]


@given(num_senders=st.integers(1, 8), num_bytes=st.integers(0, 10**6))
@settings(max_examples=10)
def test_senders_queue_at_a_single_server(num_senders: int, num_bytes: int) -> None:
    def serve() -> list[float]:
        return [receive(num_bytes, src) for src in range(1, num_senders + 1)]

    senders = [lambda: send(num_bytes, 0)] * num_senders
    found = by_rank(serve, *senders, cluster=Cluster(link=FAST))
    expected = [FAST.latency_s + k * num_bytes * FAST.seconds_per_byte for k in range(1, num_senders + 1)]
    assert found.results[0] == [close(each) for each in expected]
    assert found.results[1:] == [close(num_bytes * FAST.seconds_per_byte)] * num_senders


def test_messages_both_ways_do_not_disturb_each_other() -> None:
    n = 10**6

    def swap() -> float:
        world = tutti.world()
        other = 1 - world.rank
        works = [world.transport.irecv(zeros(n), other), world.transport.isend(zeros(n), other)]
        for work in works:
            work.wait()
        return world.transport.now()

    assert by_rank(swap, swap, cluster=Cluster(link=FAST)).results == [close(FAST.seconds(n))] * 2


@pytest.mark.parametrize("later_s", [1e-3, 8.01e-3], ids=["before", "after"])
def test_a_card_takes_messages_as_they_come_to_it_not_as_they_were_sent(later_s: float) -> None:
    """Rank 0's second message waits 8 ms for its own card; rank 1's long one comes before it, or just after."""
    n, long = 10**6, 5 * 10**6

    def sends_two() -> None:
        works = [tutti.world().transport.isend(zeros(size), dst) for size, dst in ((n, 3), (100, 2))]
        for work in works:
            work.wait()

    def sends_later() -> None:
        tutti.world().transport.elapse(later_s)
        send(long, 2)

    def receives() -> dict[int, float]:
        times = {}
        for src in (0, 1) if later_s > 8e-3 else (1, 0):
            times[src] = receive(100 if src == 0 else long, src)
        return times

    found = by_rank(sends_two, sends_later, receives, lambda: receive(n, 0), cluster=Cluster(link=FAST)).results[2]
    there_s, byte_s = n * FAST.seconds_per_byte + FAST.latency_s, FAST.seconds_per_byte
    if later_s > 8e-3:
        assert found[0] == close(there_s + 100 * byte_s)
        assert found[1] == close(later_s + FAST.seconds(long))
    else:
        assert found[1] == close(later_s + FAST.seconds(long))
        assert found[0] == close(later_s + FAST.seconds(long) + 100 * byte_s)


def test_a_message_that_waits_at_a_switch_comes_to_the_card_when_it_has_passed() -> None:
    """An uplink of half a card's rate is taken for 16 ms: the second message begins to arrive then, not before."""
    n, link = 10**6, Link("1gbit")

    def passes_on() -> float:
        receive(n, 0)
        tutti.world().transport.elapse(1e-3)
        return send(n, 3)

    ranks = [lambda: send(n, 2), lambda: send(n, 3), passes_on, lambda: (receive(n, 2), receive(n, 1))]
    found = by_rank(*ranks, cluster=Cluster(link=link, tiers=(Tier(2, 4),))).results
    assert found[2] == close(16e-3 + 1e-3 + 8e-3)
    assert found[3] == (close(32e-3), close(32e-3))  # The card is taken from 16 to 24 ms, then by the last one.


def test_a_short_message_does_not_overtake_a_long_one_on_another_lane() -> None:
    """Both lanes of an uplink come free at once: the long one takes one, the short one behind it the other."""
    n, slow, fast = 10**6, Link("1gbit"), Link("10gbit")
    hosts = tuple(Host(name=name, link=slow if name < "e" else fast) for name in "abcdefgh")

    def sends_two() -> None:
        link = tutti.world().transport
        link.elapse(1e-6)
        works = [link.isend(torch.full((numel,), float(numel)), 4) for numel in (n // 8, 1)]
        for work in works:
            work.wait()

    def receives() -> list[int]:
        link, found = tutti.world().transport, []
        for _ in range(2):
            box = torch.zeros(n // 8)
            got = link.irecv(box if not found else box[:1], ANY)
            got.wait()
            found.append(int(box[0]))
        return found

    fills = [lambda: send(n, 5), lambda: send(n, 6)]
    ends = [receives, lambda: receive(n, 1), lambda: receive(n, 2)]
    cluster = Cluster(hosts=hosts, tiers=(Tier(4, 2),))
    found = by_rank(sends_two, *fills, None, *ends, None, cluster=cluster)
    assert found.results[4] == [n // 8, 1]


@pytest.mark.parametrize("hosts_each", [2, 4])
@pytest.mark.parametrize("oversubscription", [1, 2, 4])
def test_a_rack_shares_its_uplink(hosts_each: int, oversubscription: int) -> None:
    n, tier = 10**6, Tier(hosts_each, oversubscription, "5us")
    senders = [lambda dst=dst: send(n, dst) for dst in range(hosts_each, 2 * hosts_each)]
    receivers = [lambda src=src: receive(n, src) for src in range(hosts_each)]
    found = by_rank(*senders, *receivers, cluster=Cluster(link=FAST, tiers=(tier,)))
    uplink = Link(FAST.bits_per_s * hosts_each / oversubscription)
    slowest = max(FAST.seconds_per_byte * n, (hosts_each * n) * uplink.seconds_per_byte)
    assert max(found.results[hosts_each:]) == close(FAST.latency_s + 5e-6 + slowest)
    if oversubscription == 1:  # Nobody notices the others.
        assert found.results[hosts_each:] == [close(FAST.latency_s + 5e-6 + slowest)] * hosts_each
    assert found.links["switch 0.0 up"].num_bytes == found.links["switch 0.1 down"].num_bytes == hosts_each * n


def test_within_a_rack_its_uplink_is_not_used() -> None:
    n = 10**6
    cluster = Cluster(link=FAST, tiers=(Tier(2, 4, "5us"),))
    found = by_rank(lambda: send(n, 1), lambda: receive(n, 0), cluster=cluster)
    assert found.results[1] == close(FAST.seconds(n))
    assert not any("switch" in name for name in found.links)


def test_every_level_of_switches_adds_its_latency_and_narrows_the_way() -> None:
    n = 10**6
    tiers = (Tier(2, 2, "5us"), Tier(2, 8, "20us"))
    cluster = Cluster(link=FAST, tiers=tiers)

    def at(dst: int) -> float:
        ranks: list[Callable[[], Any] | None] = [None] * 8
        ranks[0], ranks[dst] = lambda: send(n, dst), lambda: receive(n, 0)
        return by_rank(*ranks, cluster=cluster).results[dst]

    assert at(1) == close(FAST.seconds(n))
    assert at(2) == close(FAST.seconds(n) + 5e-6)  # Two hosts' sum, halved, is as fast as a card.
    assert at(4) == close(FAST.latency_s + 25e-6 + n * 8 / (FAST.bits_per_s * 4 / 2 / 8))


@pytest.mark.parametrize("first", [0, 2], ids=["the fast rack first", "the slow rack first"])
def test_uplinks_carry_the_sum_of_what_is_below_whoever_sends_first(first: int) -> None:
    n, slow, fast = 10**6, Link("100mbit"), Link("10gbit")
    hosts = [Host(name=name, link=fast if name < "c" else slow) for name in "abcd"]
    cluster = Cluster(hosts=hosts, tiers=(Tier(2, 4),))

    second = (first + 2) % 4
    ranks: list[Callable[[], Any] | None] = [None] * 4
    ranks[first] = lambda: (send(n, second), receive(n, second))
    ranks[second] = lambda: (receive(n, first), send(n, first))
    found = by_rank(*ranks, cluster=cluster)
    # The slow rack's two hosts of 100 mbit, four times oversubscribed: 50 mbit, up and down.
    assert found.links["switch 0.1 up"].busy_s == close(n * 8 / 50e6)
    assert found.links["switch 0.1 down"].busy_s == close(n * 8 / 50e6)
    assert found.links["switch 0.0 up"].busy_s == close(n * 8 / 5e9)
    assert found.results[first][1] == close(2 * n * 8 / 50e6)


@pytest.mark.parametrize("dst", [0, 1])
def test_the_slower_end_counts(dst: int) -> None:
    n = 10**6
    cluster = Cluster(hosts=(Host(name="fast", link=FAST), Host(name="slow", link=SLOW)))
    ranks = [lambda: send(n, dst), lambda: receive(n, 1 - dst)]
    found = by_rank(*(ranks if dst == 1 else reversed(ranks)), cluster=cluster)
    assert found.results[dst] == close(SLOW.seconds(n))


def test_a_path_between_two_hosts_narrows_that_pair_alone() -> None:
    n, wan = 10**6, Link("10mbit", "30ms")
    cluster = Cluster(hosts=3, link=FAST, links={("host2", "host0"): wan})
    found = by_rank(lambda: send(n, 2), None, lambda: receive(n, 0), cluster=cluster)
    assert found.results[2] == close(wan.seconds(n))
    assert by_rank(lambda: receive(n, 2), None, lambda: send(n, 0), cluster=cluster).results[0] == close(wan.seconds(n))
    assert by_rank(None, lambda: send(n, 2), lambda: receive(n, 1), cluster=cluster).results[2] == close(
        FAST.seconds(n)
    )


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_paths_of_a_host_without_a_link_of_its_own_are_independent(order: tuple[int, int]) -> None:
    n, links = 10**6, {("host0", "host1"): SLOW, ("host0", "host2"): FAST}
    cluster = Cluster(hosts=3, link=None, links=links)

    def both() -> None:
        works = [tutti.world().transport.isend(zeros(n), dst) for dst in order]
        for work in works:
            work.wait()

    found = by_rank(both, lambda: receive(n, 0), lambda: receive(n, 0), cluster=cluster)
    assert found.results[1:] == [close(SLOW.seconds(n)), close(FAST.seconds(n))]


# Collectives against their cost formulas


def one_collective(algorithm: Any, size: int, numel: int, link: Link, **how: Any) -> float:
    """Seconds of the steps alone: without the comparison that comes before."""

    def work() -> None:
        tensor = torch.empty(numel, device="meta")
        run(algorithm.steps(tensor, tutti.init().transport))

    return simulate(work, workers=size, cluster=Cluster(link=link, **how)).seconds


LINKS = st.sampled_from([FAST, SLOW, Link("10gbit", "5us")])


@pytest.mark.parametrize("name", ["recursive_doubling", "butterfly", "tree"])
@given(size=st.integers(2, 20), numel=st.integers(1, 3 * 10**6), link=LINKS)
@settings(max_examples=12)
def test_trees_and_butterflies_cost_what_their_formulas_say(name: str, size: int, numel: int, link: Link) -> None:
    algorithm = ALGORITHMS[name]
    took, formula = one_collective(algorithm, size, numel, link), algorithm.cost(size, 4 * numel, link)
    uneven = 8 * size * link.seconds_per_byte  # Halves differ by an element.
    if size & (size - 1):
        # Where P is not a power of two, what is folded in may travel beside a round, or queue with it at a card.
        assert 0.5 * formula - uneven <= took <= formula + 4 * numel * link.seconds_per_byte + uneven
    else:
        assert took == pytest.approx(formula, rel=1e-9, abs=uneven)


@given(size=st.integers(2, 12), numel=st.integers(100, 10**6))
@settings(max_examples=12)
def test_between_hosts_native_is_the_cheapest_on_a_typical_link(size: int, numel: int) -> None:
    took = one_collective(ALGORITHMS["native"], size, numel, TYPICAL_LINK)
    others = [one_collective(ALGORITHMS[name], size, numel, TYPICAL_LINK) for name in ("ring", "butterfly")]
    assert took <= 1.1 * min(others)


@pytest.mark.parametrize("algorithm", [ALGORITHMS["ring"], reduce_scatter, all_gather])
@given(size=st.integers(2, 12), numel=st.integers(100, 10**6), link=LINKS)
@settings(max_examples=12)
def test_rings_cost_what_their_formulas_say_or_less(algorithm: Any, size: int, numel: int, link: Link) -> None:
    took = one_collective(algorithm, size, numel, link)
    bytes_each = 4 * math.ceil(numel / size)
    rounds = (size - 1) * (1 if algorithm in (reduce_scatter, all_gather) else 2)
    in_turns = rounds * link.seconds(bytes_each)
    assert took <= in_turns * (1 + 1e-9)
    # In chunks, latencies pass while other chunks travel: no fewer bytes, and no fewer latencies of a first chunk.
    chunk_bytes = min(bytes_each - 8, 250_000)
    least = max(rounds * (bytes_each - 8) * link.seconds_per_byte, rounds * link.seconds(max(0, chunk_bytes)) * 0.5)
    assert took >= least
    if bytes_each <= 256 * 2**10:
        assert took == pytest.approx(in_turns, rel=1e-9, abs=8 * rounds * link.seconds_per_byte)


@given(size=st.integers(1, 6), numel=st.integers(100, 10**5), link=LINKS)
@settings(max_examples=12)
def test_the_blocking_ring_takes_turns(size: int, numel: int, link: Link) -> None:
    algorithm = ALGORITHMS["ring_blocking"]
    size, numel = 2 * size, numel // (2 * size) * 2 * size
    took, formula = one_collective(algorithm, size, numel, link), algorithm.cost(size, 4 * numel, link)
    # A send is over when it has left, and latency is not waited for twice: between that and half of it.
    assert formula / 2 * (1 - 1e-9) <= took <= formula * (1 + 1e-9)


@given(size=st.integers(2, 20), numel=st.integers(1, 10**6), link=LINKS)
@settings(max_examples=12)
def test_a_broadcast_costs_what_its_formula_says(size: int, numel: int, link: Link) -> None:
    took, formula = one_collective(broadcast, size, numel, link), broadcast.cost(size, 4 * numel, link)
    if size & (size - 1) == 0:
        assert took == pytest.approx(formula, rel=1e-9)
    assert link.seconds(4 * numel) <= took * (1 + 1e-9) <= formula * (1 + 2e-9)


@given(hosts=st.integers(2, 6), each=st.integers(2, 4), numel=st.integers(1, 10**6))
@settings(max_examples=10)
def test_two_levels_cost_the_network_plus_memory(hosts: int, each: int, numel: int) -> None:
    within = Link("100gbit", "2us")
    algorithm = ALGORITHMS["hierarchical"]
    took = one_collective(algorithm, hosts * each, numel, FAST, within=within, ranks_per_host=each)
    alone = one_collective(algorithm, hosts, numel, FAST)
    assert took == close(alone + 4 * within.seconds(4 * numel))  # A sum and a broadcast, of two barriers each.


def test_a_sum_within_a_host_takes_two_passes_over_memory() -> None:
    within = Link("80gbit", "3us")
    took = one_collective(ALGORITHMS["native"], 3, 10**6, FAST, within=within, ranks_per_host=3)
    assert took == close(2 * within.seconds(4 * 10**6))


# Order


def arrivals(sizes: list[int], departures: list[float], links: list[Link], early: bool) -> list[tuple[int, float]]:
    """Sources and times in which rank 0 receives from ANY; a sender per size, with a link of its own."""
    hosts = (
        Host(name="server", link=Link("100gbit")),
        *(Host(name=f"h{n}", link=link) for n, link in enumerate(links)),
    )

    def work() -> Any:
        world = tutti.init()
        link, me = world.transport, world.rank
        if me != 0:
            link.elapse(departures[me - 1])
            link.isend(torch.full((sizes[me - 1],), me, dtype=torch.int64), 0, tag=5).wait()
            return None
        found = []
        if not early:
            link.elapse(100.0)
        for _ in sizes:
            buffer = torch.zeros(max(sizes), dtype=torch.int64)[: sizes[0]]
            got = link.irecv(buffer, ANY, tag=5)
            got.wait()
            assert (buffer == got.source).all()
            found.append((got.source, link.now()))
        return found

    return simulate(work, workers=len(sizes) + 1, cluster=Cluster(hosts=hosts)).results[0]


@given(
    senders=st.lists(
        st.tuples(st.floats(0, 0.1), st.floats(0, 0.1), st.sampled_from([1e6, 1e7, 1e9])), min_size=1, max_size=6
    ),
    numel=st.integers(1, 20_000),
    early=st.booleans(),
)
@settings(max_examples=40)
def test_any_receives_in_the_order_of_arrival(
    senders: list[tuple[float, float, float]], numel: int, early: bool
) -> None:
    links = [Link(rate, latency_s) for _, latency_s, rate in senders]
    found = arrivals([numel] * len(senders), [departs_s for departs_s, _, _ in senders], links, early)
    due_s = [departs_s + link.seconds(8 * numel) for (departs_s, _, _), link in zip(senders, links, strict=True)]
    assert sorted(source for source, _ in found) == list(range(1, len(senders) + 1))
    slack_s = len(senders) * 8 * numel * Link("100gbit").seconds_per_byte  # At the server's card.
    for (one, _), (two, _) in pairwise(found):
        assert due_s[one - 1] <= due_s[two - 1] + slack_s
    if early:
        for source, time_s in found:
            assert due_s[source - 1] - 1e-12 <= time_s <= due_s[source - 1] + slack_s + 1e-12
    else:
        assert all(time_s == 100.0 for _, time_s in found)


def test_a_message_from_far_sent_first_may_come_last() -> None:
    assert [source for source, _ in arrivals([1, 1], [0.0, 0.01], [Link(1e9, 0.1), Link(1e9, 0.01)], early=True)] == [
        2,
        1,
    ]


def test_a_named_receive_and_any_on_one_tag() -> None:
    """The named one takes its source's first message, ANY what comes first of the rest."""

    def work() -> Any:
        world = tutti.init()
        link = world.transport
        if world.rank != 0:
            link.elapse({1: 0.3, 2: 0.1}[world.rank])
            for number in range(2):
                link.isend(torch.tensor([10 * world.rank + number]), 0).wait()
                link.elapse(1.0)
            return None
        boxes = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
        works = [link.irecv(box, src) for box, src in zip(boxes, (1, ANY, ANY, 1), strict=True)]
        times = []
        for work in works:
            work.wait()
            times.append(link.now())
        return [int(box) for box in boxes], [work.source for work in works], times

    cluster = Cluster(link=Link("1gbit"))
    values, sources, times = simulate(work, workers=3, cluster=cluster).results[0]
    # 20 at 0.1 goes to the first ANY; 10 at 0.3 to the named one; 21 at 1.1 to ANY; 11 at 1.3 to the other named one.
    assert values == [10, 20, 21, 11]
    assert sources == [1, 2, 2, 1]
    assert times == [pytest.approx(each, abs=1e-6) for each in (0.3, 0.3, 1.1, 1.3)]


@pytest.mark.parametrize("in_flight", [True, False])
def test_any_after_messages_that_nobody_asked_for(in_flight: bool) -> None:
    """Sent before anybody receives from ANY: some have landed, some are on their way."""

    def work() -> Any:
        world = tutti.init()
        link = world.transport
        if world.rank != 0:
            link.elapse(1.2 if world.rank == 2 else 0.0)  # When rank 1's is on its way already, and will be overtaken.
            link.isend(torch.tensor([float(world.rank)]), 0, tag=2).wait()
            if world.rank == 3:
                link.elapse(9.0)
                link.isend(torch.zeros(1), 0, tag=3)
            return None
        link.irecv(torch.zeros(1), 3, tag=2).wait()  # A named one first: so the tag was in use.
        if not in_flight:
            link.irecv(torch.zeros(1), 3, tag=3).wait()
        found = []
        for _ in range(2):
            got = link.irecv(torch.zeros(1), ANY, tag=2)
            got.wait()
            found.append((got.source, round(link.now(), 2)))
        return found

    hosts = [Host(name=str(rank), link=Link(1e9, latency_s)) for rank, latency_s in enumerate((0, 3.0, 0.8, 1.0))]
    found = simulate(work, workers=4, cluster=Cluster(hosts=tuple(hosts))).results[0]
    assert found == ([(2, 2.0), (1, 3.0)] if in_flight else [(2, 10.0), (1, 10.0)])


def test_content_is_that_of_the_moment_of_sending() -> None:
    """Also when nobody waits for it yet, and the sender goes on to change it."""

    def work() -> Any:
        world = tutti.init()
        box = torch.zeros(1)
        if world.rank == 0:
            for number in range(5):
                box.fill_(number)
                world.transport.isend(box, 1, tag=number % 2).wait()
            return None
        world.transport.elapse(1.0)
        found = []
        for tag in (1, 1, 0, 0, 0):
            world.transport.irecv(box, 0, tag).wait()
            found.append(int(box))
        return found

    assert simulate(work, workers=2).results[1] == [1, 3, 0, 2, 4]


# Any program


def test_time_until_a_message_has_left_is_spent_communicating() -> None:
    found = by_rank(lambda: send(10**6, 1), lambda: receive(10**6, 0), cluster=Cluster(link=FAST)).ranks
    assert (found[0].communicating_s, found[0].waiting_s) == (close(8e-3), 0.0)
    assert (found[1].communicating_s, found[1].waiting_s) == (close(FAST.seconds(10**6)), 0.0)


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, int, list[list[tuple[Any, ...]]]]:
    """A world, its ranks per host, and for every rank what it does; for every send there is a receive."""
    size = draw(st.integers(2, 5))
    todo: list[list[tuple[Any, ...]]] = [[] for _ in range(size)]
    for number in range(draw(st.integers(1, 15))):
        src = draw(st.integers(0, size - 1))
        dst = draw(st.integers(0, size - 1).filter(lambda each, src=src: each != src))
        tag, numel = draw(st.integers(0, 2)), draw(st.sampled_from([0, 1, 1000, 100_000]))
        if draw(st.booleans()):
            todo[draw(st.integers(0, size - 1))].append(("elapse", draw(st.floats(0, 1e-2))))
        todo[src].append(("send", dst, tag, numel, number, draw(st.booleans())))
        # ANY on a tag of its own, as the content's length must fit whoever comes.
        todo[dst].append(("any", 10, numel, number) if tag == 2 else ("receive", src, tag, numel, number))
        if tag == 2:
            todo[src][-1] = ("send", dst, 10, 1, number, False)
            todo[dst][-1] = ("any", 10, 1, number)
    return size, draw(st.integers(1, 2)), todo


def obey(program: list[tuple[Any, ...]], link: Transport, log: list[Any]) -> None:
    """Do as a program says: receives are started at once and waited for at the end."""
    started, sent = [], []
    clocks = [link.now()]
    for what, *how in program:
        if what == "elapse":
            link.elapse(how[0])
        elif what == "send":
            dst, tag, numel, number, patient = how
            log.append(("sent", number, link.now(), dst))
            sent.append(link.isend(torch.full((numel,), float(number)), dst, tag))
            if patient:
                sent[-1].wait()
        elif what == "receive":
            src, tag, numel, number = how
            box = torch.full((numel,), -1.0)
            started.append((link.irecv(box, src, tag), box, number))
        else:
            tag, numel, _ = how
            box = torch.full((numel,), -1.0)
            started.append((link.irecv(box, ANY, tag), box, None))
        clocks.append(link.now())
    for work, box, number in started:
        work.wait()
        assert work.done()
        assert number is None or (box == number).all()
        log.append(("got", int(box[0]) if number is None else number, link.now(), work.source))
        clocks.append(link.now())
    for work in sent:
        work.wait()
        clocks.append(link.now())
    assert clocks == sorted(clocks)


@given(programs())
@settings(max_examples=80)
def test_any_program_completes_and_adds_up(program: tuple[int, int, list[list[tuple[Any, ...]]]]) -> None:
    size, each, todo = program
    cluster = Cluster(link=FAST, within=Link("10gbit", "1us"), ranks_per_host=each)

    def work() -> tuple[list[Any], int, float]:
        world = tutti.init()
        log: list[Any] = []
        obey(todo[world.rank], world.transport, log)
        return log, world.transport.bytes_sent, world.transport.now()

    found = simulate(work, workers=size, cluster=cluster)
    sends = [step for steps in todo for step in steps if step[0] == "send"]
    num_bytes = sum(4 * step[3] for step in sends)
    assert sum(sent for _, sent, _ in found.results) == num_bytes
    into = sum(traffic.num_bytes for name, traffic in found.links.items() if name.endswith(" in"))
    assert into == sum(traffic.num_bytes for name, traffic in found.links.items() if name.endswith(" out")) == num_bytes
    assert found.num_messages == len(sends)
    sent = {
        number: (at_s, rank)
        for rank, (log, _, _) in enumerate(found.results)
        for kind, number, at_s, _ in log
        if kind == "sent"
    }
    got = {
        number: (at_s, rank, src)
        for rank, (log, _, _) in enumerate(found.results)
        for kind, number, at_s, src in log
        if kind == "got"
    }
    assert got.keys() == sent.keys()
    for _, dst, _, numel, number, _ in sends:
        (sent_s, src), (got_s, at, source) = sent[number], got[number]
        link = cluster.within if src // each == dst // each else FAST
        assert (at, source) == (dst, src)
        assert got_s >= (sent_s + link.seconds(4 * numel)) * (1 - 1e-12)
    for rank, (_, _, end_s) in zip(found.ranks, found.results, strict=True):
        assert rank.busy_s + rank.communicating_s + rank.waiting_s == close(end_s)
        assert min(rank.busy_s, rank.communicating_s, rank.waiting_s) >= 0
        assert float(rank.strip.seconds.sum()) == pytest.approx(end_s, rel=1e-6, abs=1e-12)
    assert found.seconds == max(end_s for _, _, end_s in found.results)
