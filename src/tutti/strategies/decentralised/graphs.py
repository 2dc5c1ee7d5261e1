"""Who talks to whom: graphs of ranks, and how much of each other's values neighbours take.

A mixing matrix has a row for every receiver and a column for every sender. Where it is doubly stochastic, mixing again
and again brings everybody to the mean, the faster the larger its spectral gap.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tutti.errors import ConfigError

_DRAWS = 32
"""Of a graph that is drawn anew at every step, for its spectral gap."""


class Topology(ABC):
    """How ranks mix at each clock: frozen and comparable."""

    size: int
    period = 1
    """After so many clocks it mixes as before."""
    directed = False
    """Whether columns of `mixing` add up to 1 and rows do not, so that weights must travel too (push-sum)."""

    @abstractmethod
    def mixing(self, clock: int) -> np.ndarray:
        """What part of each rank's values (a column) each rank (a row) takes at that clock, in float64."""

    @abstractmethod
    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Whom that rank ever sends to, in order."""

    @abstractmethod
    def over(self, ranks: Sequence[int]) -> "Topology":
        """The same kind of graph over these ranks alone, numbered in the order given."""

    def sources(self, rank: int, clock: int) -> dict[int, float]:
        """What part of whose values that rank takes at that clock, its own among them."""
        row = self.mixing(clock)[rank]
        return {int(other): float(row[other]) for other in np.flatnonzero(row)}

    def targets(self, rank: int, clock: int) -> list[int]:
        """Who takes of that rank's values at that clock, but for itself."""
        return [int(other) for other in np.flatnonzero(self.mixing(clock)[:, rank]) if other != rank]

    @property
    def spectral_gap(self) -> float:
        """1 less the factor by which a step brings ranks closer to each other: 1 is at once, 0 never."""
        return _spectral_gap(self)


@dataclass(frozen=True)
class Graph(Topology):
    """A graph of one's own, such as `Graph(3, [(0, 1), (1, 2)])`.

    Neighbours take of each other by Metropolis and Hastings's weights. Where edges are `directed`, each from a sender
    to a receiver, a rank gives equal parts to those it sends to and keeps one, and push-sum weights make up for the
    rest (Assran et al. 2019).
    """

    size: int
    edges: tuple[tuple[int, int], ...]
    directed: bool = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"Graph: size must be 1 or more, got {self.size}.")
        edges = [tuple(map(int, edge)) for edge in self.edges]
        wrong = [edge for edge in edges if len(edge) != 2 or edge[0] == edge[-1] or not _within(edge, self.size)]
        if wrong:
            raise ConfigError(
                f"Graph: edges must join two different ranks of 0 to {self.size - 1}, got {wrong[0]}. "
                "Every rank keeps a part of its own anyway."
            )
        unique = {edge if self.directed else tuple(sorted(edge)) for edge in edges}
        object.__setattr__(self, "edges", tuple(sorted(unique)))

    def mixing(self, clock: int) -> np.ndarray:
        return _static_mixing(self)

    def neighbours(self, rank: int) -> tuple[int, ...]:
        return _neighbours(self)[rank]

    def over(self, ranks: Sequence[int]) -> "Graph":
        places = {rank: place for place, rank in enumerate(ranks)}
        edges = tuple((places[a], places[b]) for a, b in self.edges if a in places and b in places)
        return Graph(len(ranks), edges, self.directed)

    @property
    def parts(self) -> list[list[int]]:
        """Ranks that reach each other, largest part first: one part if the graph is connected."""
        reached = [self._reached(rank) for rank in range(self.size)]
        found: list[list[int]] = []
        for rank in range(self.size):
            if not any(rank in part for part in found):
                found.append([other for other in sorted(reached[rank]) if rank in reached[other]])
        return sorted(found, key=len, reverse=True)

    def _reached(self, start: int) -> set[int]:
        return {start, *(rank for rank, _ in self.tree(start))}

    def tree(self, root: int) -> list[tuple[int, int]]:
        """The ranks that `root` reaches, nearest first, each with the one it is reached from."""
        found, queue, seen = [], deque([root]), {root}
        while queue:
            rank = queue.popleft()
            for other in self.neighbours(rank):
                if other not in seen:
                    seen.add(other)
                    queue.append(other)
                    found.append((other, rank))
        return found

    def __str__(self) -> str:
        between = ">" if self.directed else "-"
        return "/".join(f"{a}{between}{b}" for a, b in self.edges) or "0"

    @classmethod
    def read(cls, text: str) -> "Graph":
        """The graph that prints as this text, such as 0-1/1-2 or, directed, 0>1/1>2/2>0."""
        directed = ">" in text
        try:
            edges = [] if text == "0" else [_edge(part, ">" if directed else "-") for part in text.split("/")]
        except ValueError:
            raise ConfigError(
                f"graph '{text}' is none of {', '.join(NAMED)}, nor edges such as 0-1/1-2 or 0>1/1>2/2>0."
            ) from None
        return cls(1 + max((max(edge) for edge in edges), default=0), tuple(edges), directed)


@dataclass(frozen=True)
class Exponential(Topology):
    """At clock t every rank sends to one other, 2^(t mod log N) further on (Assran et al. 2019)."""

    size: int

    @property
    def period(self) -> int:  # type: ignore[override]
        return max(1, (self.size - 1).bit_length())

    def mixing(self, clock: int) -> np.ndarray:
        return _exponential_mixing(self, clock % self.period)

    def neighbours(self, rank: int) -> tuple[int, ...]:
        hops = [1 << k for k in range(self.period)] if self.size > 1 else []
        return tuple(sorted({(rank + hop) % self.size for hop in hops}))

    def over(self, ranks: Sequence[int]) -> "Exponential":
        return Exponential(len(ranks))


@dataclass(frozen=True)
class Matchings(Topology):
    """At every clock ranks are paired anew, at random but alike on every rank; of an odd number one rests."""

    size: int
    seed: int = 0
    period = _DRAWS

    def mixing(self, clock: int) -> np.ndarray:
        return _matching(self, clock)

    def neighbours(self, rank: int) -> tuple[int, ...]:
        return tuple(other for other in range(self.size) if other != rank)

    def over(self, ranks: Sequence[int]) -> "Matchings":
        return Matchings(len(ranks), self.seed)


def ring(size: int) -> Graph:
    """Everybody between two others."""
    return Graph(size, tuple((rank, (rank + 1) % size) for rank in range(size) if size > 1))


def torus(size: int) -> Graph:
    """A grid, as near to a square as `size` allows, whose edges are joined; a ring if it is prime."""
    rows = next(rows for rows in range(int(size**0.5), 0, -1) if size % rows == 0)
    columns = size // rows
    edges = []
    for rank in range(size):
        row, column = divmod(rank, columns)
        edges += [(rank, row * columns + (column + 1) % columns), (rank, (row + 1) % rows * columns + column)]
    return Graph(size, tuple(edge for edge in edges if edge[0] != edge[1]))


NAMED: dict[str, Callable[[int], Topology]] = {
    "ring": ring,
    "torus": torus,
    "exponential": Exponential,
    "random": Matchings,
}


def read_graph(text: str) -> str | Graph:
    """A graph as it is written at the command line: a name, or edges."""
    return text if text in NAMED else Graph.read(text)


def mistakes_of(graph: object, names: Iterable[str]) -> list[str]:
    """What is wrong with a graph that a strategy was given."""
    if isinstance(graph, Graph):
        parts = graph.parts
        if len(parts) == 1:
            return []
        listed = ", ".join("{" + ", ".join(map(str, part)) + "}" for part in parts)
        ways = " by directed edges, there and back" if graph.directed else ""
        return [f"the graph is not connected{ways}: its parts are {listed}; add edges between them"]
    known = [*names]
    return [] if graph in known else [f"graph must be one of {', '.join(known)}, or a Graph(...), got {graph!r}"]


def sized(graph: str | Graph, size: int) -> Topology:
    """That graph for a world of so many ranks."""
    if isinstance(graph, str):
        return NAMED[graph](size)
    if graph.size != size:
        raise ConfigError(
            f"a graph of {graph.size} ranks in a world of {size}. Make a Graph({size}, ...), start {graph.size} "
            f"workers, or use a graph for any number: {', '.join(NAMED)}."
        )
    return graph


def _within(edge: tuple[int, ...], size: int) -> bool:
    return all(0 <= end < size for end in edge)


def _edge(text: str, between: str) -> tuple[int, int]:
    first, second = text.split(between)
    return int(first), int(second)


@lru_cache(maxsize=256)
def _neighbours(graph: Graph) -> list[tuple[int, ...]]:
    found: list[set[int]] = [set() for _ in range(graph.size)]
    for a, b in graph.edges:
        found[a].add(b)
        if not graph.directed:
            found[b].add(a)
    return [tuple(sorted(others)) for others in found]


@lru_cache(maxsize=64)
def _static_mixing(graph: Graph) -> np.ndarray:
    degrees = [len(graph.neighbours(rank)) for rank in range(graph.size)]
    matrix = np.zeros((graph.size, graph.size))
    for a, b in graph.edges:
        if graph.directed:
            matrix[b, a] = 1 / (1 + degrees[a])
        else:
            matrix[a, b] = matrix[b, a] = 1 / (1 + max(degrees[a], degrees[b]))
    np.fill_diagonal(matrix, 1 - matrix.sum(0))
    return _frozen(matrix)


@lru_cache(maxsize=64)
def _exponential_mixing(graph: Exponential, clock: int) -> np.ndarray:
    ranks = np.arange(graph.size)
    matrix = np.zeros((graph.size, graph.size))
    matrix[ranks, ranks] += 0.5
    matrix[(ranks + (1 << clock)) % graph.size, ranks] += 0.5
    return _frozen(matrix)


@lru_cache(maxsize=64)
def _matching(graph: Matchings, clock: int) -> np.ndarray:
    order = np.random.default_rng((graph.seed, clock)).permutation(graph.size)
    paired = len(order) // 2 * 2
    one, two = order[0:paired:2], order[1:paired:2]
    matrix = np.eye(graph.size)
    for a, b in ((one, two), (two, one)):
        matrix[a, a] = matrix[a, b] = 0.5
    return _frozen(matrix)


@lru_cache(maxsize=64)
def _spectral_gap(graph: Topology) -> float:
    if graph.size == 1:
        return 1.0
    product = np.linalg.multi_dot([np.eye(graph.size)] * 2 + [graph.mixing(t) for t in reversed(range(graph.period))])
    if graph.directed:
        factor = float(np.sort(np.abs(np.linalg.eigvals(product)))[-2])
    else:
        factor = float(np.linalg.norm(product - 1 / graph.size, 2))
    return 1.0 - float(max(factor, 0.0) ** (1 / graph.period)) if factor > 1e-12 else 1.0


def _frozen(matrix: np.ndarray) -> np.ndarray:
    matrix.setflags(write=False)
    return matrix
