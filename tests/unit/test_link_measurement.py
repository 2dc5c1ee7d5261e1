"""Links as messages show them of which a busy machine delays some: with given delays, not with real load."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tutti.cluster import Link
from tutti.collectives import LinkFit
from tutti.collectives.links import _ping_pong


class DelayedLink:
    """Rank 0 of two, whose clock moves by the link's time for each message, and by delays."""

    cluster, rank = None, 0

    def __init__(self, link: Link, delay: Callable[[], float]) -> None:
        self._link, self._delay, self._now_s = link, delay, 0.0

    def now(self) -> float:
        return self._now_s

    def isend(self, tensor: Any, other: int) -> "DelayedLink":
        self._now_s += self._link.seconds(tensor.nbytes) + self._delay()
        return self

    irecv = isend

    def wait(self) -> None:
        """The message has arrived."""


def measured(link: Link, delay: Callable[[], float]) -> LinkFit:
    return LinkFit.from_points(_ping_pong(DelayedLink(link, delay), 0, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("link", [Link("8mbit", "100us"), Link("1gbit", "50ms"), Link("100gbit", "10us")], ids=str)
def test_no_delay_makes_a_link_faster(link: Link) -> None:
    for seed in range(50):
        luck = random.Random(seed)
        found = measured(link, lambda: 0.1 * luck.random() if luck.random() < 0.1 else 0.0)  # noqa: B023
        assert found.link.bits_per_s < 1.01 * link.bits_per_s


@pytest.mark.parametrize("slow_start_s", [0.0, 0.03, 3.0])
@pytest.mark.parametrize("link", [Link("8mbit", "100us"), Link("100mbit", "50ms")], ids=str)
def test_the_first_messages_may_take_long(link: Link, slow_start_s: float) -> None:
    """The connection is opened, and other processes start: 2 messages are late, which are half the first size's."""
    delays = iter([slow_start_s] * 4)
    found = measured(link, lambda: next(delays, 0.0))
    assert found.link.bits_per_s == pytest.approx(link.bits_per_s, rel=0.01)
    assert found.link.latency_s == pytest.approx(link.latency_s, rel=0.01)


def test_the_bytes_and_not_the_latency_take_long() -> None:
    link = Link("1gbit", "50ms")
    sizes = [size for size, _ in measured(link, lambda: 0.0).points]
    assert link.seconds(sizes[-2]) - link.latency_s > 0.02


def test_a_second_largest_message_that_was_late() -> None:
    points = [(64, 1e-4), (2**16, 0.25), (2**18, 0.27)]
    assert LinkFit.from_points(points).link.bits_per_s == pytest.approx(8 * 2**18 / 0.27, rel=0.01)
