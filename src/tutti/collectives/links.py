"""Measure the links between ranks: what cost formulas need to know of the network."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.cluster import Link
from tutti.collectives.messages import all_gather_json
from tutti.errors import ConfigError
from tutti.transports import Transport

_SIZES = (64, 1024, 16 * 1024, 64 * 1024, 256 * 1024, 2**20, 4 * 2**20, 16 * 2**20)

_LONG_ENOUGH_S = 0.02
"""Messages that take this long show the rate: two such sizes are enough, and larger ones are not tried."""

_PATIENCE_S, _MIN_ROUNDS, _MAX_ROUNDS = 0.1, 2, 15

_MAX_PARTNERS = 8
"""In large worlds each rank is measured with so many others, not with all."""


@dataclass(frozen=True)
class LinkFit:
    """A link between two ranks, fitted to ping-pong times."""

    link: Link
    residual: float
    """Root mean square of the relative differences between what was measured and what the link predicts."""
    points: tuple[tuple[int, float], ...]
    """Bytes of a message, and the median of the seconds it took one way."""

    @classmethod
    def from_points(cls, points: Sequence[tuple[int, float]]) -> "LinkFit":
        """The latency of the smallest message, and the slope between the two largest.

        Not one line through all of them: on real links messages of middle sizes are faster than that, as they travel in
        buffers and bursts, and it is long transfers that the rate should foretell.
        """
        (small, small_s), (large, large_s) = points[-2:]
        per_byte = max((large_s - small_s) / (large - small), 1e-15)
        smallest, smallest_s = points[0]
        latency_s = smallest_s - smallest * per_byte
        link = Link(8 / per_byte, latency_s if latency_s > 0 else smallest_s)  # In a burst its bytes cost nothing.
        errors = [link.seconds(size) / time - 1 for size, time in points]
        return cls(link, statistics.fmean(error**2 for error in errors) ** 0.5, tuple(points))

    def as_dict(self) -> dict[str, Any]:
        return {
            "bits_per_s": self.link.bits_per_s,
            "latency_s": self.link.latency_s,
            "residual": self.residual,
            "points": [list(point) for point in self.points],
        }


@dataclass(frozen=True)
class LinkMeasurement:
    """Links between pairs of ranks, the same on every rank."""

    fits: dict[tuple[int, int], LinkFit]

    @property
    def link(self) -> Link:
        """The slowest of them, which is the one that collectives wait for."""
        return max((fit.link for fit in self.fits.values()), key=lambda link: link.seconds(2**20))

    @property
    def residual(self) -> float:
        """The worst of them."""
        return max(fit.residual for fit in self.fits.values())

    def __str__(self) -> str:
        return f"{self.link}; messages differ from that by {self.residual:.0%}"


def measure_links(transport: Transport) -> LinkMeasurement:
    """Send messages of several sizes to and fro between pairs of ranks. Collective.

    Pairs that have no host in common are measured at the same time. The time of a message is half that of a round trip.
    """
    if transport.size == 1:
        raise ConfigError("a link is between two ranks, and there is only one.")
    found: dict[tuple[int, int], LinkFit] = {}
    for pairs in _rounds(transport.hosts):
        mine = next((pair for pair in pairs if transport.rank in pair), None)
        points = _ping_pong(transport, *mine) if mine is not None else []
        everyones = all_gather_json(points, transport)
        found |= {
            pair: LinkFit.from_points([(size, seconds) for size, seconds in everyones[pair[0]]]) for pair in pairs
        }
    return LinkMeasurement(dict(sorted(found.items())))


def _rounds(hosts: Sequence[str]) -> Iterator[list[tuple[int, int]]]:
    """Pairs of ranks, as in a tournament: each rank meets others, a new one each time; no host is in two at once."""
    size = len(hosts)
    even = size + size % 2
    for number in range(min(even - 1, _MAX_PARTNERS)):
        circle = [0, *((number + other) % (even - 1) + 1 for other in range(even - 1))]
        left = [(min(pair), max(pair)) for pair in zip(circle[: even // 2], reversed(circle[even // 2 :]), strict=True)]
        left = sorted(pair for pair in left if pair[1] < size)
        while left:
            busy: set[str] = set()
            now = []
            for pair in left:
                if busy.isdisjoint(ends := {hosts[rank] for rank in pair}) or len(set(hosts)) == 1:
                    now.append(pair)
                    busy |= ends
            yield now
            left = [pair for pair in left if pair not in now]


def _ping_pong(transport: Transport, one: int, two: int) -> list[tuple[int, float]]:
    """Bytes and seconds of one message, over sizes."""
    first, other = transport.rank == one, two if transport.rank == one else one
    points: list[tuple[int, float]] = []
    device = "cpu" if transport.cluster is None else "meta"  # In virtual time the size is enough.
    for size in _SIZES:
        tensor = torch.zeros(size, dtype=torch.uint8, device=device)
        once_s = _round_trip(transport, tensor, other, first)  # Also opens connections and warms up.
        wanted = max(_MIN_ROUNDS, min(_MAX_ROUNDS, int(_PATIENCE_S / max(once_s, 1e-6))))
        num_rounds = _firsts(transport, wanted, other, first)
        times = [_round_trip(transport, tensor, other, first) for _ in range(num_rounds)]
        points.append((size, statistics.median(times) / 2))
        enough = len(points) >= 2 and points[-2][1] > _LONG_ENOUGH_S
        if _firsts(transport, int(enough), other, first):
            break
    return points


def _round_trip(transport: Transport, tensor: Tensor, other: int, first: bool) -> float:
    start_s = transport.now()
    for sends in (first, not first):
        (transport.isend if sends else transport.irecv)(tensor, other).wait()
    return transport.now() - start_s


def _firsts(transport: Transport, number: int, other: int, first: bool) -> int:
    """The first rank's number, on both."""
    tensor = torch.tensor([number], device="cpu")
    (transport.isend if first else transport.irecv)(tensor, other).wait()
    return int(tensor)
