"""Data connections between hosts of a lab: encrypted, and ended when a link is cut."""

import os
import ssl
import time
from contextlib import closing
from datetime import timedelta

import pytest
import torch

import tutti
from support import SECRET
from tutti.collectives import ring
from tutti.coordination import LocalCoordinator
from tutti.errors import RankLost
from tutti.launch.lab import namespaces
from tutti.launch.lab.lab import address, missing
from tutti.transports import Membership, Peer, SocketTransport
from tutti.transports.base import Transport, TransportWrapper

pytestmark = [pytest.mark.xdist_group("labs"), pytest.mark.skipif(missing() is not None, reason=str(missing()))]

NAME = f"sockets-{os.getpid()}"
"""Not the name of another run's lab."""


def sockets_of(transport: Transport) -> SocketTransport:
    while isinstance(transport, TransportWrapper):
        transport = transport.inner
    assert isinstance(transport, SocketTransport)
    return transport


def reduce_and_look() -> tuple[float, dict[int, bool]]:
    """A sum over all ranks, and whether the connection to each other rank is encrypted."""
    with closing(tutti.init()) as world:
        link = sockets_of(world.transport)
        tensor = torch.full((100_000,), float(world.rank))
        ring(tensor, link)
        for other in range(world.size):
            if other != world.rank:
                link.isend(torch.ones(1), other, tag=1).wait()
        for other in range(world.size):
            if other != world.rank:
                link.irecv(torch.ones(1), other, tag=1).wait()
        outgoing = link._messenger.connections.outgoing
        return float(tensor[-1]), {dst: isinstance(out.socket, ssl.SSLSocket) for dst, out in outgoing.items()}


@pytest.mark.parametrize("encrypt", ["1", "0"])
def test_connections_between_hosts_are_encrypted(encrypt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those between two ranks of one host are not; nor any, if the user says so."""
    monkeypatch.setenv("TUTTI_ENCRYPT", encrypt)
    with tutti.lab(2, ranks_per_host=2, name=f"{NAME}-tls") as lab:
        results = tutti.launch(reduce_and_look, on=lab, timeout=timedelta(seconds=30))
    for rank, (total, encrypted) in enumerate(results):
        assert total == 6.0
        others = [other for other in range(4) if other != rank]
        assert encrypted == {other: encrypt == "1" and other // 2 != rank // 2 for other in others}


def send_for_ever(link: SocketTransport) -> None:
    while True:
        link.isend(torch.ones(1_000_000), 1).wait()


WAITS = {
    "a message": lambda link: link.irecv(torch.ones(1), 1).wait(),
    "its message to be taken": send_for_ever,
}

HOW = "timed out|after its host last answered|host1 has acknowledged nothing for 2 s"
"""Both connections with the rank behind the link end, and either may be first."""


@pytest.mark.parametrize("encrypt", [True, False], ids=["encrypted", "in the clear"])
@pytest.mark.parametrize("waits_for", WAITS)
def test_a_cut_link_is_an_error_within_the_patience_and_names_the_rank_behind_it(encrypt: bool, waits_for: str) -> None:
    """The two ranks are threads of this process, in the network namespaces of two hosts: no coordinator helps them."""
    coordinator = LocalCoordinator()
    peers = [Peer.this_process(rank, f"host{rank}", f"host{rank}") for rank in range(3)]

    with tutti.lab(3, name=f"{NAME}-cut") as lab:
        hosts = [host.namespace or "" for host in lab.placement.hosts]

        def transport(rank: int) -> SocketTransport:
            member = coordinator.member(peers[rank].process)
            member.secret, member.patience_s = (SECRET if encrypt else None), 2.0
            membership = Membership(rank, peers, member, "world", timedelta(seconds=40))
            membership.address = address(rank)
            return SocketTransport(membership)

        links = [namespaces.inside(host, lambda rank=rank: transport(rank)) for rank, host in enumerate(hosts)]
        try:
            for rank, host in enumerate(hosts):
                for other in {0, 1, 2} - {rank}:
                    namespaces.inside(host, lambda a=rank, b=other: links[a].isend(torch.ones(1), b).wait())
            for rank, other in [(0, 1), (0, 2), (1, 0), (2, 0)]:
                links[rank].irecv(torch.ones(1), other).wait()
            interface = namespaces.query(*namespaces.prefix(hosts[1]), "ls", "/sys/class/net").split()
            namespaces.query(*namespaces.prefix(hosts[1]), "ip", "link", "set", *(set(interface) - {"lo"}), "down")
            started = time.monotonic()
            with pytest.raises(RankLost, match=f"rank 0: rank 1 is gone: .*({HOW})"):
                WAITS[waits_for](links[0])
            assert time.monotonic() - started < 2 + 3
        finally:
            for link in links:
                link.close()
