"""Measurement of the links between ranks: the latency and the rate that cost formulas need.

Pairs of ranks send messages of growing sizes to and fro. A latency and a rate are fitted to the times of each pair, and
the slowest link is taken for the whole network, since collectives wait for it.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.cluster import Link
from tutti.collectives.messages import all_gather_json, broadcast_json
from tutti.errors import ConfigError
from tutti.measurement import largest_rate
from tutti.transports import Transport

_SIZES = (64, 1024, 16 * 1024, 64 * 1024, 256 * 1024, 2**20, 4 * 2**20, 16 * 2**20)
"""Bytes of the messages, in the order in which they are tried."""

_LONG_ENOUGH_S = 0.02
"""A message that takes this long shows the rate. After two such sizes, larger ones are not tried."""

_SIZE_BUDGET_S, _MIN_ROUNDS, _MAX_ROUNDS = 0.1, 3, 15
"""Seconds for the round trips of one size, and the fewest and most of them."""

_EVEN, _MIN_UNEVEN_ROUNDS = 1.1, 7
"""Median of a size's round trips in multiples of the fastest, above which at least so many are made."""

_MAX_PARTNERS = 8
"""Largest number of other ranks that each rank is measured with. In large worlds that is not all of them."""


@dataclass(frozen=True)
class LinkFit:
    """A link between two ranks, fitted to the times of messages to and fro."""

    link: Link
    """The fitted latency and rate."""
    residual: float
    """Root mean square of the relative differences between measured times and those that the link predicts."""
    points: tuple[tuple[int, float], ...]
    """For each size of message, its bytes and the median of the seconds it took one way."""

    @classmethod
    def from_points(cls, points: Sequence[tuple[int, float]], limit: float = 8e15) -> "LinkFit":
        """Fit the latency to the smallest message, and the rate to the slope between the two largest.

        This is not one line through all points. On real links messages of middle sizes are faster than such a line,
        because they fit into buffers and bursts, and it is long transfers that the rate should predict.

        The rate is at most the slope between the quickest message and the largest. If a busy machine delays the second
        largest, the slope between the two largest is too small, by any factor.

        Args:
            points: bytes and seconds of messages, the smallest first.
            limit: bits per second that the link cannot exceed.
        """
        *others, (large, large_s) = points
        smallest, smallest_s = points[0]
        quickest = min(others, key=lambda point: point[1])
        slopes = [(large_s - seconds) / (large - size) for size, seconds in (others[-1], quickest)]
        # Not below the limit's slope: noise can make the larger message the faster one.
        per_byte = max(*slopes, 8 / limit)
        latency_s = smallest_s - smallest * per_byte
        # A smallest message that fits into a burst would make the latency negative.
        link = Link(8 / per_byte, latency_s if latency_s > 0 else smallest_s)
        errors = [link.seconds(size) / time - 1 for size, time in points]
        return cls(link, statistics.fmean(error**2 for error in errors) ** 0.5, tuple(points))

    def as_dict(self) -> dict[str, Any]:
        """Return the fit as JSON can hold it."""
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
    """The fit of each measured pair of ranks, by its lower and its higher rank."""

    @property
    def link(self) -> Link:
        """The slowest link for a mebibyte, which is the one that collectives wait for."""
        return max((fit.link for fit in self.fits.values()), key=lambda link: link.seconds(2**20))

    @property
    def residual(self) -> float:
        """The largest residual of all pairs."""
        return max(fit.residual for fit in self.fits.values())

    def __str__(self) -> str:
        return f"{self.link}; messages differ from that by {self.residual:.0%}"


def measure_links(transport: Transport) -> LinkMeasurement:
    """Measure links by messages of several sizes between pairs of ranks. Collective.

    Pairs that have no host in common are measured at the same time. The time of a message is half that of a round trip.

    Raises:
        ConfigError: there is only one rank.
    """
    if transport.size == 1:
        raise ConfigError("a link is between two ranks, and there is only one.")
    fits: dict[tuple[int, int], LinkFit] = {}
    # Simulated links may have any rate. Of real ranks, the first one's limit is used by all, which fit the same points.
    limits = [] if transport.cluster is not None else [broadcast_json(largest_rate(), transport)]
    for pairs in _rounds(transport.hosts):
        local_pair = next((pair for pair in pairs if transport.rank in pair), None)
        points = _ping_pong(transport, *local_pair) if local_pair is not None else []
        # It also keeps a pair from starting its next round while others still measure.
        points_by_rank = all_gather_json(points, transport)
        fits |= {
            pair: LinkFit.from_points([(size, seconds) for size, seconds in points_by_rank[pair[0]]], *limits)
            for pair in pairs
        }
    return LinkMeasurement(dict(sorted(fits.items())))


def _rounds(hosts: Sequence[str]) -> Iterator[list[tuple[int, int]]]:
    """Yield lists of pairs of ranks that are measured at the same time.

    It is a round-robin tournament by the circle method: rank 0 stays, the others move on by one each time, and opposite
    ranks are paired. A list in which a host would be in two pairs is split, since they would share its link. If all
    ranks are on one host there is no link to share.
    """
    size = len(hosts)
    # With an odd number of ranks a dummy is added; the rank that is paired with it pauses.
    even = size + size % 2
    for number in range(min(even - 1, _MAX_PARTNERS)):
        circle = [0, *((number + other) % (even - 1) + 1 for other in range(even - 1))]
        waiting = [
            (min(pair), max(pair)) for pair in zip(circle[: even // 2], reversed(circle[even // 2 :]), strict=True)
        ]
        waiting = sorted(pair for pair in waiting if pair[1] < size)
        while waiting:
            busy: set[str] = set()
            concurrent = []
            for pair in waiting:
                if busy.isdisjoint(ends := {hosts[rank] for rank in pair}) or len(set(hosts)) == 1:
                    concurrent.append(pair)
                    busy |= ends
            yield concurrent
            waiting = [pair for pair in waiting if pair not in concurrent]


def _ping_pong(transport: Transport, first_rank: int, second_rank: int) -> list[tuple[int, float]]:
    """Return the bytes and the seconds of one message, for each size. Both ranks call it together.

    The first rank decides how many rounds there are and when it is enough, and sends that to the other.
    """
    first = transport.rank == first_rank
    other = second_rank if first else first_rank
    points: list[tuple[int, float]] = []
    device = "cpu" if transport.cluster is None else "meta"  # Virtual time needs sizes alone.
    # In virtual time a message takes as long every time: more rounds would give the same median.
    most = _MAX_ROUNDS if transport.cluster is None else _MIN_ROUNDS
    for size in _SIZES:
        tensor = torch.zeros(size, dtype=torch.uint8, device=device)
        times: list[float] = []  # The first of all opens the connection, and so takes longer.
        while num_rounds := _from_first(transport, _missing_rounds(times, most), other, first):
            times += [_round_trip(transport, tensor, other, first) for _ in range(num_rounds)]
        points.append((size, statistics.median(times) / 2))
        # The fit takes the slope between the last two sizes, so the bytes of both must take long enough.
        enough = len(points) >= 2 and points[-2][1] - points[0][1] > _LONG_ENOUGH_S
        if _from_first(transport, int(enough), other, first):
            break
    return points


def _missing_rounds(times: list[float], most: int) -> int:
    """Return how many round trips to add to those that took `times`."""
    if len(times) < _MIN_ROUNDS:
        return _MIN_ROUNDS - len(times)
    # By the fastest, since one that the machine delayed says little of how many there is time for.
    fastest_s = max(min(times), 1e-6)
    wanted = int(_SIZE_BUDGET_S / fastest_s)
    if statistics.median(times) > _EVEN * fastest_s:
        wanted = max(wanted, _MIN_UNEVEN_ROUNDS)
    return max(0, min(most, wanted) - len(times))


def _round_trip(transport: Transport, tensor: Tensor, other: int, first: bool) -> float:
    """Send `tensor` to and fro, and return the seconds it took."""
    start_s = transport.now()
    for sends in (first, not first):
        (transport.isend if sends else transport.irecv)(tensor, other).wait()
    return transport.now() - start_s


def _from_first(transport: Transport, number: int, other: int, first: bool) -> int:
    """Return the first rank's number on both ranks."""
    tensor = torch.tensor([number], device="cpu")
    (transport.isend if first else transport.irecv)(tensor, other).wait()
    return int(tensor)
