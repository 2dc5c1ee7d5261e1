"""What strategies cost, by formula: beside the simulator, beside what was measured, and beside each other."""

from dataclasses import replace
from math import inf

import pytest

from profiles import lab_perceptron, perceptron
from tutti.cluster import Cluster, Host, Jitter, Link, Tier
from tutti.codecs import Cast, Chain, CodecSpeed, LowRank, OneBit, Quantize, RandomK, Threshold, TopK
from tutti.cost import bucket_loads
from tutti.cost.scaled_profile import with_batch
from tutti.errors import ConfigError
from tutti.plan import Overhead, price
from tutti.simulation.runs.dry_run import dry_run
from tutti.strategies import AllReduce, Exchange, Strategy, parse

EVEN = Cluster(link=Link("1gbit", "50us"))

MEASURED = {  # Four hosts of the lab, batch 64, docs/benchmarks.md: milliseconds a step.
    ("100mbit", 21.2): {
        "native": 980.0,
        "averaging:every=16": 79.8,
        "bmuf:every=16": 79.4,
        "bmuf:every=16,overlap=1": 69.6,
        "bmuf:every=16+onebit": 21.6,
        "bmuf:every=16,overlap=1+onebit": 20.8,
    },
    ("1gbit", 19.8): {
        "native": 115.1,
        "averaging:every=16": 24.8,
        "bmuf:every=16": 24.9,
        "bmuf:every=16,overlap=1": 22.2,
        "bmuf:every=16+onebit": 19.1,
        "bmuf:every=16,overlap=1+onebit": 18.9,
    },
    ("100mbit", 19.1): {
        "ring": 983.1,
        "fp16": 511.9,
        "fp8": 273.4,
        "quantize:4": 154.1,
        "onebit": 59.1,
    },
    ("1gbit", 18.8): {
        "ring": 118.8,
        "ps:bsp": 116.0,
        "ps:ssp=3": 79.1,
        "ps:async": 118.4,
        "ps:bsp,servers=1": 264.3,
    },
}


@pytest.mark.parametrize(
    ("rate", "computing_ms", "strategy", "measured_ms"),
    [(*place, strategy, step_ms) for place, steps in MEASURED.items() for strategy, step_ms in steps.items()],
)
def test_what_was_measured_in_the_lab(rate: str, computing_ms: float, strategy: str, measured_ms: float) -> None:
    found = price(parse(strategy), lab_perceptron(computing_ms / 1e3), 4, Cluster(link=Link(rate, "100us")))
    assert found.step_s * 1e3 == pytest.approx(measured_ms, rel=0.25)


@pytest.mark.parametrize(
    ("algorithm", "workers"),
    [(each, workers) for each in ("tree", "butterfly", "recursive_doubling") for workers in (2, 4, 8)]
    + [(each, workers) for each in ("native", "ring") for workers in (2, 3, 8)],
)
@pytest.mark.parametrize("link", [Link("1gbit", "50us"), Link("10gbit", "200us")], ids=str)
def test_all_reduce_is_what_the_simulator_says(algorithm: str, workers: int, link: Link) -> None:
    profile, cluster = lab_perceptron(0.02), Cluster(link=link)
    found = price(AllReduce(algorithm), profile, workers, cluster)  # type: ignore[arg-type]
    assert found.step_s == pytest.approx(dry_run(found.strategy, profile, workers, cluster), rel=0.03)
    assert not found.simulated


@pytest.mark.parametrize("workers", [4, 8])
@pytest.mark.parametrize("algorithm", ["native", "ring", "tree", "butterfly", "recursive_doubling"])
def test_so_it_is_of_a_model_that_is_all_latency(algorithm: str, workers: int) -> None:
    profile = perceptron(64, 64, 10, computing_s=3e-4)
    found = price(AllReduce(algorithm), profile, workers, EVEN)  # type: ignore[arg-type]
    assert found.exposed_s > found.computing_s
    assert found.step_s == pytest.approx(dry_run(found.strategy, profile, workers, EVEN), rel=0.03)


@pytest.mark.parametrize(
    ("strategy", "within"),
    [
        ("bf16", 0.02),
        ("onebit", 0.05),
        ("topk", 0.02),
        ("lowrank", 0.02),
        ("poseidon", 0.05),
        ("poseidon:overlap=0", 0.05),
        ("poseidon:rule=owners", 0.05),
        ("averaging:every=4", 0.02),
        ("bmuf:every=4,overlap=1", 0.02),
        ("bmuf:every=4+onebit", 0.02),
        ("gossip", 0.02),
        ("gossip:graph=ring", 0.22),  # Neighbours of many ranks send at the same moment, and to the same.
        ("gossip:pairs=async", 0.22),  # Random requests: several ranks may ask the same one.
        ("peers", 0.05),
        ("peers+threshold", 0.02),
        ("ps:bsp", 0.1),
        ("ps:async", 0.1),
        ("ps:ssp=3", 0.05),
        ("ps:bsp,servers=1", 0.22),  # Between the simulator and the lab, where workers are staggered.
        ("ps:bsp,servers=2", 0.22),
        ("ps:async,servers=1", 0.05),
        ("ps:ssp=3,servers=1", 0.05),
    ],
)
@pytest.mark.parametrize(("rate", "workers"), [("1gbit", 8), ("100mbit", 4)])
def test_others_are_about_what_the_simulator_says(
    strategy: str, within: float, workers: int, rate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without encoding and decoding, which take no time there."""
    for codec in (Cast, Chain, LowRank, OneBit, Quantize, RandomK, Threshold, TopK):
        monkeypatch.setattr(codec, "speed", CodecSpeed(inf, inf))
    monkeypatch.setattr("tutti.strategies.decentralised.cost.MIXING", CodecSpeed(inf, inf))
    profile, cluster = lab_perceptron(0.02), Cluster(link=Link(rate, "50us"))
    found = price(parse(strategy), profile, workers, cluster)
    assert found.step_s == pytest.approx(dry_run(found.strategy, profile, workers, cluster), rel=within)


# `tutti bench compression` in docs/benchmarks.md: rate, milliseconds without exchange, milliseconds per step.
COMPRESSED = {
    ("94.5mbit", 19.1): {
        "native": 982.1,
        "fp16": 511.9,
        "fp8": 273.4,
        "quantize:4": 154.1,
        "onebit": 59.1,
        "topk": 61.7,
        "lowrank": 46.9,
        "topk+quantize:8": 48.4,
    },
    ("945mbit", 19.2): {
        "native": 121.5,
        "fp16": 77.8,
        "fp8": 54.7,
        "quantize:4": 42.8,
        "onebit": 36.3,
        "topk": 42.6,
        "lowrank": 41.7,
        "topk+quantize:8": 41.7,
    },
}
"""By what links carry beside headers."""

REFERENCE = {"94.5mbit": 39.0, "945mbit": 38.1}
"""Of topk:0.001, which sends next to nothing."""


@pytest.mark.parametrize(
    ("rate", "computing_ms", "strategy", "measured_ms"),
    [(*place, strategy, step_ms) for place, steps in COMPRESSED.items() for strategy, step_ms in steps.items()],
)
def test_what_one_strategy_takes_beyond_its_formula_the_others_take_too(
    rate: str, computing_ms: float, strategy: str, measured_ms: float
) -> None:
    """Four ranks on two cores. Without it, those with a codec are too fast by up to 48 %."""
    profile, cluster = lab_perceptron(computing_ms / 1e3), Cluster(link=Link(rate, "100us"))
    coding = Overhead(coding_factor=2.0)
    explained_s = price(parse("topk:0.001"), replace(profile, overhead=coding), 4, cluster).step_s
    overhead = replace(coding, exchange_s=REFERENCE[rate] / 1e3 - explained_s)
    found = price(parse(strategy), replace(profile, overhead=overhead), 4, cluster)
    assert found.step_s * 1e3 == pytest.approx(measured_ms, rel=0.13)


def test_overhead_comes_to_every_exchange_and_every_bucket() -> None:
    profile = lab_perceptron(0.02)
    overhead = Overhead(exchange_s=0.016, bucket_s=0.0016, coding_factor=3.0)
    for strategy, exchanges in {"ring": 1.0, "ps:ssp=3": 1.0, "averaging:every=16": 1 / 16}.items():
        free, paid = (price(parse(strategy), each, 4, EVEN) for each in (profile, replace(profile, overhead=overhead)))
        assert paid.step_s - free.step_s == pytest.approx(exchanges * (0.016 + 2 * 0.0016)), strategy
        assert (paid.computing_s, paid.bytes_per_step) == (free.computing_s, free.bytes_per_step)
    free, paid = (
        price(parse("onebit"), each, 4, EVEN).step_s for each in (profile, replace(profile, overhead=overhead))
    )
    assert paid - free > 0.016 + 2 * 0.0016 + 1e-3, "encoding and decoding take three times as long"


def test_what_is_hidden_takes_cores_too() -> None:
    """With all of computing lost while the link is in use, a step takes as long as without overlap."""
    profile, cluster = lab_perceptron(0.02), Cluster(link=Link("10gbit", "100us"))
    crowded = replace(profile, overhead=Overhead(contention=1.0))
    free, apart = (price(parse(f"bmuf:every=16,overlap={on}"), profile, 4, cluster).step_s for on in (1, 0))
    assert free == pytest.approx(0.02)
    assert price(parse("bmuf:every=16,overlap=1"), crowded, 4, cluster).step_s == pytest.approx(apart, rel=0.01)
    assert price(parse("bmuf:every=16"), crowded, 4, cluster).step_s == pytest.approx(apart), "nothing was hidden"
    for strategy in ("ring", "poseidon", "ps:bsp", "ps:ssp=3", "gossip", "gossip:pairs=async", "peers"):
        alone, paid = (price(parse(strategy), each, 4, cluster).step_s for each in (profile, crowded))
        assert alone < paid < alone + 0.02, strategy


def test_where_cores_are_the_limit_few_send_faster_than_all() -> None:
    profile, cluster = lab_perceptron(0.0), Cluster(link=Link("1gbit"))
    few = replace(profile, overhead=Overhead(uncontended_factor=8.0))
    tree, ring, server = (
        [price(parse(text), each, 4, cluster).step_s for each in (profile, few)]
        for text in ("tree", "ring", "ps:bsp,servers=1")
    )
    assert ring[1] == ring[0], "all send"
    # Half of four ranks send twice as fast, and one four times: what took two times two messages takes 1/2 + 1/4 of it.
    assert tree[1] == pytest.approx(tree[0] * (1 / 2 + 1 / 4) / 2, rel=1e-4)
    assert server[1] == pytest.approx(server[0] / 5, rel=1e-4), "into one card of five, and out of it"


def test_products_of_factors_are_priced_at_the_speed_of_the_model() -> None:
    """A worker multiplies what three others would have: three times a third of its own work, where sending is free."""
    computing_s = 0.03
    found = price(
        parse("poseidon:rule=broadcast"), lab_perceptron(computing_s), 4, Cluster(link=Link("100tbit", "1ns"))
    )
    assert found.exposed_s == pytest.approx(computing_s, rel=0.01)


@pytest.mark.parametrize("rule", ["bsp", "ssp=2", "async"])
def test_poseidon_with_servers_is_priced_as_servers(rule: str) -> None:
    profile = lab_perceptron(0.02)
    found, servers = (price(parse(f"{name}:{rule}"), profile, 4, EVEN) for name in ("poseidon", "ps"))
    assert (found.step_s, found.bytes_per_step, found.exact) == (servers.step_s, servers.bytes_per_step, servers.exact)
    assert found.exact is (rule == "bsp")


def test_more_samples_are_more_rows_and_more_work() -> None:
    small, large = (perceptron(784, 1024, 10, computing_s=n * 1e-3, num_samples=n) for n in (8, 128))
    found = with_batch(large, 8)
    assert [layer.rows for layer in found.layers] == [layer.rows for layer in small.layers]
    assert found.work == pytest.approx(small.work)
    assert price(parse("poseidon"), found, 16, EVEN).step_s == pytest.approx(
        price(parse("poseidon"), small, 16, EVEN).step_s
    )


def test_overhead_is_for_those_who_exchange() -> None:
    profile = replace(lab_perceptron(0.02), overhead=Overhead(exchange_s=1.0, bucket_s=1.0))
    assert price(parse("ring"), profile, 1, EVEN).step_s == pytest.approx(0.02)
    slow = Cluster(link=EVEN.link, slow={0: 2.0, 1: 2.0})
    assert price(parse("ring"), profile, 2, slow).step_s > 0.04 + 2 * 3.0, "a slow worker's takes longer too"
    uneven = price(parse("ring"), profile, 4, Cluster(jitter=Jitter(0.1)), lambda strategy: 0.5)
    assert uneven.step_s == pytest.approx(0.5 + 3.0), "and no simulation knows of it"


def test_codecs_may_be_faster_than_on_the_core_they_were_timed_on() -> None:
    profile = lab_perceptron(0.02)
    quick = price(parse("onebit"), replace(profile, overhead=Overhead(coding_factor=0.0)), 4, EVEN)
    assert profile.seconds <= quick.step_s < price(parse("onebit"), profile, 4, EVEN).step_s


def test_nothing_is_exposed_on_a_link_without_end() -> None:
    found = price(parse("ring"), lab_perceptron(0.02), 4, Cluster(link=Link("100tbit")))
    assert found.exposed_s == pytest.approx(0.0, abs=1e-6)
    assert found.efficiency == pytest.approx(1.0, abs=1e-4)
    assert found.samples_per_s == pytest.approx(4 * 64 / 0.02, rel=1e-4)


def test_a_bucket_that_is_ready_early_is_hidden() -> None:
    """Two buckets, of which the first travels while backward computes the second."""
    profile, cluster = lab_perceptron(0.3), Cluster(link=Link("1gbit", "50us"))
    first, second = bucket_loads(profile, 4 * 2**20)
    assert first.ready_s < second.ready_s == pytest.approx(profile.backward_s)
    whole = price(AllReduce("ring", bucket_bytes=2**30), profile, 4, cluster)
    cut = price(AllReduce("ring"), profile, 4, cluster)
    assert cut.exposed_s == pytest.approx(
        whole.exposed_s * second.num_bytes / (first.num_bytes + second.num_bytes), rel=0.01
    )


def test_bytes_are_those_of_the_algorithm() -> None:
    num_bytes = 4 * 1_863_690
    for strategy, wanted in {"ring": 1.5, "recursive_doubling": 2.0, "averaging:every=10": 0.15, "gossip": 1.0}.items():
        found = price(parse(strategy), lab_perceptron(0.02), 4, EVEN)
        assert found.bytes_per_step == pytest.approx(wanted * num_bytes, rel=1e-3), strategy
    compressed = price(parse("onebit"), lab_perceptron(0.02), 4, EVEN)
    assert compressed.bytes_per_step == pytest.approx(366 * 1024, rel=0.02)  # As `tutti bench compression` has counted.


def test_one_worker_pays_nothing() -> None:
    for strategy in ("ring", "ps:bsp", "bmuf:every=16", "gossip", "ps:bsp,servers=1"):
        found = price(parse(strategy), lab_perceptron(0.02), 1, EVEN)
        assert (found.step_s, found.exposed_s, found.bytes_per_step) == (pytest.approx(0.02), 0.0, 0.0)


def test_servers_need_places_too() -> None:
    four = Cluster(hosts=4, ranks_per_host=1)
    assert price(parse("ps:bsp"), lab_perceptron(0.02), 4, four).workers == 4
    with pytest.raises(ConfigError, match="5 ranks are more than the hosts"):
        price(parse("ps:bsp,servers=1"), lab_perceptron(0.02), 4, four)


def test_the_slowest_worker_counts() -> None:
    hosts = (Host(name="quick"), Host(name="slow", speed=0.5))
    found = price(parse("ring"), lab_perceptron(0.02), 2, Cluster(link=Link("100tbit"), hosts=hosts))
    assert found.computing_s == pytest.approx(0.04)


UNEVEN = {
    "several ranks on several hosts": (Cluster(ranks_per_host=2), 4),
    "links that differ": (Cluster(hosts=(Host(name="a", link=Link("1gbit")), Host(name="b", link=Link("2gbit")))), 2),
    "paths of their own": (Cluster.load("africa-wan"), 4),
    "a shared switch": (Cluster(tiers=(Tier(2, 2.0),)), 4),
    "jitter": (Cluster(jitter=Jitter(0.1)), 4),
    "a slow worker": (Cluster(slow={1: 2.0}), 4),
}


@pytest.mark.parametrize(("cluster", "workers"), UNEVEN.values(), ids=UNEVEN)
def test_where_formulas_do_not_hold_a_simulation_is_asked(cluster: Cluster, workers: int) -> None:
    asked: list[Strategy] = []

    def simulated(strategy: Strategy) -> float:
        asked.append(strategy)
        return 1.5

    found = price(parse("ring"), lab_perceptron(0.02), workers, cluster, simulated)
    assert asked == [parse("ring")]
    assert (found.step_s, found.simulated) == (1.5, True)
    assert found.exposed_s == pytest.approx(1.5 - found.computing_s)
    assert not price(parse("ring"), lab_perceptron(0.02), workers, cluster).simulated, "nobody to ask"


def test_where_they_hold_it_is_not() -> None:
    def simulated(strategy: Strategy) -> float:
        raise AssertionError(strategy)

    switched = Cluster(tiers=(Tier(4, 4.0),))
    for cluster in (EVEN, Cluster(hosts=1), switched):
        assert not price(parse("ring"), lab_perceptron(0.02), 4, cluster, simulated).simulated


def test_encoding_comes_to_what_a_simulation_says() -> None:
    found = price(parse("onebit"), lab_perceptron(0.02), 4, Cluster(jitter=Jitter(0.1)), lambda strategy: 0.03)
    assert 0.0305 < found.step_s < 0.033


def test_a_simulation_of_two_levels_is_near_the_formula() -> None:
    """Two ranks on each of two hosts: what a formula says is at least the right size."""
    cluster, profile = Cluster(link=Link("1gbit", "50us"), ranks_per_host=2), lab_perceptron(0.02)
    found = price(parse("native"), profile, 4, cluster)
    assert found.step_s == pytest.approx(dry_run(found.strategy, profile, 4, cluster), rel=0.1)


def test_a_strategy_that_nobody_has_priced() -> None:
    class Unheard(Strategy):
        def attach(self, replica: object, transport: object) -> Exchange:  # type: ignore[override]
            raise NotImplementedError

        @property
        def exact(self) -> bool:
            return True

        def __str__(self) -> str:
            return "unheard"

    with pytest.raises(ConfigError, match=r"strategy 'unheard' has no cost formula.*Unheard\.cost"):
        price(Unheard(), lab_perceptron(0.02), 4, EVEN)


def test_more_parameters_cost_more_and_a_faster_link_less() -> None:
    for strategy in ("ring", "tree", "onebit", "ps:bsp", "ps:ssp=3", "peers+threshold", "bmuf:every=16"):
        steps = [
            price(parse(strategy), perceptron(100, width, 10, computing_s=1e-3), 8, Cluster(link=Link(rate))).step_s
            for width, rate in ((1000, "1gbit"), (4000, "1gbit"), (4000, "100mbit"))
        ]
        assert steps == sorted(steps), strategy
        assert steps[0] < steps[2], strategy


def test_memory_is_the_profiles_and_what_is_kept() -> None:
    profile = replace(lab_perceptron(0.02), peak_bytes=10**9)
    plain, compressed = (price(parse(text), profile, 4, EVEN).memory_bytes for text in ("ring", "onebit"))
    assert plain == 10**9
    assert compressed == pytest.approx(10**9 + 4 * 1_863_690, rel=1e-3)
    assert price(parse("bmuf:every=16"), profile, 4, EVEN).memory_bytes > compressed
