"""Strategies of equals: no server, no barrier, and the others go on when one is lost."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from tutti.codecs import Codec, ErrorFeedback, Threshold, print_codec
from tutti.cost import CommunicationCost, Placement, Profile
from tutti.errors import ConfigError
from tutti.replica import Replica
from tutti.strategies.base import Exchange, Strategy
from tutti.strategies.decentralised.cost import gossip_cost, peer_updates_cost
from tutti.strategies.decentralised.gossip_async import AsyncGossip
from tutti.strategies.decentralised.gossip_sync import SyncGossip
from tutti.strategies.decentralised.graphs import NAMED, Graph, mistakes_of, read_graph, sized
from tutti.strategies.decentralised.peer_updates import PeerUpdatesExchange
from tutti.transports import Transport

_WAYS = ("all", "ring", "torus", "exponential")


@dataclass(frozen=True)
class PeerUpdates(Strategy):
    """Every rank tells all others what its steps change, and applies what it is told when it comes (Strom 2015).

    Updates add up: use about an Nth of one machine's learning rate. Of running statistics each rank adds its part of
    a mean.

    Args:
        codec: how updates are said in fewer bytes; None says them exactly. What is not said yet when the model is saved
            is lost.
        graph: "all" tells everybody directly; along "ring", "torus", "exponential" or a `Graph`, ranks pass updates on.
        inbox: so many updates a rank may be ahead of what every other has applied; then it waits.
    """

    codec: Codec | None = field(default_factory=lambda: ErrorFeedback(Threshold()))
    graph: str | Graph = "all"
    inbox: int = 8

    exact_below = 1024
    """With a codec, parameters of fewer elements are exact all the same."""

    def __post_init__(self) -> None:
        mistakes = []
        if self.codec is not None and not isinstance(self.codec, Codec):
            mistakes.append(f"codec must be an object such as ErrorFeedback(OneBit()), got {self.codec!r}")
        elif self.codec is not None and self.codec.needs_feedback:
            mistakes.append(f"{self.codec!r} needs somewhere to add up: wrap it in ErrorFeedback(...)")
        elif self.codec is not None and self.codec.linear:
            mistakes.append(f"{self.codec!r} works on sums over ranks, which peers do not make; use AllReduce with it")
        mistakes += mistakes_of(self.graph, _WAYS)
        if not isinstance(self.inbox, int) or self.inbox < 1:
            mistakes.append(f"inbox must be 1 or more, got {self.inbox!r}")
        if mistakes:
            raise ConfigError(f"PeerUpdates: {'; '.join(mistakes)}.")

    def check_size(self, size: int) -> None:
        if self.graph != "all":
            sized(self.graph, size)

    @property
    def exact(self) -> bool:
        return False

    def cost(self, profile: Profile, placement: Placement) -> CommunicationCost:
        return peer_updates_cost(self, profile, placement)

    def candidates(self, profile: Profile, placement: Placement) -> Iterator[Strategy]:
        yield PeerUpdates()
        yield PeerUpdates(None)

    @property
    def synchronous(self) -> bool:
        return False

    def attach(self, replica: Replica, transport: Transport) -> Exchange:
        return PeerUpdatesExchange(replica, transport, self)

    def __str__(self) -> str:
        options = [f"graph={self.graph}"] if self.graph != "all" else []
        options += [f"inbox={self.inbox}"] if self.inbox != type(self).inbox else []
        codec = "" if self.codec is None else f"+{print_codec(self.codec)}"
        return f"peers:{','.join(options)}".rstrip(":") + codec


@dataclass(frozen=True)
class Gossip(Strategy):
    """Every rank trains by itself and mixes its parameters with its neighbours', so bytes do not grow with ranks.

    Args:
        graph: "exponential" sends to one other at each step, each time twice as far (Assran et al. 2019); "ring",
            "torus"; "random" pairs anew at every step; or a `Graph`, whose directed edges need push-sum weights.
        pairs: "sync" mixes in step while the next gradient is computed (D-PSGD, Lian et al. 2017); "async" meets one
            neighbour at a time half-way, and waits for nobody (AD-PSGD, Lian et al. 2018).
    """

    graph: str | Graph = "exponential"
    pairs: Literal["sync", "async"] = "sync"

    def __post_init__(self) -> None:
        mistakes = mistakes_of(self.graph, NAMED)
        if self.pairs not in ("sync", "async"):
            mistakes.append(f"pairs must be 'sync' or 'async', got {self.pairs!r}")
        elif self.pairs == "async" and isinstance(self.graph, Graph) and self.graph.directed:
            mistakes.append("pairs meet half-way, so pairs='async' needs a graph that is not directed")
        if mistakes:
            raise ConfigError(f"Gossip: {'; '.join(mistakes)}.")

    def check_size(self, size: int) -> None:
        sized(self.graph, size)

    @property
    def exact(self) -> bool:
        return False

    def cost(self, profile: Profile, placement: Placement) -> CommunicationCost:
        return gossip_cost(self, profile, placement)

    def candidates(self, profile: Profile, placement: Placement) -> Iterator[Strategy]:
        yield Gossip()
        yield Gossip("ring")
        yield Gossip(pairs="async")

    @property
    def synchronous(self) -> bool:
        return False

    def attach(self, replica: Replica, transport: Transport) -> Exchange:
        return (SyncGossip if self.pairs == "sync" else AsyncGossip)(replica, transport, self)

    def __str__(self) -> str:
        options = [f"graph={self.graph}"] if self.graph != type(self).graph else []
        options += ["pairs=async"] if self.pairs == "async" else []
        return f"gossip:{','.join(options)}".rstrip(":")


def read_peers(options: dict[str, str], codec: Codec | None) -> PeerUpdates:
    """The strategy that options at the command line describe."""
    _check_keys("peers", options, ("graph", "inbox"))
    graph, inbox = options.get("graph", "all"), options.get("inbox", str(PeerUpdates.inbox))
    if not inbox.lstrip("-").isdigit():
        raise ConfigError(f"peers: inbox= takes a whole number, got '{inbox}'.")
    return PeerUpdates(codec, graph if graph in _WAYS else read_graph(graph), int(inbox))


def read_gossip(options: dict[str, str], codec: Codec | None) -> Gossip:
    """The strategy that options at the command line describe."""
    _check_keys("gossip", options, ("graph", "pairs"))
    if codec is not None:
        raise ConfigError(
            f"gossip mixes whole parameters, which '{print_codec(codec)}' cannot say: it is for updates. Use "
            f"peers+{print_codec(codec)}, or gossip alone."
        )
    pairs = options.get("pairs", Gossip.pairs)
    return Gossip(read_graph(options.get("graph", str(Gossip.graph))), pairs)  # type: ignore[arg-type]


def _check_keys(name: str, options: dict[str, str], keys: tuple[str, ...]) -> None:
    if unknown := options.keys() - set(keys):
        raise ConfigError(f"{name}: '{min(unknown)}' is none of its options: {', '.join(f'{key}=' for key in keys)}.")
