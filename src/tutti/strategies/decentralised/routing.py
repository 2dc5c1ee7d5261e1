"""The ways of updates: straight to everybody, or from neighbour to neighbour along a graph."""

import logging

from tutti.strategies.decentralised.graphs import Graph, Topology, sized

_log = logging.getLogger("tutti")


class Routes:
    """Along the shortest ways from where an update comes from, so that every rank gets each once."""

    def __init__(self, graph: str | Graph, size: int) -> None:
        self.direct = graph == "all"
        self._graph = None if graph == "all" else _whole(sized(graph, size))
        self._living: frozenset[int] = frozenset()
        self._ways: dict[int, dict[int, list[int]]] = {}
        self._fell_apart = False

    def children(self, me: int, origin: int, living: frozenset[int]) -> list[int]:
        """Whom this rank tells of an update of `origin`, of those who are left."""
        if self._graph is None:
            return sorted(living - {me}) if me == origin else []
        if living != self._living:
            self._living, self._ways = living, {}
        if origin not in self._ways:
            self._ways[origin] = self._tree(origin)
        return self._ways[origin].get(me, [])

    def _tree(self, origin: int) -> dict[int, list[int]]:
        assert self._graph is not None
        ranks = sorted(self._living | {origin})
        around = self._graph.over(ranks)
        found: dict[int, list[int]] = {}
        reached = {origin}
        for child, parent in around.tree(ranks.index(origin)):
            found.setdefault(ranks[parent], []).append(ranks[child])
            reached.add(ranks[child])
        if cut_off := self._living - reached:
            found.setdefault(origin, []).extend(sorted(cut_off))
            if not self._fell_apart:
                self._fell_apart = True
                _log.warning(
                    "the graph of those who are left has fallen apart: rank %s gets updates of rank %d from itself",
                    *(", ".join(map(str, sorted(cut_off))), origin),
                )
        return found


def _whole(topology: Topology) -> Graph:
    """All edges that are ever used."""
    if isinstance(topology, Graph):
        return topology
    edges = {(rank, other) for rank in range(topology.size) for other in topology.neighbours(rank)}
    return Graph(topology.size, tuple(edges), directed=True)


def both_ways(topology: Topology) -> Graph:
    """All edges that are ever used, whichever way."""
    whole = _whole(topology)
    return Graph(whole.size, whole.edges)
