"""The listening port of one rank in one channel, and the connections that have not yet proved who they are.

How it works
------------
A connection that was accepted is a *stranger*. It goes through these states:

1. first byte, where connections between hosts are encrypted. It tells TLS from a plain hello, which only ranks of this
   host may send.
2. TLS handshake, in which both ends show certificates made from the job's secret.
3. hello, a fixed number of bytes (`frames`). Its MAC is verified before anything of it is interpreted.
4. arrived: the connection and its rank are in `arrivals`, for the owner of the channel to take.

Refused, by closing the connection: a wrong MAC, a random value that was seen before, a rank that has or had a
connection here (a rank opens one), a rank that the job goes on without.

Strangers are bounded. Each has `_HELLO_S` from its acceptance. At most `_MOST_STRANGERS` are kept: for one more the
oldest is closed. Not within `_GRACE_S` of its acceptance, though: so many connections at once cannot push out a member,
which needs milliseconds, and wait in the kernel's queue instead. Where the process has no file descriptors left, the
oldest stranger is closed, and nothing is accepted for `_PAUSE_S`: the selector would report the listener again at once.

Who moves it: without TLS, the owner of the channel, which watches `fileno` and calls `poll`. A plain member has sent
its hello before anything is accepted, and needs no answer. A TLS handshake needs answers, and a rank must be able to
open a connection while no thread of this one waits for messages. So with TLS a thread of its own calls `poll`. It takes
no lock but `_lock`, under which nothing waits. The thread is ended by `close`. The owner calls `poll` too before it
concludes that nothing comes from a rank: the thread may not have had its turn yet.

A connection is in `arrivals` before it is taken out of the strangers: who looks at the strangers first misses none.
"""

import errno
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from tutti.coordination.forks import close_in_children
from tutti.coordination.handshake import set_timeouts, tls
from tutti.transports.membership import Membership, address_family, is_excluded
from tutti.transports.sockets.frames import HELLO_BYTES, KEY_BYTES, verify_hello

_HELLO_S = 10.0
"""From its acceptance until a stranger must have proved who it is."""
_MOST_STRANGERS = 128
_GRACE_S = 0.25
"""A stranger is not closed for a newer one before it is this old."""
_PAUSE_S = 0.1
"""How long nothing is accepted after it failed for want of a file descriptor or of memory."""
_LOOK_S = 1.0
"""How often the thread looks for strangers that are late, if it knows of none."""
_ACCEPTS_AT_ONCE = 64
_TLS_HANDSHAKE = b"\x16"
"""The first byte of a TLS connection: its record is a handshake."""
_NO_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class _Stranger:
    """A connection that has not proved who it is."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.accepted_at = time.monotonic()
        self.hello = bytearray(HELLO_BYTES)
        self.unread = memoryview(self.hello)
        self.tells_kind = False
        """Whether its first byte has been looked at."""
        self.shaking_hands = False
        """Whether its TLS handshake is not complete yet."""


class Reception:
    """Listens for the ranks of one channel, and lets nobody else in."""

    def __init__(self, membership: Membership, arrived: Callable[[], None]) -> None:
        """Listen on the address of this rank. `arrived` is called, from any thread, after `arrivals` has grown."""
        self._membership, self._arrived = membership, arrived
        self.arrivals: deque[tuple[socket.socket, int]] = deque()
        """Connections of ranks that have proved who they are, until their user takes them."""
        self._strangers: dict[_Stranger, None] = {}  # A dict, because it keeps the order of acceptance.
        self._lock = threading.Lock()
        self._ranks_seen: set[int] = set()
        self._nonces_seen: set[bytes] = set()
        self._key = secrets.token_bytes(KEY_BYTES)
        address, member = membership.address, membership.member
        self._tls = None if member.secret is None else tls(member.secret, address, server=True)
        self._selector = selectors.EpollSelector()
        self._listener = close_in_children(socket.socket(address_family(address)))
        self._listener.bind((address, 0))
        # Many ranks may connect at once, and nothing accepts them while this rank computes.
        self._listener.listen(4096)
        self._listener.setblocking(False)
        self._accepts_from = 0.0
        self._accepting = False
        self._accept_from_now_on()
        self.port: int = self._listener.getsockname()[1]
        self.location = f"{address} {self.port} {self._key.hex()}"
        """Where it listens, and the key for a hello: for members of the job only."""
        self._closed = False
        self._thread: threading.Thread | None = None
        if self._tls is not None:
            name = f"rank {membership.world_rank}, connections"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    @property
    def has_thread(self) -> bool:
        """Whether it moves by itself. Otherwise its owner has to call `poll` when `fileno` is readable."""
        return self._thread is not None

    def fileno(self) -> int:
        """A descriptor that is readable when there is something for `poll` to do."""
        return self._selector.fileno()

    @property
    def num_strangers(self) -> int:
        """Number of connections that have not proved who they are."""
        return len(self._strangers)

    def has_stranger_since(self, earliest: float, latest: float) -> bool:
        """Whether a connection that was accepted between the two times has not proved yet who it is."""
        return any(earliest <= stranger.accepted_at <= latest for stranger in list(self._strangers))

    def poll(self, seconds: float = 0.0) -> None:
        """Move strangers on, waiting up to `seconds` for one that is ready; close those whose time is over."""
        ready = self._selector.select(seconds)
        with self._lock:
            if self._closed:
                return
            before = len(self.arrivals)
            for key, _ in ready:
                # It may have been closed since: by another thread, or to accept a newer one.
                if key.data is None:
                    self._accept()
                elif key.data in self._strangers:
                    self._advance(key.data)
            self._expire(time.monotonic())
            arrived = len(self.arrivals) > before
        if arrived:
            self._arrived()

    def close(self) -> None:
        """Close the port and all connections that were not taken."""
        with self._lock:
            self._closed = True
            # Ends the wait of the thread: the selector reports a listener that is shut down.
            with suppress(OSError):
                if not self._accepting:
                    self._selector.register(self._listener, selectors.EVENT_READ)
                self._listener.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()  # Ended by the lines above: it waits for nothing else.
        self._selector.close()
        for closing in (
            self._listener,
            *(each.socket for each in self._strangers),
            *(each for each, _ in self.arrivals),
        ):
            closing.close()
        self._strangers.clear()
        self.arrivals.clear()

    def _run(self) -> None:
        while not self._closed:
            # Ended by a connection, by `close`, or when it is time to look for strangers that are late. Never without
            # a limit: another thread may have accepted some.
            self.poll(_PAUSE_S if self._strangers or not self._accepting else _LOOK_S)

    def _accept_from_now_on(self) -> None:
        self._accepting = True
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _pause(self, until: float) -> None:
        self._accepting, self._accepts_from = False, until
        self._selector.unregister(self._listener)

    def _expire(self, now: float) -> None:
        """Close strangers whose time is over, and accept again after a pause."""
        for stranger in list(self._strangers):
            if now < stranger.accepted_at + _HELLO_S:
                break  # The others are younger.
            self._close(stranger)
        if not self._accepting and now >= self._accepts_from:
            self._accept_from_now_on()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            oldest = next(iter(self._strangers), None)
            if oldest is not None and len(self._strangers) >= _MOST_STRANGERS:
                due = oldest.accepted_at + _GRACE_S
                if time.monotonic() < due:
                    return self._pause(due)
                self._close(oldest)
            try:
                connection, _ = self._listener.accept()
                close_in_children(connection)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_RESOURCES:
                    if oldest is not None and oldest in self._strangers:
                        self._close(oldest)
                    return self._pause(time.monotonic() + _PAUSE_S)
                continue  # That one went away before it was accepted.
            try:
                connection.setblocking(False)
                set_timeouts(connection, self._membership.member.patience_s)
            except OSError:
                connection.close()
                continue
            stranger = _Stranger(connection)
            self._strangers[stranger] = None
            self._selector.register(connection, selectors.EVENT_READ, stranger)
            # A member's hello is here already: at once, it is a stranger no longer.
            self._advance(stranger)

    def _advance(self, stranger: _Stranger) -> None:
        """Go through the states of a stranger as far as its bytes allow."""
        try:
            if self._tls is not None and not stranger.tells_kind:
                self._look_at_kind(stranger, self._tls)
            if stranger.shaking_hands:
                assert isinstance(stranger.socket, ssl.SSLSocket)
                stranger.socket.do_handshake()
                stranger.shaking_hands = False
            while stranger.unread.nbytes:
                count = stranger.socket.recv_into(stranger.unread)
                if count == 0:
                    return self._close(stranger)
                stranger.unread = stranger.unread[count:]
        except (BlockingIOError, ssl.SSLWantReadError):
            self._selector.modify(stranger.socket, selectors.EVENT_READ, stranger)
        except ssl.SSLWantWriteError:
            self._selector.modify(stranger.socket, selectors.EVENT_WRITE, stranger)
        except (OSError, ValueError):  # It went away, or it has no certificate of this job.
            self._close(stranger)
        else:
            self._let_in(stranger)

    def _look_at_kind(self, stranger: _Stranger, context: ssl.SSLContext) -> None:
        """Decide by its first byte, which stays unread, whether a stranger speaks TLS."""
        first = stranger.socket.recv(1, socket.MSG_PEEK)
        stranger.tells_kind = True
        if first == _TLS_HANDSHAKE:
            self._selector.unregister(stranger.socket)
            secured = context.wrap_socket(stranger.socket, server_side=True, do_handshake_on_connect=False)
            stranger.socket = close_in_children(secured)
            self._selector.register(stranger.socket, selectors.EVENT_READ, stranger)
            stranger.shaking_hands = True

    def _let_in(self, stranger: _Stranger) -> None:
        """Take the connection of a rank over, if its hello proves that it is one."""
        hello = verify_hello(self._key, self.port, bytes(stranger.hello))
        if hello is None or not self._is_welcome(hello.rank, isinstance(stranger.socket, ssl.SSLSocket)):
            return self._close(stranger)
        if hello.nonce in self._nonces_seen or hello.rank in self._ranks_seen:
            return self._close(stranger)
        self._nonces_seen.add(hello.nonce)
        self._ranks_seen.add(hello.rank)
        self._selector.unregister(stranger.socket)
        self.arrivals.append((stranger.socket, hello.rank))
        del self._strangers[stranger]

    def _is_welcome(self, rank: int, encrypted: bool) -> bool:
        """Whether a rank may open such a connection here."""
        membership = self._membership
        if not 0 <= rank < membership.size or rank == membership.rank or is_excluded(membership, rank):
            return False
        return encrypted or not needs_tls(membership, rank, self._tls)

    def _close(self, stranger: _Stranger) -> None:
        del self._strangers[stranger]
        with suppress(KeyError, ValueError):  # It is not registered if it could not be made a TLS connection.
            self._selector.unregister(stranger.socket)
        stranger.socket.close()


def needs_tls(membership: Membership, rank: int, context: ssl.SSLContext | None) -> bool:
    """Whether connections with a rank are encrypted, given the `context` for a listener's address.

    Bytes between two ranks of one host do not leave it, whatever address they go to.
    """
    return context is not None and membership.hosts[rank] != membership.hosts[membership.rank]
