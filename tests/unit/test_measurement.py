"""Measurements say how far they can be trusted: with given times and CPU counts, not with real load."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import nn

from command import Call
from support import run_ok
from tutti import measurement
from tutti.bench.interleaved import InterleavedTimer
from tutti.collectives import LinkFit
from tutti.measurement import CpuUse, Spread, bounded, largest_rate, steadiest
from tutti.plan import network
from tutti.plan.profile import profile
from tutti.plan.profile.clock import WallClock
from tutti.world import World

STEADY = [1.0, 1.01, 1.02, 0.99, 1.0]
NOISY = [1.0, 2.0, 3.0, 1.0, 2.0]


def test_cpu_use_of_others_leaves_out_this_process_and_waiting_for_disks() -> None:
    before = CpuUse.from_line("cpu  100 0 100 1000 50 0 0 0 0 0", own_s=1.0, ticks_per_s=100)
    after = CpuUse.from_line("cpu  400 0 200 1350 100 0 0 200 0 0", own_s=3.0, ticks_per_s=100)
    # Of 10 seconds, 6 were used: 2 by this process, and 2 were stolen by other virtual machines.
    assert before.others(after) == pytest.approx(0.4)
    assert before.others(after, own_s=6.0) == 0.0
    assert before.others(before) == 0.0


def test_the_spread_is_that_of_quartiles() -> None:
    spread = Spread.of([4.0, 1.0, 2.0, 3.0, 100.0])
    assert (spread.low_s, spread.median_s, spread.high_s) == (2.0, 3.0, 4.0)
    assert spread.relative == pytest.approx(2 / 3)
    assert str(spread) == "2s to 4s in half of the repetitions"
    assert Spread.of([2.0]).relative == 0.0


def test_doubt_names_its_reasons_and_what_to_do() -> None:
    assert Spread.of(STEADY).doubt == ""
    assert Spread.of(NOISY).doubt == (
        "Do not trust these times: repetitions differ by 50%. Measure again when the machine is idle."
    )
    assert "repetitions differ by 50% and other processes used 90% of the CPU" in Spread.of(NOISY, 0.9).doubt
    assert "times: other processes used 90% of the CPU" in Spread.of(STEADY, 0.9).doubt


@pytest.mark.parametrize(
    ("attempts", "kept", "num_measured"),
    [([STEADY, NOISY], STEADY, 1), ([NOISY, STEADY], STEADY, 2), ([NOISY, [0.5, 1.5, 2.5]], [0.5, 1.5, 2.5], 2)],
)
def test_repetitions_that_differ_are_measured_once_more(
    attempts: list[list[float]], kept: list[float], num_measured: int
) -> None:
    left = iter(attempts)
    times, spread = steadiest(lambda: next(left), lambda seconds: seconds)
    assert times == kept
    assert spread.median_s == Spread.of(kept).median_s
    assert len(list(left)) == len(attempts) - num_measured


class UnevenClock(WallClock):
    """Every interval takes one second, or three."""

    def __init__(self) -> None:
        self._moments = self._count()

    @staticmethod
    def _count() -> Iterator[float]:
        now = 0.0
        while True:
            for seconds in (1.0, 1.0, 3.0):
                yield now
                now += seconds

    def now(self) -> float:
        return next(self._moments)


def test_a_profile_has_the_spread_of_its_passes() -> None:
    model = nn.Linear(4, 2)
    measured = profile(model, torch.randn(3, 4), repeats=9, clock=UnevenClock())
    assert measured.spread is not None
    assert measured.spread.low_s >= 1.0
    assert asdict(measured)["spread"]["median_s"] == measured.spread.median_s


def test_a_rate_beyond_the_hardware_is_the_limit_with_a_note() -> None:
    assert bounded(1e9, 1e12) == (1e9, "")
    for impossible in (8e13, float("inf"), 0.0, -1.0):
        rate, note = bounded(impossible, 1e12)
        assert rate == 1e12
        assert "above 1,000 Gbit/s, which this machine cannot reach" in note
    assert 1e10 < largest_rate() < 8e13


def test_a_larger_message_that_was_faster_gives_the_limit() -> None:
    points = [(64, 1e-5), (2**20, 4e-5), (2**24, 3e-5)]
    assert LinkFit.from_points(points, limit=1e12).link.bits_per_s == pytest.approx(1e12)


def measure_memory(world: World) -> tuple[dict[str, Any], list[int]]:
    """The network as measured by ranks whose sums take the same time, whatever their size; and the sizes."""
    transport = world.transport
    times, sizes = iter(range(10**6)), []
    all_reduce = transport.all_reduce  # type: ignore[attr-defined]

    def counted(tensor: torch.Tensor) -> Any:
        sizes.append(tensor.nbytes)
        return all_reduce(tensor)

    transport.all_reduce, transport.now = counted, lambda: float(next(times))  # type: ignore[attr-defined]
    return network.measure_network(transport), sorted(set(sizes))


def test_shared_memory_that_seems_infinitely_fast_is_measured_again_and_then_bounded() -> None:
    for measured, sizes in run_ok(measure_memory, size=2, transport="shared_memory"):
        assert sizes == [2**10, 2**20, 2**24]
        rate, latency_s = measured["links"]["within"]
        assert rate < 8e13
        assert latency_s == 0.5
        assert len(measured["doubts"]) == 1


def times_of(world: World, ends: list[float]) -> dict[str, float]:
    """Time one candidate whose rounds take the given seconds, on one rank."""
    transport = world.transport
    moments = iter([0.0, 1.0, *(moment for end in ends for moment in (0.0, end))])
    transport.now = lambda: next(moments)  # type: ignore[method-assign]
    timer = InterleavedTimer(len(ends), round_s=1.0, most_repeats=1, total_s=100.0)
    return timer.medians({"candidate": lambda: None}, transport)


@pytest.mark.parametrize("times", [STEADY, NOISY])
def test_a_benchmark_prints_its_doubt(
    times: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CpuUse, "now", lambda: None)
    assert run_ok(times_of, times, size=1, transport="sockets") == [{"candidate": sorted(times)[2]}]
    printed = capsys.readouterr().err
    assert printed == ("" if times is STEADY else f"candidate: {Spread.of(NOISY)}. {Spread.of(NOISY).doubt}\n")


@pytest.mark.parametrize("words", [("profile", "digits"), ("plan", "digits", "-n", "2", "--cluster", "ethernet-1g")])
@pytest.mark.parametrize("others", [0.0, 0.9])
def test_plan_and_profile_print_spread_and_doubt(
    words: tuple[str, ...], others: float, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread = Spread.of(STEADY, others)
    monkeypatch.setattr(measurement.Spread, "of", lambda times, others=0.0: replace(spread))
    out = " ".join(call(*words).out.split())
    assert "1s to 1.01s in half of the repetitions" in out
    assert ("Do not trust these times: other processes used 90% of the CPU. Measure again" in out) == bool(others)
