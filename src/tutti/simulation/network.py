"""The network model: pipes (network cards and switches) that messages pass one after the other, and their latency.

How it works
------------
A route from one rank to another is a list of pipes: the sender's card (outgoing), uplinks and downlinks of the switches
between, a path's own link where the cluster gives one, and the receiver's card (incoming). Ranks of one host have a
pipe each in their memory instead.

A pipe carries one message at a time, first come, first served: `free_s` is when it can take the next. A message
occupies each pipe for its bytes divided by the pipe's rate, starting one latency after it left (see `messages`), so
several flows through one card share its rate by taking turns.

The pipe of a switch carries several messages at once, each at the rate of a card (`slots`), because cards cannot send
faster. `free_s` is then when the first of the slots is free.

A card that is cut (`Pipe.cut`) carries nothing: messages that come to it are held, and go on when it is restored.

A route is `direct` if it has no pipe between the two cards and no latency in the cluster is shorter. A message on it
can then be timed at departure: nothing that departs later can reach the receiver's card earlier.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from math import prod

from tutti.cluster import Cluster, Host
from tutti.cluster.check import pair
from tutti.errors import NoLink


class Pipe:
    """A network card or switch in one direction, which carries messages in the order in which they come.

    A switch has `num_slots`: so many messages travel through it at once, each at the rate of a card.
    """

    __slots__ = ("free_s", "held", "name", "num_bytes", "pending", "seconds_per_byte", "slots")

    def __init__(self, name: str, seconds_per_byte: float, num_slots: int = 1) -> None:
        self.name = name
        self.seconds_per_byte = seconds_per_byte
        """Time that one byte takes in one slot."""
        self.slots = [0.0] * num_slots if num_slots > 1 else None
        """Times at which the slots are free, as a heap; None where there is just one slot."""
        self.free_s = 0.0
        """Time at which it can take the next message."""
        self.num_bytes = 0
        """Bytes carried so far."""
        self.pending = 0
        """Messages that have departed and will pass it, but have not reached it."""
        self.held: list[Callable[[], None]] | None = None
        """While it is cut: what takes it when it carries messages again. None otherwise."""

    def cut(self) -> None:
        """Carry nothing from now on."""
        if self.held is None:
            self.held = []
            self.pending += 1  # No message is timed at its departure meanwhile.

    def restore(self) -> list[Callable[[], None]]:
        """Carry messages again; return what is to be called now, in this order."""
        if self.held is None:
            return []
        held, self.held = self.held, None
        self.pending -= 1
        return held

    @property
    def busy_s(self) -> float:
        """Seconds for which it carried something, over all slots together."""
        return self.num_bytes * self.seconds_per_byte / (1 if self.slots is None else len(self.slots))

    def occupy_slot(self, until_s: float) -> float:
        """Take the slot that is free first until `until_s`; returns when the next one is free."""
        assert self.slots is not None
        heapreplace(self.slots, until_s)
        return self.slots[0]


@dataclass(frozen=True, slots=True)
class Route:
    """The pipes from one rank to another."""

    first: Pipe
    rest: tuple[Pipe, ...]
    last: Pipe
    latency_s: float
    direct: bool
    """Whether nothing that is sent later can arrive before: `rest` is one pipe, and no latency is shorter than this."""


class Network:
    """All pipes and routes of a cluster, made when they are first used."""

    def __init__(self, cluster: Cluster, hosts: Sequence[Host]) -> None:
        self.cluster = cluster
        self.hosts = list(hosts)
        """The host of each rank. Ranks may be added, on hosts that are there."""
        self._unique = {host.name: host for host in hosts}
        # Switches are numbered by hosts in the order of ranks: neighbours in rank share a switch.
        self._host_numbers = {name: number for number, name in enumerate(self._unique)}
        self._pipes: dict[str, Pipe] = {}
        self._routes: dict[tuple[int, int], Route] = {}
        latencies = [host.link.latency_s for host in self._unique.values() if host.link is not None]
        self._shortest_s = min([*latencies, *(link.latency_s for link in cluster.links.values())], default=0.0)

    @property
    def pipes(self) -> list[Pipe]:
        """The pipes that have carried something."""
        return [pipe for pipe in self._pipes.values() if pipe.num_bytes]

    def cards(self, host: str) -> tuple[Pipe, Pipe]:
        """Return the pipes of a host's network card: outgoing and incoming."""
        link = self._unique[host].link
        # A host without a link of its own has a path to each of its peers, and no card that they share: its pipe costs
        # no time.
        per_byte = link.seconds_per_byte if link is not None else 0.0
        return self._pipe(f"{host} out", per_byte), self._pipe(f"{host} in", per_byte)

    def cut(self, host: str) -> None:
        """Carry nothing from or to a host from now on."""
        for card in self.cards(host):
            card.cut()

    def restore(self, host: str) -> None:
        """Carry messages from and to a host again, those first that were held. An action of the engine."""
        for card in self.cards(host):
            for action in card.restore():
                action()

    def route(self, src: int, dst: int) -> Route:
        """Return the route between two ranks of the world. Raises `NoLink` if the cluster does not join their hosts."""
        route = self._routes.get((src, dst))
        if route is None:
            route = self._routes[src, dst] = self._find(src, dst)
        return route

    def _find(self, src: int, dst: int) -> Route:
        src_host, dst_host = self.hosts[src], self.hosts[dst]
        if src_host.name == dst_host.name:
            per_byte, latency_s = self.cluster.within.seconds_per_byte, self.cluster.within.latency_s
            out, into = self._pipe(f"rank {src} out", per_byte), self._pipe(f"rank {dst} in", per_byte)
            # Pipes in memory carry messages within the host only, which all have the same latency.
            return Route(out, (into,), into, latency_s, direct=True)
        link = self.cluster.link_between(src_host, dst_host)
        if link is None:
            raise NoLink(self._no_link(src, dst))
        middle, latency_s = self._through_tiers(src_host, dst_host)
        path = self.cluster.links.get(pair(src_host.name, dst_host.name))
        if path is not None:
            middle.append(self._pipe(f"{src_host.name} to {dst_host.name}", path.seconds_per_byte))
        (first, _), (_, last) = self.cards(src_host.name), self.cards(dst_host.name)
        latency_s += link.latency_s
        return Route(first, (*middle, last), last, latency_s, direct=not middle and latency_s <= self._shortest_s)

    def _through_tiers(self, src_host: Host, dst_host: Host) -> tuple[list[Pipe], float]:
        """Return the uplinks and downlinks of the switches between two hosts, and the latency they add."""
        up: list[Pipe] = []
        down: list[Pipe] = []
        latency_s, below = 0.0, 1
        for level, tier in enumerate(self.cluster.tiers):
            # Hosts below one switch of this level.
            below *= tier.size
            src_switch = self._host_numbers[src_host.name] // below
            dst_switch = self._host_numbers[dst_host.name] // below
            if src_switch == dst_switch:  # The switch that joins both: the message turns here.
                break
            up.append(self._uplink(level, src_switch, "up"))
            down.append(self._uplink(level, dst_switch, "down"))
            latency_s += tier.latency_s
        return [*up, *reversed(down)], latency_s

    def _uplink(self, level: int, number: int, direction: str) -> Pipe:
        """Return the pipe of a switch up or down: the sum of the rates below it, divided by the oversubscription.

        Where a switch has fewer hosts than it could, the missing ones count as much as the mean of the others.
        """
        name = f"switch {level}.{number} {direction}"
        if name not in self._pipes:
            tiers = self.cluster.tiers[: level + 1]
            below = prod(tier.size for tier in tiers)  # Hosts that the switch has room for.
            hosts = list(self._unique.values())[number * below : (number + 1) * below]
            rates = [host.link.bits_per_s for host in hosts if host.link is not None]
            share = prod(tier.oversubscription for tier in tiers)
            bits_per_s = sum(rates) / max(1, len(rates)) * below / share
            # As many cards at full rate as the uplink can carry; the summand absorbs rounding errors of the quotient.
            num_slots = max(1, int(bits_per_s / max(rates) + 1e-6)) if rates else 1
            # Each slot has an equal part of the rate.
            self._pipes[name] = Pipe(name, 8 * num_slots / bits_per_s if rates else 0.0, num_slots)
        return self._pipes[name]

    def _pipe(self, name: str, seconds_per_byte: float) -> Pipe:
        if name not in self._pipes:
            self._pipes[name] = Pipe(name, seconds_per_byte)
        return self._pipes[name]

    def _no_link(self, src: int, dst: int) -> str:
        """Return the error for a message between hosts that nothing joins, with all such pairs of the cluster."""
        hosts = list(self._unique.values())
        pairs = [
            f"{one.name} and {two.name}"
            for number, one in enumerate(hosts)
            for two in hosts[number + 1 :]
            if self.cluster.link_between(one, two) is None
        ]
        return (
            f"rank {src} on {self.hosts[src].name} sends to rank {dst} on {self.hosts[dst].name}, but the cluster "
            f"'{self.cluster.name}' has no link between them. Not joined: {', '.join(pairs)}. Give it a link for every "
            "host, or links for these pairs."
        )
