"""Clusters: what they are made of, who goes where, and their files."""

import math
import pickle
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.cluster import (
    PRESETS,
    Cluster,
    Compute,
    Host,
    Jitter,
    Link,
    Pauses,
    Tier,
    format_rate,
    format_speed,
    format_time,
    parse_rate,
    parse_speed,
    parse_time,
)
from tutti.cluster.files import read
from tutti.errors import ConfigError, UnknownName

A, B, C = Host(name="a"), Host(name="b"), Host(name="c")


@pytest.mark.parametrize(
    ("text", "flops"),
    [("100gflops", 1e11), ("19.5 TFLOPS", 19.5e12), ("1pflops", 1e15), ("3kflops", 3e3), ("2mflops", 2e6), (7, 7.0)],
)
def test_speeds(text: str | float, flops: float) -> None:
    assert parse_speed(text) == flops


@pytest.mark.parametrize("text", ["100gflops", "19.5tflops", "1pflops", "1flops"])
def test_a_speed_prints_as_the_text_that_makes_it(text: str) -> None:
    assert format_speed(parse_speed(text)) == text


@pytest.mark.parametrize("parse", [parse_speed, parse_rate, parse_time])
@pytest.mark.parametrize("bad", ["fast", "", "-1", "1parsec", math.nan, math.inf, 10**400, True, None, [1]])
def test_what_is_no_quantity(parse: Callable[[Any], float], bad: object) -> None:
    with pytest.raises(ConfigError):
        parse(bad)


def test_texts_become_numbers() -> None:
    assert Tier(4, 2, "5us") == Tier(4, 2.0, parse_time("5us"))
    assert Pauses("10s", "200ms") == Pauses(10.0, 0.2)
    assert Compute("2tflops", "1ms", "3ms", 0.5) == Compute(2e12, parse_time("1ms"), parse_time("3ms"), 0.5)
    assert Cluster(jitter=0.1, failures={2: "30s"}) == Cluster(jitter=Jitter(0.1), failures={2: 30.0})
    assert replace(Compute(), step_s="1ms").step_s == parse_time("1ms")


def test_a_cluster_is_a_value() -> None:
    slow = {1: 2.0}
    cluster = Cluster(hosts=(A, B), slow=slow, links={("b", "a"): Link("1gbit")}, tiers=[Tier(2)])
    slow[1] = 3.0
    assert cluster.slow == {1: 2.0}
    same = Cluster(hosts=[A, B], slow={1: 2.0}, links={("a", "b"): Link("1gbit")}, tiers=(Tier(2),))
    assert cluster == same
    assert hash(cluster) == hash(same)
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert replace(cluster, seed=1) != cluster


MISTAKES: dict[str, Callable[[], Any]] = {
    "'fast' is not a rate.*'late' is not a time": lambda: Link("fast", "late"),
    "printable text, got ''": lambda: Host(name=""),
    "host 'a' must hold 1 rank or more, got ranks=0": lambda: Host(name="a", ranks=0),
    "host 'a' needs a speed above 0 and finite, got nan": lambda: Host(name="a", speed=math.nan),
    "host 'a' needs a Link, got link='1gbit'": lambda: Host(name="a", link="1gbit"),
    "size must be 2 or more, got 1": lambda: Tier(1),
    "oversubscription must be 1 or more .*got 0.5": lambda: Tier(2, 0.5),
    "oversubscription must .*got inf": lambda: Tier(2, math.inf),
    "a tier's latency: 'late' is not a time": lambda: Tier(2, 1, "late"),
    "between pauses must be above 0, got 0.*of a pause must be above 0, got '0s'": lambda: Pauses(0, "0s"),
    "spread must be 0 or more and finite, got -1": lambda: Jitter(-1),
    "uniform jitter's spread must be below 0.577, got 0.58": lambda: Jitter(0.58, "uniform"),
    "lognormal jitter's spread must be 5 or less, got 50: it is a share": lambda: Jitter(50),
    "exponential jitter's spread must be 1 or less, got 1.5": lambda: Jitter(1.5, "exponential"),
    "unknown shape of jitter 'unifrm'. Did you mean 'uniform'": lambda: Jitter(0.1, "unifrm"),
    "a speed must be above 0": lambda: Compute(0),
    "a sample's time: a time must be 0 or more and finite, got '-1'": lambda: Compute(sample_s=-1),
    "a step's time: 'x' is not a time": lambda: Compute(step_s="x"),
    "forward must be from 0 to 1, got 2": lambda: Compute(forward=2),
    "a cluster's name must be printable text": lambda: Cluster(name="a\nb"),
    "hosts must be 1 or more, or a tuple of Host, got 0": lambda: Cluster(hosts=0),
    "hosts must be 1 or more, or a tuple of Host, got '4'": lambda: Cluster(hosts="4"),
    "a cluster needs 1 host or more": lambda: Cluster(hosts=()),
    "hosts must be a tuple of Host, got 'a' in it": lambda: Cluster(hosts=("a",)),
    "hosts' names must differ, got more than one 'a'": lambda: Cluster(hosts=(A, A, B)),
    "ranks_per_host must be 1 or more, got 0": lambda: Cluster(ranks_per_host=0),
    "link must be a Link, got '1gbit'": lambda: Cluster(link="1gbit"),
    "within must be a Link, got None": lambda: Cluster(within=None),
    "compute must be a Compute, got 1": lambda: Cluster(compute=1),
    "tiers must be a tuple of Tier, got 4": lambda: Cluster(tiers=4),
    "links must be a mapping, got 4": lambda: Cluster(links=4),
    "links must be between two hosts by name, got 'ab'": lambda: Cluster(links={"ab": Link(1)}),
    "between host0 and host1 must be a Link, got 3": lambda: Cluster(links={("host0", "host1"): 3}),
    "links join 'a' with itself": lambda: Cluster(hosts=(A, B), links={("a", "a"): Link(1)}),
    "links between a and d: no host is named 'd' .they are a, b": lambda: Cluster(
        hosts=(A, B), links={("a", "d"): Link(1)}
    ),
    "no host is named 'host2' .*host0 to host1": lambda: Cluster(hosts=2, links={("host0", "host2"): Link(1)}),
    "no host is named 'lagos' .*host0, host1, ...": lambda: Cluster(links={("host0", "lagos"): Link(1)}),
    "did you mean 'lagos'": lambda: Cluster(hosts=(A, Host(name="lagos")), links={("a", "lagso"): Link(1)}),
    "links between b and a differ: 1bit, 0ns and 2bit, 0ns": lambda: Cluster(
        hosts=(A, B), links={("a", "b"): Link(1), ("b", "a"): Link(2)}
    ),
    "slow: rank 3's factor must be above 0 and finite, got 0": lambda: Cluster(slow={3: 0}),
    "slow: a rank must be 0 or more, got -1": lambda: Cluster(slow={-1: 2.0}),
    "failures: rank 1: 'soon' is not a time": lambda: Cluster(failures={1: "soon"}),
    "pauses must be a Pauses, got 1": lambda: Cluster(pauses=1),
    "seed must be a whole number, got 0.5": lambda: Cluster(seed=0.5),
}


@pytest.mark.parametrize(("message", "make"), MISTAKES.items(), ids=MISTAKES)
def test_mistakes(message: str, make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        make()


def test_all_mistakes_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Cluster(hosts=0, ranks_per_host=0, slow={1: -1}, failures={1: "x"}, jitter=-1, tiers=(1,), link="1gbit")
    for part in ("hosts", "ranks_per_host", "slow", "failures", "spread", "tiers", "link must"):
        assert part in str(caught.value)


def test_the_same_path_may_be_given_both_ways() -> None:
    links = {("a", "b"): Link(1), ("b", "a"): Link(1)}
    assert Cluster(hosts=(A, B), links=links).links == {("a", "b"): Link(1)}


def _names(cluster: Cluster, workers: int) -> str:
    return "".join(host.name.removeprefix("host") for host in cluster.place(workers))


@pytest.mark.parametrize(
    ("cluster", "workers", "names"),
    [
        (Cluster(), 3, "012"),
        (Cluster(ranks_per_host=2), 5, "00112"),
        (Cluster(hosts=3), 7, "0001122"),
        (Cluster(hosts=10**12), 3, "012"),
        (Cluster(hosts=3, ranks_per_host=4), 6, "000011"),
        (Cluster(hosts=(A, B)), 3, "aab"),
        (Cluster(hosts=(A, replace(B, ranks=3), C)), 7, "aabbbcc"),
        (Cluster(hosts=(A, replace(B, ranks=1)), ranks_per_host=2), 3, "aab"),
    ],
)
def test_ranks_are_placed_in_blocks(cluster: Cluster, workers: int, names: str) -> None:
    assert _names(cluster, workers) == names


def test_placed_hosts_are_complete() -> None:
    own = Link("1gbit")
    hosts = Cluster(hosts=(A, replace(B, ranks=3, link=own, speed=2.0)), link=Link("2gbit")).place(5)
    assert hosts[0] == Host(name="a", ranks=2, link=Link("2gbit"))
    assert hosts[4] == Host(name="b", ranks=3, link=own, speed=2.0)


@given(st.lists(st.none() | st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 40))
def test_every_rank_has_a_place_or_there_is_none(holds: list[int | None], workers: int) -> None:
    cluster = Cluster(hosts=tuple(Host(name=f"h{index}", ranks=ranks) for index, ranks in enumerate(holds)))
    room = math.inf if None in holds else sum(filter(None, holds))
    if workers > room:
        with pytest.raises(ConfigError, match=f"{workers} ranks are more than .* hold, {room}"):
            cluster.place(workers)
        return
    hosts = cluster.place(workers)
    assert len(hosts) == workers
    assert [host.name for host in hosts] == sorted(host.name for host in hosts)
    assert all(sum(host == other for other in hosts) <= (host.ranks or 0) for host in hosts)


def test_places_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="workers must be 1 or more, got 0"):
        Cluster().place(0)
    with pytest.raises(ConfigError) as caught:
        Cluster(hosts=2, ranks_per_host=2, slow={1: 2.0, 7: 2.0, 9: 1.5}, failures={5: 1.0}).place(5)
    for part in ("slow names rank 7, 9", "the ranks are 0 to 4", "failures names rank 5", "5 ranks", "hold, 4"):
        assert part in str(caught.value)


def test_link_between_hosts() -> None:
    fast, slow, path = Link("10gbit", "10us"), Link("1gbit", "50us"), Link("2gbit", "20ms")
    cluster = Cluster(hosts=(A, replace(B, link=slow), C), link=fast, links={("c", "a"): path, ("b", "c"): path})
    a, b, c = cluster.place(3)
    assert cluster.link_between(a, b) == cluster.link_between(b, a) == slow
    assert cluster.link_between(a, c) == cluster.link_between(c, a) == path
    assert cluster.link_between(b, c) == Link("1gbit", "20ms")
    assert cluster.link_between(a, a) == cluster.within


def test_hosts_that_only_paths_join() -> None:
    path = Link("2gbit", "20ms")
    cluster = Cluster(hosts=(A, replace(B, link=Link("1gbit")), C), link=None, links={("a", "b"): path})
    a, b, c = cluster.place(3)
    assert cluster.link_between(a, b) == Link("1gbit", "20ms")
    assert cluster.link_between(a, c) is None
    assert cluster.link_between(b, c) is None


def test_speeds_of_ranks() -> None:
    cluster = Cluster(hosts=(A, replace(B, speed=3.0)), slow={1: 2.0})
    assert [cluster.speed_of(rank, host) for rank, host in enumerate(cluster.place(2))] == [1.0, 1.5]


@pytest.mark.parametrize(
    "jitter",
    [
        Jitter(0.0),
        Jitter(0.3),
        Jitter(2.0),
        Jitter(0.5, "uniform"),
        Jitter(0.4, "exponential"),
        Jitter(1, "exponential"),
    ],
    ids=str,
)
def test_jitter_has_mean_one_and_its_spread(jitter: Jitter) -> None:
    rng = random.Random(1)
    draws = [jitter.draw(rng) for _ in range(20_000)]
    assert min(draws) > 0
    assert statistics.fmean(draws) == pytest.approx(1, abs=0.03 * max(jitter.spread, 1e-9))
    assert statistics.pstdev(draws) == pytest.approx(jitter.spread, rel=0.2, abs=1e-9)


def test_prints_what_it_is() -> None:
    text = str(
        Cluster(
            name="office", hosts=(A, replace(B, ranks=2, link=Link("1gbit"), speed=0.5)), tiers=(Tier(2, 4, "5us"),),
            slow={1: 2.0}, jitter=0.1, pauses=Pauses("10s", "1s"), failures={0: "30s"},
            links={("a", "b"): Link("1mbit")},
        )
    )  # fmt: skip
    for part in (
        "office: 2 hosts, each on 10gbit, 50us", "b: 2 ranks, on 1gbit, 0ns, speed 0.5", "within a host: 100gbit, 2us",
        "between a and b: 1mbit", "tier 1: 2 to a switch, 4:1 oversubscribed, 5us more", "compute: 100gflops",
        "rank 1 takes 2 times as long", "lognormal jitter of 0.1", "pauses of 1s every 10s", "rank 0 dies at 30 s",
    ):  # fmt: skip
        assert part in text
    assert str(Cluster(hosts=1, ranks_per_host=2)).startswith("cluster: 1 host of 2 ranks\n")
    alone = Cluster(hosts=(Host(name="a", ranks=1, link=Link("1gbit")),))
    assert str(alone).startswith("cluster: 1 host\n  a: 1 rank\n"), "no link where there is nobody to talk to"
    assert str(Cluster(link=None)).startswith("cluster: as many hosts as it takes, joined only by the links below")


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    cluster = Cluster.load(name)
    assert cluster.name == name
    for workers in range(1, 65):
        hosts = cluster.place(workers)
        assert len(hosts) == workers
        assert cluster.link_between(hosts[0], hosts[-1]) is not None
    assert read(cluster.to_toml(), name) == cluster
    assert name in str(cluster)


def test_unknown_names_list_the_presets() -> None:
    with pytest.raises(UnknownName, match=r"'ethernet-1gb'. Did you mean 'ethernet-1g'.*nvlink-island"):
        Cluster.load("ethernet-1gb")
    with pytest.raises(UnknownName, match=r"unknown preset or file 'office'"):
        Cluster.load("office")


@pytest.mark.parametrize("name", ["office.toml", "./office", Path("office.toml")])
def test_files_that_are_not_there(name: str | Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file (./)?office.*Presets: .*nvlink-island"):
        Cluster.load(name)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder, not a cluster's TOML file"):
        Cluster.load(tmp_path)


OFFICE = """
name = "office"
ranks_per_host = 2
link = { rate = "1gbit", latency = "50us" }
within = { rate = "20gbit" }
jitter = { spread = 0.1, shape = "uniform" }
pauses = { every = "10s", length = "1s" }
seed = 3

[compute]
flops = "50gflops"
sample = "2ms"
step = 0.001

[slow]
"1" = 2.0

[failures]
"0" = "30s"

[[host]]
name = "a"
[[host]]
name = "b"
ranks = 1
speed = 2
link = { rate = 1e8 }

[[tier]]
size = 2
oversubscription = 4
latency = "5us"

[[between]]
hosts = ["b", "a"]
rate = "10mbit"
latency = "20ms"
"""


def test_a_whole_file(tmp_path: Path) -> None:
    (tmp_path / "office.toml").write_text(OFFICE)
    cluster = Cluster.load(tmp_path / "office.toml")
    assert cluster == Cluster(
        name="office",
        ranks_per_host=2,
        link=Link("1gbit", "50us"),
        within=Link("20gbit"),
        hosts=(A, Host(name="b", ranks=1, speed=2, link=Link("100mbit"))),
        jitter=Jitter(0.1, "uniform"),
        pauses=Pauses(10, 1),
        seed=3,
        compute=Compute("50gflops", "2ms", "1ms"),
        slow={1: 2.0},
        failures={0: 30.0},
        tiers=(Tier(2, 4, "5us"),),
        links={("a", "b"): Link("10mbit", "20ms")},
    )
    (tmp_path / "again.toml").write_text(cluster.to_toml(), encoding="utf-8")
    assert Cluster.load(str(tmp_path / "again.toml")) == cluster


def test_short_files() -> None:
    assert read("", "empty") == Cluster()
    assert read('link = "none"\nhosts = 4\njitter = 0.1', "short") == Cluster(link=None, hosts=4, jitter=0.1)


BAD_FILES = {
    "name = \nhosts = 3": r"bad.toml is not TOML: .*line 1",
    "hosts = '4'": "hosts must be 1 or more, or a tuple of Host, got '4'",
    "hosts = true": "hosts must be 1 or more",
    "hosts = 2\n[[host]]\nname='a'": "either hosts or ..host.., not both",
    "host = 3": "host must be ..host.. tables, got 3",
    "host = []": "a cluster needs 1 host or more",
    "lnk = {}": "unknown key 'lnk'. Did you mean 'link'",
    "link = '1gbit'": "link must be a table with rate, latency, got '1gbit'",
    "link = {latency='1us'}": "link needs rate",
    "link = {rate='fast', latency='late'}": "link: rate: 'fast' is not a rate.*link: latency: 'late' is not a time",
    "within = 'none'": "within must be a table",
    "within = {rate=1, ltency=1}": "within: unknown key 'ltency'. Did you mean 'latency'",
    "[compute]\nflops = [1]": "compute: .* is not a speed",
    "[slow]\nfirst = 2": "slow: 'first' is not a rank",
    "slow = 2": "slow must be a table by rank",
    "[slow]\n1 = 'much'": "slow: rank 1's factor must be above 0 and finite, got 'much'",
    "[failures]\n1 = 'soon'": "failures: rank 1: 'soon' is not a time",
    "jitter = 'much'": "jitter must be a table with spread, shape",
    "jitter = true": "spread must be 0 or more",
    "pauses = {}": "pauses needs every and length",
    "[[tier]]\nsize=4\n[[tier]]\noversubscription=0": "tier]] 2 needs size.*tier]] 2: a tier's oversubscription",
    "[[host]]\nspeed=0": "host]] 1 needs name.*host]] 1: host .* needs a speed above 0",
    "[[host]]\nname='a'\nlink='none'": "host]] 1 link must be a table",
    "[[between]]\nrate=1": "between]] 1 needs hosts",
    "[[between]]\nhosts=['host0']\nrate=0": "between]] 1: hosts must be two names.*a rate must be above 0",
    "[[between]]\nhosts=['host0','host1']\nrate=1\n[[between]]\nhosts=['host1','host0']\nrate=1": "2: .* joined before",
    "name = 3": "a cluster's name must be printable text, got 3",
    "seed = 1.5": "seed must be a whole number, got 1.5",
    "ranks_per_host = 1979-05-27": "ranks_per_host must be 1 or more",
}


@pytest.mark.parametrize(("text", "message"), BAD_FILES.items(), ids=BAD_FILES)
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ConfigError, match=f"(?s){message}") as caught:
        Cluster.load(tmp_path / "bad.toml")
    assert "bad.toml" in str(caught.value)


def test_all_mistakes_of_a_file_at_once() -> None:
    text = OFFICE.replace("50us", "soon").replace("speed = 2", "sped = 2\nspeed = 0").replace("size = 2", "size = 1")
    text = text.replace('"b", "a"', '"c", "a"').replace("seed = 3", "seed = 'x'")
    with pytest.raises(ConfigError) as caught:
        read(text, "office.toml")
    for part in ("'soon'", "'sped'", "speed above 0", "size must be 2", "no host is named 'c'", "seed must be"):
        assert part in str(caught.value)
    lines = str(caught.value).splitlines()
    assert lines[0] == "office.toml:"
    assert "  link: latency: 'soon' is not a time: write a number and a unit, such as 50us, 1ms or 2s." in lines
    assert len(lines) == 7, "a line for each mistake"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        Cluster.load(tmp_path / "bytes.toml")


above, times, ranks = st.floats(1e-3, 1e15), st.floats(0, 1e6), st.integers(0, 99)
names = st.text(min_size=1, max_size=8).filter(lambda name: name.isprintable() and name.strip() != "")
links = st.builds(Link, above, times)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    host = st.builds(Host, name=names, ranks=st.none() | st.integers(1, 9), link=st.none() | links, speed=above)
    several = st.lists(host, min_size=2, max_size=4, unique_by=lambda host: host.name).map(tuple)
    hosts = draw(st.none() | st.integers(1, 9) | several)
    paths = {(hosts[0].name, hosts[1].name): draw(links)} if isinstance(hosts, tuple) and draw(st.booleans()) else {}
    return Cluster(
        name=draw(names),
        link=draw(st.none() | links),
        hosts=hosts,
        ranks_per_host=draw(st.none() | st.integers(1, 9)),
        within=draw(links),
        links=paths,
        tiers=draw(st.lists(st.builds(Tier, st.integers(2, 99), st.floats(1, 99), times), max_size=2).map(tuple)),
        compute=draw(st.builds(Compute, above, st.none() | times, times, st.floats(0, 1))),
        slow=draw(st.dictionaries(ranks, above, max_size=2)),
        jitter=draw(st.none() | st.builds(Jitter, st.floats(0, 0.5), st.sampled_from(["lognormal", "uniform"]))),
        pauses=draw(st.none() | st.builds(Pauses, above, above)),
        failures=draw(st.dictionaries(ranks, times, max_size=2)),
        seed=draw(st.integers()),
    )


@settings(max_examples=40)
@given(clusters())
def test_files_keep_every_number(cluster: Cluster) -> None:
    assert read(cluster.to_toml(), "round trip") == cluster


def test_units_are_written_where_they_are_exact() -> None:
    text = Cluster(link=Link(1e9 / 3, "50us"), within=Link("2.5gbit")).to_toml()
    assert f'link = {{ rate = {1e9 / 3!r}, latency = "50us" }}' in text
    assert f'within = {{ rate = "{format_rate(2.5e9)}", latency = "{format_time(0)}" }}' in text
