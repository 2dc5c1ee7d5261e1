"""`Cluster`: hosts, links and speeds, for the simulator and the planner."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from pathlib import Path

from tutti.cluster.check import normalised, pair
from tutti.cluster.compute import Compute, Jitter, Pauses
from tutti.cluster.hosts import Host, Tier, share
from tutti.cluster.link import Link
from tutti.cluster.mistakes import Mistakes, is_count

_LINK = Link("10gbit", "50us")
_WITHIN = Link("100gbit", "2us")
_COMPUTE = Compute()


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines that training runs on. Ranks are placed on hosts in blocks, in the order of the hosts."""

    name: str = "cluster"
    link: Link | None = _LINK
    """The link of every host that has none of its own; None: only `links` join hosts."""
    hosts: int | tuple[Host, ...] | None = None
    """The number of hosts ("host0", ...), or the hosts; None: as many as the workers need."""
    ranks_per_host: int | None = None
    """Ranks on each host. None: 1 where `hosts` is None, else workers are spread evenly. `Host.ranks` overrides it."""
    within: Link = _WITHIN
    """The link between ranks of one host."""
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict, hash=False)
    """Links between two hosts by name, both ways, in addition to their own: a path over the internet, for example."""
    tiers: tuple[Tier, ...] = ()
    """Levels of switches, from the hosts up."""
    compute: Compute = _COMPUTE
    """Computing time of a rank of speed 1."""
    slow: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Factors by rank: a rank with 2.0 takes twice as long to compute."""
    jitter: Jitter | None = None
    """Random variation of each step's computing time. A plain number is the spread of a log-normal one."""
    pauses: Pauses | None = None
    """Random stops of each rank."""
    failures: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Times by rank at which it dies, in seconds or as a text such as "30s"."""
    seed: int = 0
    """Seed of jitter and pauses."""

    def __post_init__(self) -> None:
        mistakes = Mistakes()
        for name, value in normalised(vars(self), mistakes).items():  # The dataclass is frozen.
            object.__setattr__(self, name, value)
        mistakes.report()

    def place(self, workers: int) -> tuple[Host, ...]:
        """Return the host of each rank, by rank, with its link and number of ranks filled in.

        Raises `ConfigError` if the hosts hold fewer ranks, or if `slow` or `failures` name a rank that is not there.
        """
        mistakes = Mistakes()
        mistakes.need(is_count(workers), f"workers must be 1 or more, got {workers!r}")
        mistakes.report()  # At once: the checks below need a number.
        for what, ranks in (("slow", self.slow), ("failures", self.failures)):
            absent = ", ".join(str(rank) for rank in sorted(ranks) if rank >= workers)
            mistakes.need(not absent, f"{what} names rank {absent}, but the ranks are 0 to {workers - 1}")
        hosts = self._hosts(workers)
        # Hosts that say how many ranks they hold are filled first, in their order.
        counts = share(workers, [host.ranks for host in hosts])
        capacity = sum(counts)
        mistakes.need(capacity == workers, f"{workers} ranks are more than the hosts of '{self.name}' hold, {capacity}")
        mistakes.report()
        # Hosts without a rank are dropped; each other one is repeated for every rank that it holds.
        filled = (replace(host, ranks=host.ranks or count) for host, count in zip(hosts, counts, strict=True) if count)
        return tuple(chain.from_iterable(map(repeat, filled, filter(None, counts))))

    def link_between(self, one: Host, two: Host) -> Link | None:
        """Return the link from one host to another, without the latency of tiers; None if they are not joined."""
        # By name, because hosts that were filled in differ from those that were given.
        if one.name == two.name:
            return self.within
        cards = [one.link or self.link, two.link or self.link]
        path = self.links.get(pair(one.name, two.name))
        # A path joins two hosts by itself; without one, both need a card on the common network.
        if path is None and None in cards:
            return None
        links = [link for link in (*cards, path) if link is not None]
        # The slowest part limits the rate. A path's latency is end to end; cards' latencies are not added to it.
        latency_s = path.latency_s if path is not None else max(link.latency_s for link in links)
        return Link(min(link.bits_per_s for link in links), latency_s)

    def speed_of(self, rank: int, host: Host) -> float:
        """Return the speed of a rank, relative to `compute`."""
        return host.speed / self.slow.get(rank, 1.0)

    @classmethod
    def load(cls, text: str | Path) -> "Cluster":
        """Return a preset by its name, or the cluster that a TOML file describes."""
        from tutti.cluster.files import load  # It imports this module.

        return load(text)

    def to_toml(self) -> str:
        """Return the text of a file that `load` reads as this cluster."""
        from tutti.cluster.files import write

        return write(self)

    def __str__(self) -> str:
        lines = [f"{self.name}: {self._hosts_in_words()}", f"within a host: {self.within}"]
        lines += [f"between {one} and {two}: {link}" for (one, two), link in self.links.items()]
        lines += [f"tier {level}: {tier}" for level, tier in enumerate(self.tiers, 1)]
        lines.append(f"compute: {self.compute}")
        uneven = [f"rank {rank} takes {factor:g} times as long" for rank, factor in sorted(self.slow.items())]
        uneven += [str(part) for part in (self.jitter, self.pauses) if part is not None]
        uneven += [f"rank {rank} dies at {seconds:g} s" for rank, seconds in sorted(self.failures.items())]
        lines += [f"uneven: {', '.join(uneven)}"] if uneven else []
        return "\n  ".join(lines)

    def _hosts(self, workers: int) -> list[Host]:
        """Return the hosts that so many workers may need, each with its link and, where known, its number of ranks."""
        ranks = self.ranks_per_host
        if self.hosts is None:
            ranks = ranks or 1
            # Rounded up: the last host may hold fewer ranks.
            number = -(-workers // ranks)
        else:
            # No more hosts than ranks: the others would be empty.
            number = min(self.hosts, workers) if isinstance(self.hosts, int) else 0
        hosts = self.hosts if isinstance(self.hosts, tuple) else [Host(name=f"host{n}") for n in range(number)]
        return [replace(host, ranks=host.ranks or ranks, link=host.link or self.link) for host in hosts]

    def _hosts_in_words(self) -> str:
        """Describe number, ranks and links of the hosts, and each host that has a name of its own."""
        named = self.hosts if isinstance(self.hosts, tuple) else ()
        number = len(self.hosts) if isinstance(self.hosts, tuple) else self.hosts
        words = "as many hosts as it takes" if number is None else _counted(number, "host")
        words += "" if self.ranks_per_host is None else f" of {_counted(self.ranks_per_host, 'rank')}"
        if number != 1:  # A single host has no network.
            words += f", each on {self.link}" if self.link is not None else ", joined only by the links below"
        return words + "".join(f"\n  {_in_words(host, alone=number == 1)}" for host in named)


def _counted(number: int, what: str) -> str:
    """A number with its noun, in the singular for 1."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _in_words(host: Host, alone: bool) -> str:
    """Describe a host, as far as it differs from the rest."""
    parts = [] if host.ranks is None else [_counted(host.ranks, "rank")]
    parts += [] if host.link is None or alone else [f"on {host.link}"]
    parts += [] if host.speed == 1 else [f"speed {host.speed:g}"]
    return f"{host.name}: {', '.join(parts)}" if parts else host.name
