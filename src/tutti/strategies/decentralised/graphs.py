"""Topologies of ranks: graphs, and the mixing matrices by which neighbours average their values.

A mixing matrix has a row for every receiver and a column for every sender. Where it is doubly stochastic, repeated
mixing brings all ranks to the mean, the faster the larger its spectral gap.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tutti.errors import ConfigError

_NUM_DRAWS = 32
"""Number of random matchings that the spectral gap of `Matchings` is computed over."""


class Topology(ABC):
    """How ranks mix at each clock: frozen, equal by value."""

    size: int
    period = 1
    """Number of clocks after which the mixing matrices repeat."""
    directed = False
    """Whether only the columns of `mixing` add up to 1, so that weights must be mixed too (push-sum)."""

    @abstractmethod
    def mixing(self, clock: int) -> np.ndarray:
        """Return the mixing matrix of a clock, float64: [receiver, sender] is the factor of the sender's values."""

    @abstractmethod
    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that a rank sends to at any clock, in order."""

    @abstractmethod
    def over(self, ranks: Sequence[int]) -> "Topology":
        """Return the same kind of topology over these ranks only, numbered in the order given."""

    def sources(self, rank: int, clock: int) -> dict[int, float]:
        """Return the factor of each rank's values that a rank mixes at a clock, its own included."""
        row = self.mixing(clock)[rank]
        return {int(other): float(row[other]) for other in np.flatnonzero(row)}

    def targets(self, rank: int, clock: int) -> list[int]:
        """Return the ranks that mix a rank's values at a clock, except itself."""
        return [int(other) for other in np.flatnonzero(self.mixing(clock)[:, rank]) if other != rank]

    @property
    def spectral_gap(self) -> float:
        """1 minus the factor by which one step shrinks the distance to the mean: 1 is at once, 0 never."""
        return _spectral_gap(self)


@dataclass(frozen=True)
class Graph(Topology):
    """A graph given by its edges, such as `Graph(3, [(0, 1), (1, 2)])`.

    Undirected edges have Metropolis-Hastings weights. Where edges are `directed`, each from a sender to a receiver, a
    rank sends equal parts to its receivers and keeps one; push-sum weights correct the result (Assran et al. 2019).

    Args:
        size: number of ranks.
        edges: pairs of ranks; stored sorted and without duplicates.
        directed: whether edges lead from the first rank to the second only.
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
                "An edge from a rank to itself is not needed: every rank keeps a part of its own values."
            )
        # Graphs are equal by value, so the same edges in another order must be stored alike.
        unique = {edge if self.directed else tuple(sorted(edge)) for edge in edges}
        object.__setattr__(self, "edges", tuple(sorted(unique)))

    def mixing(self, clock: int) -> np.ndarray:
        return _static_mixing(self)

    def neighbours(self, rank: int) -> tuple[int, ...]:
        return _neighbours(self)[rank]

    def over(self, ranks: Sequence[int]) -> "Graph":
        indices = {rank: index for index, rank in enumerate(ranks)}
        edges = tuple((indices[a], indices[b]) for a, b in self.edges if a in indices and b in indices)
        return Graph(len(ranks), edges, self.directed)

    @property
    def components(self) -> list[list[int]]:
        """(Strongly) connected components, largest first: one if the graph is connected."""
        # Two ranks are in one component if each reaches the other.
        reached = [self._reached(rank) for rank in range(self.size)]
        components: list[list[int]] = []
        for rank in range(self.size):
            if not any(rank in component for component in components):
                components.append([other for other in sorted(reached[rank]) if rank in reached[other]])
        return sorted(components, key=len, reverse=True)

    def _reached(self, start: int) -> set[int]:
        return {start, *(rank for rank, _ in self.tree(start))}

    def tree(self, root: int) -> list[tuple[int, int]]:
        """Return the breadth-first tree from `root`: pairs of a rank and its parent, nearest first."""
        pairs, queue, seen = [], deque([root]), {root}
        while queue:
            rank = queue.popleft()
            for other in self.neighbours(rank):
                if other not in seen:
                    seen.add(other)
                    queue.append(other)
                    pairs.append((other, rank))
        return pairs

    def __str__(self) -> str:
        separator = ">" if self.directed else "-"
        return "/".join(f"{a}{separator}{b}" for a, b in self.edges) or "0"

    @classmethod
    def read(cls, text: str) -> "Graph":
        """Return the graph that prints as this text, such as 0-1/1-2 or, directed, 0>1/1>2/2>0."""
        directed = ">" in text
        try:
            # A single rank has no edges: its graph prints as "0".
            edges = [] if text == "0" else [_edge(part, ">" if directed else "-") for part in text.split("/")]
        except ValueError:
            raise ConfigError(
                f"graph '{text}' is none of {', '.join(NAMED)}, nor edges such as 0-1/1-2 or 0>1/1>2/2>0."
            ) from None
        return cls(1 + max((max(edge) for edge in edges), default=0), tuple(edges), directed)


@dataclass(frozen=True)
class Exponential(Topology):
    """One-peer exponential graph: at clock t, rank i sends to i + 2^(t mod log2 N) (Assran et al. 2019)."""

    size: int

    @property
    def period(self) -> int:  # type: ignore[override]
        # The ceiling of log2 N, in integers.
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
    """Random matchings: new pairs at every clock, the same on every rank; of an odd number one rank mixes with none."""

    size: int
    seed: int = 0
    # They do not repeat. The spectral gap is taken over this many of them.
    period = _NUM_DRAWS

    def mixing(self, clock: int) -> np.ndarray:
        return _matching(self, clock)

    def neighbours(self, rank: int) -> tuple[int, ...]:
        return tuple(other for other in range(self.size) if other != rank)

    def over(self, ranks: Sequence[int]) -> "Matchings":
        return Matchings(len(ranks), self.seed)


def ring(size: int) -> Graph:
    """Return a ring: every rank has two neighbours."""
    return Graph(size, tuple((rank, (rank + 1) % size) for rank in range(size) if size > 1))


def torus(size: int) -> Graph:
    """Return a torus, as near to a square as `size` allows; a ring if `size` is prime."""
    # The largest divisor up to the square root; 1 if `size` is prime.
    rows = next(rows for rows in range(int(size**0.5), 0, -1) if size % rows == 0)
    columns = size // rows
    edges = []
    for rank in range(size):
        row, column = divmod(rank, columns)
        # To the right and down, both wrapping around; left and up are other ranks' edges.
        edges += [(rank, row * columns + (column + 1) % columns), (rank, (row + 1) % rows * columns + column)]
    return Graph(size, tuple(edge for edge in edges if edge[0] != edge[1]))


NAMED: dict[str, Callable[[int], Topology]] = {
    "ring": ring,
    "torus": torus,
    "exponential": Exponential,
    "random": Matchings,
}


def read_graph(text: str) -> str | Graph:
    """Return the graph that a text at the command line stands for: a name, or edges."""
    return text if text in NAMED else Graph.read(text)


def graph_mistakes(graph: object, names: Iterable[str]) -> list[str]:
    """Return what is wrong with a graph that a strategy was given; `names` are those that it accepts."""
    if isinstance(graph, Graph):
        components = graph.components
        if len(components) == 1:
            return []
        listed = ", ".join("{" + ", ".join(map(str, component)) + "}" for component in components)
        directions = " by directed edges, there and back" if graph.directed else ""
        return [f"the graph is not connected{directions}: its parts are {listed}; add edges between them"]
    known = [*names]
    return [] if graph in known else [f"graph must be one of {', '.join(known)}, or a Graph(...), got {graph!r}"]


def topology_for(graph: str | Graph, size: int) -> Topology:
    """Return the topology of a graph for a world of `size` ranks. Raises `ConfigError` if it has another size."""
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


def _edge(text: str, separator: str) -> tuple[int, int]:
    first, second = text.split(separator)
    return int(first), int(second)


@lru_cache(maxsize=256)
def _neighbours(graph: Graph) -> list[tuple[int, ...]]:
    """Return the ranks that each rank sends to."""
    neighbours: list[set[int]] = [set() for _ in range(graph.size)]
    for a, b in graph.edges:
        neighbours[a].add(b)
        if not graph.directed:
            neighbours[b].add(a)
    return [tuple(sorted(others)) for others in neighbours]


@lru_cache(maxsize=64)
def _static_mixing(graph: Graph) -> np.ndarray:
    """Return the mixing matrix of a graph, which is the same at every clock."""
    degrees = [len(graph.neighbours(rank)) for rank in range(graph.size)]
    matrix = np.zeros((graph.size, graph.size))
    for a, b in graph.edges:
        if graph.directed:
            # A sender's column: equal parts for its receivers and itself. Rows need not add up to 1 (push-sum).
            matrix[b, a] = 1 / (1 + degrees[a])
        else:
            # Metropolis-Hastings: symmetric, and no row adds up to more than 1, so the diagonal is not negative.
            matrix[a, b] = matrix[b, a] = 1 / (1 + max(degrees[a], degrees[b]))
    # Each rank keeps the rest of its column.
    np.fill_diagonal(matrix, 1 - matrix.sum(0))
    return _frozen(matrix)


@lru_cache(maxsize=64)
def _exponential_mixing(graph: Exponential, clock: int) -> np.ndarray:
    """Return the mixing matrix at which every rank keeps half and sends half 2^clock ranks further."""
    ranks = np.arange(graph.size)
    matrix = np.zeros((graph.size, graph.size))
    # Added, not set: for one rank, sender and receiver are the same element.
    matrix[ranks, ranks] += 0.5
    matrix[(ranks + (1 << clock)) % graph.size, ranks] += 0.5
    return _frozen(matrix)


@lru_cache(maxsize=64)
def _matching(graph: Matchings, clock: int) -> np.ndarray:
    """Return the mixing matrix of random pairs, both of which take their mean."""
    # Seeded by the clock: every rank draws the same pairs without a message.
    order = np.random.default_rng((graph.seed, clock)).permutation(graph.size)
    paired = len(order) // 2 * 2
    one, two = order[0:paired:2], order[1:paired:2]
    matrix = np.eye(graph.size)
    for a, b in ((one, two), (two, one)):
        # Both rows of each pair; a rank without a partner keeps its row of the identity.
        matrix[a, a] = matrix[a, b] = 0.5
    return _frozen(matrix)


@lru_cache(maxsize=64)
def _spectral_gap(graph: Topology) -> float:
    """See `Topology.spectral_gap`."""
    if graph.size == 1:
        return 1.0
    # The product over one period, the latest clock leftmost. Two identities, because `multi_dot` needs two matrices.
    mixings = [graph.mixing(t) for t in reversed(range(graph.period))]
    product = np.linalg.multi_dot([np.eye(graph.size)] * 2 + mixings)
    if graph.directed:
        # Not symmetric, so its norm does not bound repeated mixing: the second largest eigenvalue does.
        factor = float(np.sort(np.abs(np.linalg.eigvals(product)))[-2])
    else:
        # Without the mean, to which the matrix 1/N projects: the largest singular value of what is left.
        factor = float(np.linalg.norm(product - 1 / graph.size, 2))
    # Per step: the root of the period's factor. Below 1e-12 it is rounding, and the mean is reached exactly.
    return 1.0 - float(max(factor, 0.0) ** (1 / graph.period)) if factor > 1e-12 else 1.0


def _frozen(matrix: np.ndarray) -> np.ndarray:
    """Make a matrix read-only, because the caches hand the same one to all callers."""
    matrix.setflags(write=False)
    return matrix
