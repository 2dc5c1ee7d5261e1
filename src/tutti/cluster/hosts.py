"""`Host` and `Tier`: machines of a cluster, and the switches above them."""

from collections.abc import Sequence
from dataclasses import dataclass

from tutti.cluster.link import Link
from tutti.cluster.mistakes import Mistakes, is_count, is_name, is_positive, number
from tutti.cluster.quantities import Duration, format_time, parse_time

LOOPBACK = "127.0.0.1"
"""Address by which processes of one host reach each other, and no other host does."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine of a cluster."""

    name: str
    """Unique within its cluster."""
    ranks: int | None = None
    """Number of ranks that it holds; None: the cluster's `ranks_per_host`."""
    link: Link | None = None
    """Its link to the network; None: the cluster's."""
    speed: float = 1.0
    """Speed of its ranks, relative to the cluster's `compute`."""

    def __post_init__(self) -> None:
        mistakes = Mistakes()
        mistakes.need(is_name(self.name), f"a host's name must be printable text, got {self.name!r}")
        who = f"host {self.name!r}"
        mistakes.need(
            self.ranks is None or is_count(self.ranks), f"{who} must hold 1 rank or more, got ranks={self.ranks!r}"
        )
        mistakes.need(self.link is None or isinstance(self.link, Link), f"{who} needs a Link, got link={self.link!r}")
        mistakes.need(is_positive(self.speed), f"{who} needs a speed above 0 and finite, got {self.speed!r}")
        mistakes.report()


@dataclass(frozen=True, init=False)
class Tier:
    """A level of switches: every `size` hosts, or switches of the level below, share one switch."""

    size: int
    """Hosts, or switches of the level below, under one switch."""
    oversubscription: float
    """The switch's uplink carries the sum of what is below it, divided by this."""
    latency_s: float
    """Added each time a message passes an uplink of this level."""

    def __init__(self, size: int, oversubscription: float = 1.0, latency_s: Duration = 0.0) -> None:
        """Make a level of switches; its latency is a number of seconds or a text such as "5us"."""
        mistakes = Mistakes()
        mistakes.need(is_count(size, 2), f"a tier's size must be 2 or more, got {size!r}")
        mistakes.need(
            1 <= number(oversubscription) < float("inf"),
            f"a tier's oversubscription must be 1 or more (below 1 its uplink would be faster than all below it) and "
            f"finite, got {oversubscription!r}",
        )
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "oversubscription", oversubscription)
        object.__setattr__(self, "latency_s", mistakes.attempt(lambda: parse_time(latency_s), "a tier's latency: "))
        mistakes.report()

    def __str__(self) -> str:
        blocking = f"{self.oversubscription:g}:1 oversubscribed" if self.oversubscription > 1 else "non-blocking"
        latency = f", {format_time(self.latency_s)} more" if self.latency_s else ""
        return f"{self.size} to a switch, {blocking}{latency}"


def share(workers: int, capacities: Sequence[int | None]) -> list[int]:
    """Return how many workers go to each host: hosts that state a number are filled, the others share the rest."""
    counts, remaining = [], workers
    # In order, so that ranks are in blocks: the first ranks on the first host.
    for capacity in capacities:
        counts.append(min(capacity or 0, remaining))
        remaining -= counts[-1]
    free = [index for index, capacity in enumerate(capacities) if capacity is None]
    for position, index in enumerate(free):
        # As evenly as possible: the first hosts take one more where it does not divide.
        counts[index] = remaining // len(free) + (position < remaining % len(free))
    return counts
