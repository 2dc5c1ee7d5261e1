"""What messages pass on their way: network cards, switches, and the latency between."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from math import prod

from tutti.cluster import Cluster, Host
from tutti.errors import NoLink


class Pipe:
    """Something that carries one byte after the other. Whoever comes first goes first.

    That of a switch has lanes, as several cards send through it at once: so many as are each as fast as a card.
    """

    __slots__ = ("free_s", "lanes", "name", "num_bytes", "pending", "seconds_per_byte")

    def __init__(self, name: str, seconds_per_byte: float, num_lanes: int = 1) -> None:
        self.name = name
        self.seconds_per_byte = seconds_per_byte
        """Of a lane."""
        self.lanes = [0.0] * num_lanes if num_lanes > 1 else None
        self.free_s = 0.0
        self.num_bytes = 0
        self.pending = 0
        """Messages that are on their way to it."""

    @property
    def busy_s(self) -> float:
        return self.num_bytes * self.seconds_per_byte / (1 if self.lanes is None else len(self.lanes))

    def occupy(self, until_s: float) -> float:
        """Take the lane that is free first; returns when another is."""
        assert self.lanes is not None
        heapreplace(self.lanes, until_s)
        return self.lanes[0]


@dataclass(frozen=True, slots=True)
class Route:
    """The way from one rank to another."""

    first: Pipe
    rest: tuple[Pipe, ...]
    last: Pipe
    latency_s: float
    direct: bool
    """Whether nothing that is sent later can come before: one pipe is left, and no latency is shorter than this."""


class Network:
    """All pipes of a cluster, made as they are needed."""

    def __init__(self, cluster: Cluster, hosts: Sequence[Host]) -> None:
        self.cluster = cluster
        self.hosts = tuple(hosts)
        """Of each rank."""
        self._unique = {host.name: host for host in hosts}
        self._places = {name: number for number, name in enumerate(self._unique)}
        self._pipes: dict[str, Pipe] = {}
        self._routes: dict[tuple[int, int], Route] = {}
        own = [host.link.latency_s for host in self._unique.values() if host.link is not None]
        self._shortest_s = min([*own, *(link.latency_s for link in cluster.links.values())], default=0.0)

    @property
    def pipes(self) -> list[Pipe]:
        """Those that were used."""
        return [pipe for pipe in self._pipes.values() if pipe.num_bytes]

    def route(self, src: int, dst: int) -> Route:
        """The way between two ranks of the world."""
        route = self._routes.get((src, dst))
        if route is None:
            route = self._routes[src, dst] = self._find(src, dst)
        return route

    def _find(self, src: int, dst: int) -> Route:
        one, two = self.hosts[src], self.hosts[dst]
        if one.name == two.name:
            per_byte, latency_s = self.cluster.within.seconds_per_byte, self.cluster.within.latency_s
            out, into = self._pipe(f"rank {src} out", per_byte), self._pipe(f"rank {dst} in", per_byte)
            return Route(out, (into,), into, latency_s, direct=True)
        link = self.cluster.link_between(one, two)
        if link is None:
            raise NoLink(self._no_link(src, dst))
        middle, latency_s = self._through_tiers(one, two)
        path = self.cluster.links.get((one.name, two.name)) or self.cluster.links.get((two.name, one.name))
        if path is not None:
            middle.append(self._pipe(f"{one.name} to {two.name}", path.seconds_per_byte))
        # A host with no link of its own has a path for each of its peers, and no card that they share.
        first = self._pipe(f"{one.name} out", one.link.seconds_per_byte if one.link is not None else 0.0)
        last = self._pipe(f"{two.name} in", two.link.seconds_per_byte if two.link is not None else 0.0)
        latency_s += link.latency_s
        return Route(first, (*middle, last), last, latency_s, direct=not middle and latency_s <= self._shortest_s)

    def _through_tiers(self, one: Host, two: Host) -> tuple[list[Pipe], float]:
        """Uplinks and downlinks of the switches between two hosts, and the latency they add."""
        up: list[Pipe] = []
        down: list[Pipe] = []
        latency_s, below = 0.0, 1
        for level, tier in enumerate(self.cluster.tiers):
            below *= tier.size
            here, there = self._places[one.name] // below, self._places[two.name] // below
            if here == there:
                break
            up.append(self._uplink(level, here, "up"))
            down.append(self._uplink(level, there, "down"))
            latency_s += tier.latency_s
        return [*up, *reversed(down)], latency_s

    def _uplink(self, level: int, number: int, direction: str) -> Pipe:
        """What a switch carries up or down: the sum of what is below it, less oversubscription.

        Where it is not full, hosts that are not there count as much as those that are.
        """
        name = f"switch {level}.{number} {direction}"
        if name not in self._pipes:
            tiers = self.cluster.tiers[: level + 1]
            below = prod(tier.size for tier in tiers)
            hosts = list(self._unique.values())[number * below : (number + 1) * below]
            rates = [host.link.bits_per_s for host in hosts if host.link is not None]
            share = prod(tier.oversubscription for tier in tiers)
            bits_per_s = sum(rates) / max(1, len(rates)) * below / share
            num_lanes = max(1, int(bits_per_s / max(rates) + 1e-6)) if rates else 1
            self._pipes[name] = Pipe(name, 8 * num_lanes / bits_per_s if rates else 0.0, num_lanes)
        return self._pipes[name]

    def _pipe(self, name: str, seconds_per_byte: float) -> Pipe:
        if name not in self._pipes:
            self._pipes[name] = Pipe(name, seconds_per_byte)
        return self._pipes[name]

    def _no_link(self, src: int, dst: int) -> str:
        hosts = list(self._unique.values())
        pairs = [
            f"{one.name} and {two.name}"
            for number, one in enumerate(hosts)
            for two in hosts[number + 1 :]
            if self.cluster.link_between(one, two) is None
        ]
        return (
            f"rank {src} on {self.hosts[src].name} talks to rank {dst} on {self.hosts[dst].name}, but the cluster "
            f"'{self.cluster.name}' has no link between them. Not joined: {', '.join(pairs)}. Give it a link for every "
            "host, or links for these pairs."
        )
