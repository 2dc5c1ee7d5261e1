"""Measure the links between ranks: what cost formulas need to know of the network."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tutti.cluster import Link
from tutti.collectives.messages import gather_json
from tutti.transports import Transport

SIZES = (64, 1024, 16 * 1024, 64 * 1024, 256 * 1024, 1024 * 1024)

_ROUNDS, _PATIENCE_S = 15, 0.25


@dataclass(frozen=True)
class Fit:
    """A link between two ranks, fitted to ping-pong times."""

    link: Link
    residual: float
    """Root mean square of the relative differences between what was measured and what the link predicts."""
    points: tuple[tuple[int, float], ...]
    """Bytes of a message, and the median of the seconds it took one way."""

    @classmethod
    def of(cls, points: Sequence[tuple[int, float]]) -> "Fit":
        """The latency and rate with the least squared relative error."""
        # Two normal equations, in plain floats: the same bits on every rank.
        ones = sum(1 / time**2 for _, time in points)
        first = sum(size / time**2 for size, time in points)
        second = sum((size / time) ** 2 for size, time in points)
        right = sum(1 / time for _, time in points), sum(size / time for size, time in points)
        determinant = ones * second - first**2
        latency = (second * right[0] - first * right[1]) / determinant
        per_byte = (ones * right[1] - first * right[0]) / determinant
        if latency < 0:  # Too small to be seen in the noise: a line through the origin.
            latency, per_byte = 0.0, right[1] / second
        link = Link(8 / max(per_byte, 1e-15), latency)
        errors = [link.seconds(size) / time - 1 for size, time in points]
        residual = (sum(error**2 for error in errors) / len(errors)) ** 0.5
        return cls(link, residual, tuple((size, time) for size, time in points))

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

    fits: dict[tuple[int, int], Fit]

    @property
    def link(self) -> Link:
        """The slowest of them, which is the one that collectives wait for."""
        return max((fit.link for fit in self.fits.values()), key=lambda link: link.seconds(2**20))

    @property
    def residual(self) -> float:
        return max(fit.residual for fit in self.fits.values())

    def __str__(self) -> str:
        return f"{self.link} (fitted to {100 * self.residual:.0f} %)"


def measure_links(transport: Transport, pairs: Sequence[tuple[int, int]] | None = None) -> LinkMeasurement:
    """Send messages of several sizes to and fro between `pairs` of ranks, one pair after the other. Collective.

    By default each rank and the next one, round the ring. The time of a message is half that of a round trip.
    """
    size = transport.size
    if pairs is None:
        neighbours = {frozenset((rank, (rank + 1) % size)) for rank in range(size)} if size > 1 else ()
        pairs = sorted((min(pair), max(pair)) for pair in neighbours)
    found: dict[tuple[int, int], Fit] = {}
    for one, two in pairs:
        points = _ping_pong(transport, one, two) if transport.rank in (one, two) else []
        found[one, two] = Fit.of(gather_json(points, transport)[one])
    return LinkMeasurement(found)


def _ping_pong(transport: Transport, one: int, two: int) -> list[tuple[int, float]]:
    """(bytes, seconds) of one message; large sizes are left out where small ones are slow already."""
    first, other = transport.rank == one, two if transport.rank == one else one
    points: list[tuple[int, float]] = []
    for size in SIZES:
        tensor = torch.zeros(size, dtype=torch.uint8, device="cpu")
        times = [_round_trip(transport, tensor, other, first)]  # The first also opens connections and warms up.
        seconds = times[0] / 2
        rounds = _agreed(transport, other, first, max(3, min(_ROUNDS, int(_PATIENCE_S / max(times[0], 1e-6)))))
        times = [_round_trip(transport, tensor, other, first) for _ in range(rounds)]
        seconds = statistics.median(times) / 2
        points.append((size, seconds))
        if _agreed(transport, other, first, int(seconds > 4 * _PATIENCE_S)):
            break
    return points


def _round_trip(transport: Transport, tensor: torch.Tensor, other: int, first: bool) -> float:
    start_s = transport.now()
    for sends in (first, not first):
        (transport.isend if sends else transport.irecv)(tensor, other).wait()
    return transport.now() - start_s


def _agreed(transport: Transport, other: int, first: bool, number: int) -> int:
    """The first rank's number, on both."""
    tensor = torch.tensor([number], device="cpu")
    (transport.isend if first else transport.irecv)(tensor, other).wait()
    return int(tensor)
