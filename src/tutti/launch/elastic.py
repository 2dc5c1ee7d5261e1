"""A rank of a world that may lose and gain workers: its first generation, and the transport of each later one.

A worker that is there at the start joins generation 0. One that comes later gets a world without others, and joins
when it has built its model (`tutti.distribute`): the others stop for it only then.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from tutti.coordination.elastic_member import ElasticMember, Generation, WorldLimits
from tutti.coordination.link import ConnectedMember
from tutti.coordination.member import Member, confirm
from tutti.errors import ConfigError
from tutti.job.checkpoints.signals import requested
from tutti.launch import mpi
from tutti.launch.connect import connect
from tutti.launch.control_plane import have_host_observed, member_of_run
from tutti.launch.environment import RankEnvironment
from tutti.launch.host import host_name, listen_address
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.transports import Membership, Peer, SingleRankTransport, Transport
from tutti.transports.base import NO_LIMIT
from tutti.world import Elasticity, World

ELASTIC_WORLD = "elastic"
"""The name of the elastic world of a run at its coordinator: there is one."""


def refuse_mpi(kind: str) -> None:
    """Raise `ConfigError` if the transport cannot lose a worker."""
    if mpi.is_mpi(kind):
        raise ConfigError(
            "workers cannot come and go over MPI, which ends all processes with the first. Use sockets or shared "
            "memory, or a fixed number of workers."
        )


def join_elastic(environment: RankEnvironment, limits: tuple[int, int], kind: str, limit: timedelta) -> World:
    """Join the elastic world of a run, or, if it has begun, come to it as a new worker.

    Args:
        limits: the fewest and the most workers.
        kind: the transport, as `tutti.init` takes it.
        limit: how long to wait for the coordinator, and for the fewest workers with which the run begins.
    """
    member = member_of_run(environment, limit)
    found = WorldLimits(*limits, expected=environment.size)
    name = f"{ELASTIC_WORLD}/{environment.attempt}"
    if name in member.known.generations or name in member.known.running:
        raise ConfigError(
            f"rank {environment.rank}: this process has taken part in its run already, and the others do not wait for "
            "it again. Where workers may come and go, call tutti.init() once in each process."
        )
    elastic = ElasticMember(member, name, found)
    connections = _Connections(environment, member, kind)
    generation = elastic.enter({}, ready=False, timeout=limit)
    elasticity = Elasticity(elastic, connections, requested, is_new=generation is None)
    if generation is None:
        # As if it were the last of them, which it will be unless more come or go until then.
        size = member.known.running[elastic.name] + 1
        transport, rank = _alone(member), size - 1
    else:
        transport = connections.connect(generation)
        rank, size = transport.rank, transport.size
    return World(
        rank,
        size,
        environment.local_rank,
        host_name(),
        transport,
        leave=connections.leave_with(elastic),
        tolerate_loss=SupervisorPipe().tolerate_loss,
        confirm=lambda: confirm(member),
        status=member.table,
        elastic=elasticity,
    )


def _alone(member: Member) -> Transport:
    """Return the transport of a worker without others."""
    transport = SingleRankTransport(NO_LIMIT, member.description.rank)
    transport.activity = member.activity  # The coordinator still shows what it does.
    return transport


class _Connections:
    """Opens the transports of this process, generation by generation."""

    def __init__(self, environment: RankEnvironment, member: Member, kind: str) -> None:
        self._environment, self._member, self._kind = environment, member, kind
        self._membership: Membership | None = None

    def connect(self, generation: Generation) -> Transport:
        """Open the transport between the members of a generation. Collective among them."""
        self.disconnect()
        peers = [Peer(each.description.rank, each.description) for each in generation.members]
        have_host_observed(self._member, [peer.process for peer in peers])
        me = self._member.description.id
        rank = next(rank for rank, peer in enumerate(peers) if peer.process.id == me)
        membership = Membership(rank, peers, self._member, generation.scope, NO_LIMIT)
        environment = self._environment
        if isinstance(self._member, ConnectedMember):  # By the interface that faces it, others reach this host as well.
            environment = replace(environment, address=self._member.endpoint.address)
        membership.address = listen_address(environment, membership)
        self._membership = membership
        return _alone(self._member) if membership.size == 1 else connect(membership, self._kind)

    def disconnect(self) -> None:
        """Tell the members of the last generation that this process has ended its part in it."""
        if self._membership is not None:
            self._membership.leave()
            self._membership = None

    def leave(self) -> None:
        """Tell the launcher that this process ends before the training does, because it was asked to."""
        SupervisorPipe().leaves()

    def leave_with(self, elastic: ElasticMember) -> Callable[[], None]:
        """Return what announces that this process takes no more part."""

        def leave() -> None:
            elastic.depart(finished=False)
            self.disconnect()

        return leave
