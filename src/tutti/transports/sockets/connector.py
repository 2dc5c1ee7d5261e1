"""Opening a connection to a peer: find its address, connect, and send the hello."""

import socket
import time

from tutti.errors import DeadlineExceeded, RankLost
from tutti.transports.membership import WATCH_SECONDS
from tutti.transports.sockets.connections import STALLED_SECONDS, OutgoingConnection, SocketConnections
from tutti.transports.sockets.frames import HELLO
from tutti.transports.sockets.health import ChannelHealth


class Connector:
    """Opens the outgoing connections of one rank in one channel."""

    def __init__(self, health: ChannelHealth, connections: SocketConnections, prefix: str) -> None:
        """Look up peers under `prefix`."""
        self._health, self._connections, self._prefix = health, connections, prefix

    def reach(self, dst: int) -> OutgoingConnection | None:
        """Connect to `dst`; None if that fails and the channel continues without it."""
        if not self._health.tolerates_loss:
            return self.connect(dst)
        broken = self._connections.broken
        if dst in broken:
            return None
        try:
            return self.connect(dst)
        except (RankLost, DeadlineExceeded):
            # Later sends do not try again: each try would block all spawned operations for `STALLED_SECONDS`.
            broken.add(dst)
            return None

    def connect(self, dst: int) -> OutgoingConnection:
        """Connect to `dst`, blocking until it is reached.

        Raises `RankLost` if it is gone or refuses, `DeadlineExceeded` if nothing answers at its address.
        """
        health, membership = self._health, self._health.membership
        address, port, token = self._address_of(dst)
        # Spawned operations share one thread: an unreachable peer may not stop all of them for the whole timeout.
        limit_s = STALLED_SECONDS if health.tolerates_loss else membership.timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        connection = None
        while connection is None:
            health.check_not_interrupted()
            try:
                # Short attempts: between them the rank sees that the peer is gone or that this channel was closed.
                connection = socket.create_connection((address, port), WATCH_SECONDS)
            except TimeoutError:  # Nothing answers: the host is gone, or a firewall drops the packets.
                if lost := health.channel_membership.lost(dst):
                    raise membership.loss_error(lost) from None
                if time.monotonic() > deadline:
                    health.abort()
                    who = f"rank {membership.peers[dst].rank} at {address}"
                    raise membership.timeout_error(f"{who} to let a connection in") from None
            except OSError as error:
                raise health.connection_error(dst, error) from error
        return self._connections.add_outgoing(dst, connection, HELLO.pack(token, membership.rank))

    def _address_of(self, dst: int) -> tuple[str, int, bytes]:
        """Address, port and token of `dst`. Waits for it: it may not have opened this channel yet."""
        membership, key = self._health.membership, f"{self._prefix}/at/{dst}"

        def lost() -> dict[int, str]:
            self._health.check_not_interrupted()
            return self._health.channel_membership.lost(dst)

        # Set by that rank when it opened the channel: where it listens, and the token that this rank must show first.
        awaited = f"rank {membership.peers[dst].rank} to open a channel"
        address, port, token = membership.await_values([key], awaited, lost)[0].split()
        return address, int(port), bytes.fromhex(token)
