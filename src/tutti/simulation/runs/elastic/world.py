"""`join`: a simulated rank comes to an elastic world; and its transport in each generation."""

from collections.abc import Callable
from functools import partial

from tutti.coordination.elastic_member import ElasticMember, Generation, WorldLimits
from tutti.coordination.member import Member, confirm
from tutti.simulation.rank import Rank
from tutti.simulation.recovery import CONNECT_S
from tutti.simulation.transport import ChannelRegistry, SimulatedTransport
from tutti.transports import Transport
from tutti.transports.hosts import levelled
from tutti.world import Elasticity, World


class SimulatedConnections:
    """Opens the transports of one rank, generation by generation."""

    def __init__(self, registry: ChannelRegistry, rank: Rank, leaves: Callable[[], None]) -> None:
        """Open transports of `rank`; `leaves` is called when it ends because it was asked to."""
        self._registry, self._rank, self._leaves = registry, rank, leaves
        self._scope: str | None = None

    def connect(self, generation: Generation) -> Transport:
        """Open the transport between the members of a generation. Collective among them."""
        self.disconnect()
        self._scope = generation.scope
        numbers = tuple(each.description.rank for each in generation.members)
        transport = SimulatedTransport(self._registry, self._rank, generation.scope, numbers)
        transport.sleep(CONNECT_S)
        return levelled(transport)

    def alone(self) -> Transport:
        """Return the transport of a rank without others."""
        return SimulatedTransport(self._registry, self._rank, f"rank {self._rank.number} alone", (self._rank.number,))

    def disconnect(self) -> None:
        """End this rank's part in the last generation, whose members wait for it no more."""
        rank, scope, self._scope = self._rank, self._scope, None
        if scope is None or rank.gone is not None:
            return
        # Also those that others have yet to open, who do not know of the loss because of which this rank goes on.
        rank.engine.schedule(max(rank.clock, rank.engine.now), partial(rank.leave_transport, scope))

    def leave(self) -> None:
        """Tell the launcher that this rank ends before the training does, because it was asked to."""
        self._leaves()


def join(
    member: Member, limits: WorldLimits, connections: SimulatedConnections, rank: Rank, requested: Callable[[], int]
) -> World:
    """Come to the elastic world of a run. Called by the rank's thread.

    Args:
        requested: returns the number of the signal that asked the rank to stop; 0 if none did.
    """
    elastic = ElasticMember(member, "elastic", limits)
    generation = elastic.enter({}, ready=False)
    if generation is None:
        transport, number, size = connections.alone(), rank.number, member.known.running[elastic.name] + 1
    else:
        transport = connections.connect(generation)
        number, size = transport.rank, transport.size

    def leave() -> None:
        elastic.depart(finished=False)
        connections.disconnect()

    return World(
        number,
        size,
        0,
        rank.host.name,
        transport,
        leave=leave,
        confirm=partial(confirm, member),
        status=member.table,
        elastic=Elasticity(elastic, connections, requested, is_new=generation is None),
    )
