"""The columns of the compatibility table: one strategy of every family, with and without a codec, and a mesh.

`support` is what `distribute` asks, the documentation prints, and `tests/promises` tries with two workers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tutti.parallel import Mesh
from tutti.parallel.support import SUPPORT as ON_A_MESH
from tutti.strategies import Strategy, parse
from tutti.strategies.compatibility import WORKS, Support


@dataclass(frozen=True)
class Column:
    """A strategy, as text, and the mesh that it is used on, if any."""

    strategy: str
    mesh: Mesh | None = None

    def support(self, technique: str) -> Support:
        """Return how a technique works here."""
        return support(technique, parse(self.strategy), self.mesh)


COLUMNS: Mapping[str, Column] = {
    "all-reduce": Column("ring"),
    "all-reduce, compressed": Column("onebit:exact_below=1"),
    "Poseidon": Column("poseidon"),
    "local steps": Column("bmuf:every=2"),
    "gossip": Column("gossip"),
    "peers": Column("peers"),
    "peers, compressed": Column("peers+onebit"),
    "servers": Column("ps:bsp"),
    "servers, compressed": Column("ps:bsp+onebit"),
    "stale servers": Column("ps:ssp=1"),
    "asynchronous servers": Column("ps:async"),
    "mesh": Column("ring", Mesh(tensor=2)),
    "mesh, replicated": Column("ring", Mesh(data=2, tensor=2)),
}
"""By the title in the documentation's table."""


def support(technique: str, strategy: Strategy, mesh: Mesh | None) -> Support:
    """Return how a technique of `TECHNIQUES` works under a strategy, between the replicas of a mesh if there is one."""
    under_strategy = strategy.support(technique)
    if mesh is None or mesh.tensor * mesh.pipe == 1:
        return under_strategy
    on_mesh = ON_A_MESH.get(technique, under_strategy)
    # What ranks that split a model do without trouble, its replicas may still have to do in another way.
    return under_strategy if mesh.data > 1 and on_mesh == WORKS else on_mesh
