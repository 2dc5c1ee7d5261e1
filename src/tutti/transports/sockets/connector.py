"""Opening a connection to a peer: find its address, connect, do the TLS handshake between hosts, and send the hello.

How it works
------------
`connect` blocks, in these states:

1. waiting for the peer's location, which the peer sets when it opens the channel;
2. connecting. The peer's kernel answers, whatever the peer does;
3. between hosts, the TLS handshake. A thread of the peer that does nothing else answers (`reception`). If the peer
   closes the connection meanwhile, it has too many of them: it is tried again.

All states wait in slices of `WATCH_SECONDS`, and end when the channel is closed here, when the peer is lost, or at the
deadline. The hello, and the messages after it, need no answer.
"""

import select
import socket
import ssl
import time
from dataclasses import dataclass

from tutti.coordination.forks import close_in_children
from tutti.coordination.handshake import tls
from tutti.errors import DeadlineExceeded, RankLost
from tutti.transports.membership import WATCH_SECONDS
from tutti.transports.sockets.connections import STALLED_SECONDS, OutgoingConnection, SocketConnections
from tutti.transports.sockets.frames import make_hello
from tutti.transports.sockets.health import ChannelHealth
from tutti.transports.sockets.reception import needs_tls

_RETRY_S = 0.05


@dataclass(frozen=True)
class _Location:
    """Where a peer listens, and the key for a hello."""

    address: str
    port: int
    key: bytes


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

        Raises `RankLost` if it is gone, refuses, or has another secret; `DeadlineExceeded` if it does not answer.
        """
        membership, location = self._health.membership, self._location_of(dst)
        secret = membership.member.secret
        context = None if secret is None else tls(secret, location.address, server=False)
        connection: socket.socket | None = None
        while connection is None:
            connection = self._reach(dst, location)
            if context is not None and needs_tls(membership, dst, context):
                connection = self._secure(dst, location, connection, context)
        hello = make_hello(location.key, location.port, membership.rank)
        return self._connections.add_outgoing(dst, connection, hello)

    def _reach(self, dst: int, location: _Location) -> socket.socket:
        """Open a TCP connection."""
        # Spawned operations share one thread: an unreachable peer may not stop all of them for the whole timeout.
        deadline = time.monotonic() + (STALLED_SECONDS if self._health.tolerates_loss else self._timeout_s)
        while True:
            self._health.check_not_interrupted()
            try:
                # Short attempts: between them the rank sees that the peer is gone or that this channel was closed.
                return close_in_children(socket.create_connection((location.address, location.port), WATCH_SECONDS))
            except TimeoutError:  # Nothing answers: the host is gone, or a firewall drops the packets.
                self._check(dst, location, deadline)
            except OSError as error:
                raise self._health.connection_error(dst, error) from error

    def _secure(
        self, dst: int, location: _Location, connection: socket.socket, context: ssl.SSLContext
    ) -> socket.socket | None:
        """Do the TLS handshake; None if the peer closed the connection, to be opened again."""
        # Longer than `STALLED_SECONDS`: a peer that is slow must not be taken for lost.
        limit_s = self._health.membership.member.patience_s if self._health.tolerates_loss else self._timeout_s
        deadline = time.monotonic() + limit_s
        connection.setblocking(False)
        try:
            secured = context.wrap_socket(connection, do_handshake_on_connect=False)
            close_in_children(secured)
        except OSError:
            connection.close()
            self._wait_to_retry(dst, location, deadline)
            return None
        try:
            while True:
                self._health.check_not_interrupted()
                try:
                    secured.do_handshake()
                except ssl.SSLWantReadError:
                    ready = select.POLLIN
                except ssl.SSLWantWriteError:
                    ready = select.POLLOUT
                else:
                    return secured
                waiting = select.poll()
                waiting.register(secured, ready)
                if not waiting.poll(1000 * WATCH_SECONDS):
                    self._check(dst, location, deadline)
        except ssl.SSLCertVerificationError as error:
            secured.close()
            reason = f"at {location.address} port {location.port} is a listener with another secret"
            self._connections.failures.setdefault(dst, reason)
            raise self._health.connection_error(dst, error) from error
        except (ssl.SSLError, ConnectionError):
            secured.close()
            self._wait_to_retry(dst, location, deadline)
            return None
        except BaseException:
            secured.close()
            raise

    def _wait_to_retry(self, dst: int, location: _Location, deadline: float) -> None:
        self._health.check_not_interrupted()
        self._check(dst, location, deadline)
        time.sleep(_RETRY_S)

    def _check(self, dst: int, location: _Location, deadline: float) -> None:
        """Raise if `dst` is lost, or does not answer by the deadline."""
        health, membership = self._health, self._health.membership
        if lost := health.channel_membership.lost(dst):
            raise membership.loss_error(lost) from None
        if time.monotonic() > deadline:
            health.abort()
            who = f"rank {membership.peers[dst].rank} at {location.address}"
            raise membership.timeout_error(f"{who} to let a connection in") from None

    @property
    def _timeout_s(self) -> float:
        return self._health.membership.timeout.total_seconds()

    def _location_of(self, dst: int) -> _Location:
        """Where `dst` listens. Waits for it: it may not have opened this channel yet."""
        membership, key = self._health.membership, f"{self._prefix}/at/{dst}"

        def lost() -> dict[int, str]:
            self._health.check_not_interrupted()
            return self._health.channel_membership.lost(dst)

        # Set by that rank when it opened the channel.
        awaited = f"rank {membership.peers[dst].rank} to open a channel"
        address, port, key = membership.await_values([key], awaited, lost, owner=dst)[0].split()
        return _Location(address, int(port), bytes.fromhex(key))
