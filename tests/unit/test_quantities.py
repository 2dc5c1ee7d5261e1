"""Durations as numbers, texts and timedeltas, wherever a duration is accepted."""

import math
from datetime import timedelta

import pytest

import tutti
from tutti.cluster import Link, parse_duration, parse_time
from tutti.errors import ConfigError
from tutti.strategies import Averaging, BlockMomentum, parse


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (40, 40.0),
        (0.5, 0.5),
        ("40", 40.0),
        ("40s", 40.0),
        (" 1.5 s ", 1.5),
        ("500ms", 0.5),
        ("5m", 300.0),
        ("2min", 120.0),
        ("1h", 3600.0),
        (timedelta(minutes=1), 60.0),
    ],
)
def test_durations(value: float | str | timedelta, seconds: float) -> None:
    assert parse_duration(value) == timedelta(seconds=seconds)


BAD = [-1, 0, True, False, math.nan, math.inf, 10**400, 1e20, "", "soon", "-1", "0s", "nan", "5 parsecs"]


@pytest.mark.parametrize("bad", [*BAD, timedelta(0), timedelta(seconds=-1), [1], b"5s"])
def test_what_is_no_duration(bad: object) -> None:
    with pytest.raises(ConfigError, match=r"patience must be a number of seconds above 0, got .*'40s'.*timedelta"):
        parse_duration(bad, "patience")  # type: ignore[arg-type]


def _rank() -> int:
    return tutti.init(timeout=3).rank


@pytest.mark.parametrize("timeout", [40, "40s", timedelta(seconds=40)])
def test_simulate_takes_any_duration(timeout: float | str | timedelta) -> None:
    def timeout_s() -> float:
        return tutti.init().transport.timeout.total_seconds()

    assert tutti.simulate(timeout_s, workers=2, timeout=timeout).results == [40.0, 40.0]


@pytest.mark.parametrize("bad", [-1, True, "soon"])
def test_every_public_timeout_refuses_what_is_no_duration(bad: object) -> None:
    for call in (
        lambda: tutti.init(timeout=bad),  # type: ignore[arg-type]
        lambda: tutti.launch(_rank, timeout=bad),  # type: ignore[arg-type]
        lambda: tutti.simulate(_rank, workers=1, timeout=bad),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match="timeout must be a number of seconds above 0"):
            call()


def test_init_takes_a_text() -> None:
    world = tutti.init(timeout="7s")
    try:
        assert world.transport.timeout == timedelta(seconds=7)
    finally:
        world.close()


def test_launch_takes_a_number() -> None:
    assert tutti.launch(_rank, workers=1, timeout=40) == [0]


def test_latencies_may_be_timedeltas() -> None:
    assert Link("1gbit", timedelta(seconds=2)) == Link("1gbit", "2s")
    with pytest.raises(ConfigError, match="'1m' is not a time"):
        parse_time("1m")  # Minutes are no latency; more likely a mistyped millisecond.


def test_blocks_of_some_time() -> None:
    assert Averaging(timedelta(seconds=2)) == Averaging("2s")
    assert str(BlockMomentum(timedelta(milliseconds=500))) == "bmuf:every=0.5s"
    assert parse("averaging:every=5m") == Averaging("5m")
    for bad in ("2", "2 parsecs", timedelta(0), True):
        with pytest.raises(ConfigError, match="every must be"):
            Averaging(bad)  # type: ignore[arg-type]
