"""Decentralised strategies: `PeerUpdates` and `Gossip`, and their texts at the command line."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from tutti.codecs import Codec, ErrorFeedback, Threshold, print_codec
from tutti.cost import CommunicationCost, Placement, Profile
from tutti.errors import ConfigError
from tutti.replica import Replica
from tutti.strategies.allreduce import AllReduce
from tutti.strategies.base import Exchange, Strategy
from tutti.strategies.compatibility import ADDED_CHANGES, MIXED_LBFGS, Support
from tutti.strategies.decentralised.cost import gossip_cost, peer_updates_cost
from tutti.strategies.decentralised.exchange import PeerExchange
from tutti.strategies.decentralised.gossip_async import AsyncGossip
from tutti.strategies.decentralised.gossip_sync import SyncGossip
from tutti.strategies.decentralised.graphs import NAMED, Graph, graph_mistakes, read_graph, topology_for
from tutti.strategies.decentralised.peer_updates import PeerUpdatesAlgorithm
from tutti.strategies.rates import SAME_RATE, LearningRateRule, synchronous_start_rule
from tutti.transports import Transport

_ROUTING_GRAPHS = ("all", "ring", "torus", "exponential")
"""Graphs along which `PeerUpdates` can send updates."""


@dataclass(frozen=True)
class PeerUpdates(Strategy):
    """Every rank sends what its steps change to all others, and applies their updates as they arrive (Strom 2015).

    Updates add up, so use about 1/N of one machine's learning rate on N ranks. Changes of running statistics are
    divided by N.

    Args:
        codec: compresses updates; None sends them exactly.
        graph: "all" sends updates directly to all ranks; along "ring", "torus", "exponential" or a `Graph`, ranks pass
            them on.
        inbox: how many updates a rank may be ahead of what every other rank has applied; then it waits.
    """

    codec: Codec | None = field(default_factory=lambda: ErrorFeedback(Threshold()))
    graph: str | Graph = "all"
    inbox: int = 2

    exact_below = 1024
    """With a codec, changes of parameters with fewer elements are still sent exactly."""

    def __post_init__(self) -> None:
        mistakes = []
        if self.codec is not None and not isinstance(self.codec, Codec):
            mistakes.append(f"codec must be an object such as ErrorFeedback(OneBit()), got {self.codec!r}")
        elif self.codec is not None and self.codec.needs_feedback:
            mistakes.append(f"{self.codec!r} loses what it leaves out: wrap it in ErrorFeedback(...)")
        elif self.codec is not None and self.codec.linear:
            mistakes.append(
                f"{self.codec!r} compresses sums over ranks, which peers do not make; use AllReduce with it"
            )
        mistakes += graph_mistakes(self.graph, _ROUTING_GRAPHS)
        if not isinstance(self.inbox, int) or self.inbox < 1:
            mistakes.append(f"inbox must be 1 or more, got {self.inbox!r}")
        if mistakes:
            raise ConfigError(f"PeerUpdates: {'; '.join(mistakes)}.")

    def check_size(self, size: int) -> None:
        if self.graph != "all":
            topology_for(self.graph, size)

    @property
    def exact(self) -> bool:
        return False

    def cost(self, profile: Profile, placement: Placement) -> CommunicationCost:
        return peer_updates_cost(self, profile, placement)

    def candidates(self, profile: Profile, placement: Placement) -> Iterator[Strategy]:
        yield PeerUpdates()
        yield PeerUpdates(None)

    def learning_rate(self, num_workers: int) -> LearningRateRule:
        if num_workers == 1:
            return SAME_RATE
        summed = LearningRateRule(
            1 / num_workers,
            reason=f"The updates of {num_workers} workers are added, which needs 1/{num_workers} of the learning rate "
            "(Strom 2015).",
        )
        return summed & synchronous_start_rule(self.inbox, f"Updates of other workers are up to {self.inbox} steps old")

    @property
    def synchronous(self) -> bool:
        return False

    @property
    def synchronous_start(self) -> Strategy:
        return AllReduce()

    def support(self, technique: str) -> Support:
        own = {"LBFGS": MIXED_LBFGS, "changed parameters": ADDED_CHANGES}
        return own.get(technique) or super().support(technique)

    def attach(self, replica: Replica, transport: Transport) -> Exchange:
        exact_below = 0 if self.codec is None else self.exact_below
        return PeerExchange(replica, transport, "peers", lambda peer: PeerUpdatesAlgorithm(peer, self), exact_below)

    def __str__(self) -> str:
        options = [f"graph={self.graph}"] if self.graph != "all" else []
        options += [f"inbox={self.inbox}"] if self.inbox != type(self).inbox else []
        codec = "" if self.codec is None else f"+{print_codec(self.codec)}"
        return f"peers:{','.join(options)}".rstrip(":") + codec


@dataclass(frozen=True)
class Gossip(Strategy):
    """Every rank trains alone and averages its parameters with neighbours: bytes per rank do not grow with the world.

    Args:
        graph: "exponential" sends to one rank per step, each time twice as far (Assran et al. 2019); "ring"; "torus";
            "random" makes new pairs in every step; or a `Graph`, which uses push-sum weights if it is directed.
        pairs: "sync" mixes with all neighbours in every step, while the next gradient is computed (D-PSGD, Lian et al.
            2017); "async" averages with one neighbour at a time and never waits for a rank to compute (AD-PSGD, Lian et
            al. 2018).
    """

    graph: str | Graph = "exponential"
    pairs: Literal["sync", "async"] = "sync"

    def __post_init__(self) -> None:
        mistakes = graph_mistakes(self.graph, NAMED)
        if self.pairs not in ("sync", "async"):
            mistakes.append(f"pairs must be 'sync' or 'async', got {self.pairs!r}")
        elif self.pairs == "async" and isinstance(self.graph, Graph) and self.graph.directed:
            mistakes.append("pairs average both ways, so pairs='async' needs a graph that is not directed")
        if mistakes:
            raise ConfigError(f"Gossip: {'; '.join(mistakes)}.")

    def check_size(self, size: int) -> None:
        topology_for(self.graph, size)

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

    def support(self, technique: str) -> Support:
        return MIXED_LBFGS if technique == "LBFGS" else super().support(technique)

    def attach(self, replica: Replica, transport: Transport) -> Exchange:
        algorithm = SyncGossip if self.pairs == "sync" else AsyncGossip
        return PeerExchange(replica, transport, "gossip", lambda peer: algorithm(peer, self))

    def __str__(self) -> str:
        options = [f"graph={self.graph}"] if self.graph != type(self).graph else []
        options += ["pairs=async"] if self.pairs == "async" else []
        return f"gossip:{','.join(options)}".rstrip(":")


def read_peers(options: dict[str, str], codec: Codec | None) -> PeerUpdates:
    """Return the strategy that options at the command line describe."""
    _check_keys("peers", options, ("graph", "inbox"))
    graph, inbox = options.get("graph", "all"), options.get("inbox", str(PeerUpdates.inbox))
    # A negative number passes here, so that `PeerUpdates` refuses it together with its other mistakes.
    if not inbox.lstrip("-").isdigit():
        raise ConfigError(f"peers: inbox= takes a whole number, got '{inbox}'.")
    return PeerUpdates(codec, graph if graph in _ROUTING_GRAPHS else read_graph(graph), int(inbox))


def read_gossip(options: dict[str, str], codec: Codec | None) -> Gossip:
    """Return the strategy that options at the command line describe."""
    _check_keys("gossip", options, ("graph", "pairs"))
    if codec is not None:
        raise ConfigError(
            f"gossip averages whole parameters, which '{print_codec(codec)}' cannot compress: it is for updates. Use "
            f"peers+{print_codec(codec)}, or gossip alone."
        )
    pairs = options.get("pairs", Gossip.pairs)
    return Gossip(read_graph(options.get("graph", str(Gossip.graph))), pairs)  # type: ignore[arg-type]


def _check_keys(name: str, options: dict[str, str], keys: tuple[str, ...]) -> None:
    if unknown := options.keys() - set(keys):
        raise ConfigError(f"{name}: '{min(unknown)}' is none of its options: {', '.join(f'{key}=' for key in keys)}.")
