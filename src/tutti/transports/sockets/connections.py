"""Non-blocking TCP connections of one rank in one channel, moved by the thread that waits.

How it works
------------
Every rank listens on one port (`reception`). To send, a rank opens its own connection to the receiver, and data goes
one way on it: so opening needs no help from the threads that use the channel, and closing loses nothing that was sent.
There is no I/O thread. `step` waits in the selector and calls the handlers of the sockets that are ready; every thread
that waits for a message, and the event loop, call it.

An incoming connection comes from `reception`, which knows its rank. It goes through these states: header, payload,
header, ... `unread` is the memory that is still to be filled in the present state. `_item_complete` moves on to the
next state. `_read` ends after each complete message, because the caller may have been waiting for just that one. What
TLS has decrypted and nobody has read, no selector reports: such connections are in `_buffered`, and the next `step`
reads them.

Flow control: a large message (over `_EAGER_BYTES`) without a receive is *held*. Its connection leaves the selector, so
the kernel's buffers fill and TCP holds its sender back. It is read when a matching receive is posted, or when a receive
is posted that a message behind it may match: then it is kept in memory, to make way. Without that rule two ranks could
wait for each other for ever. For the same reason a message is not held while such a receive is posted. What is kept of
one peer is limited (`ReceiveMatcher.has_room`): a message that goes beyond that is held in any case, until some of what
is kept was received.

A header that no tensor has ends the connection, before anything is allocated for it, and is the failure of its rank.

An outgoing connection has a queue of byte ranges. `write` hands as many to the kernel as it takes; while some are left,
the socket is registered for writing.

State that others read: `ended` (peers whose connection to this rank is over: nothing more comes from them), `broken`
(peers that no longer take what is sent), `failures` (why, where it is known here) and `progressed_at`. Once a peer is
in one of the sets, it stays there.

Threads: handlers run under `guard`. The selector is waited for outside of it, so that a thread under the guard can post
receives and register sockets meanwhile; epoll takes changes into account while it waits.
"""

import selectors
import socket
import ssl
import time
from contextlib import AbstractContextManager, suppress

from tutti.transports.base import ANY
from tutti.transports.membership import Membership
from tutti.transports.sockets.frames import HEADER, header_fault
from tutti.transports.sockets.matching import ReceiveMatcher
from tutti.transports.sockets.messages import IncomingMessage, SocketReceive
from tutti.transports.sockets.reception import Reception
from tutti.transports.sockets.streams import IncomingConnection, OutgoingConnection

_EAGER_BYTES = 256 * 2**10
"""Larger messages are not read before a receive is posted."""
_READS_AT_ONCE = 64
"""Reads from one connection before the others get their turn."""
STALLED_SECONDS = 3.0
"""A connection without progress for this long counts as stalled."""


class SocketConnections:
    """All connections of one rank in one channel, and the selector that watches them."""

    def __init__(
        self,
        membership: Membership,
        matcher: ReceiveMatcher,
        guard: AbstractContextManager[object],
        failures: dict[int, str],
    ) -> None:
        """Listen on the address of this rank; note in `failures` why a connection failed."""
        self.outgoing: dict[int, OutgoingConnection] = {}
        self.incoming: set[IncomingConnection] = set()
        self.held: set[IncomingConnection] = set()
        """Those whose message stays in the network until there is a receive, or room, for it."""
        self.ended: set[int] = set()
        """Peers whose connection to this rank is over."""
        self.broken: set[int] = set()
        """Peers that no longer take what this rank sends."""
        self.failures = failures
        self.progressed_at = [0.0] * (membership.size + 1)
        """Time of the last read or write, by peer. The last entry, which `ANY` indexes, is that of any read."""
        self._membership, self._matcher, self._guard = membership, matcher, guard
        self._buffered: set[IncomingConnection] = set()
        """Connections with bytes that TLS has decrypted and nobody has read."""
        self._selector = selectors.DefaultSelector()
        # A byte sent through this pair ends a `select` that another thread waits in.
        self._wake_receiver, self._wake_sender = socket.socketpair()
        # A full pair has woken the loop already. The thread that runs `step` wakes too, and would wait for itself.
        self._wake_sender.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, self._drain_wakeups)
        self.reception = Reception(membership, self.wake)
        if not self.reception.has_thread:
            self._selector.register(self.reception, selectors.EVENT_READ, self.reception.poll)

    def step(self, seconds: float) -> bool:
        """Handle the sockets that are ready, or become ready within `seconds`; return whether there were any."""
        buffered = bool(self._buffered)
        ready = self._selector.select(0 if buffered else seconds)
        with self._guard:
            for key, _ in ready:
                key.data()
            if self._buffered:
                for incoming in list(self._buffered):
                    self._read(incoming)
            if self.reception.arrivals:
                self._take_arrivals()
        return buffered or bool(ready)

    def wake(self) -> None:
        """End a running `step`, from any thread."""
        with suppress(OSError):
            self._wake_sender.send(b"\0")

    def _drain_wakeups(self) -> None:
        # Bytes beyond these make the selector report it again, which does no harm.
        self._wake_receiver.recv(4096)

    def close(self) -> None:
        """Close all sockets. What the kernel has taken still reaches the peers."""
        # First, since a selector must not watch numbers of files that are closed and may be used again.
        self._selector.close()
        self.reception.close()
        sockets = [self._wake_receiver, self._wake_sender]
        sockets += [incoming.socket for incoming in self.incoming]
        sockets += [outgoing.socket for outgoing in self.outgoing.values()]
        for closing in sockets:
            closing.close()
        self.incoming.clear()
        self.held.clear()
        self.outgoing.clear()

    # Sending

    def add_outgoing(self, dst: int, connection: socket.socket, hello: bytes) -> OutgoingConnection:
        """Use a connected socket for messages to `dst`, after `hello`."""
        outgoing = OutgoingConnection(connection, hello, self._membership.member.patience_s)
        self.outgoing[dst] = outgoing
        return outgoing

    def write(self, dst: int) -> None:
        """Write as much of the queue to `dst` as the kernel takes; watch the socket for the rest."""
        outgoing = self.outgoing[dst]
        try:
            while outgoing.queue:
                outgoing.write()
                self.progressed_at[dst] = time.monotonic()
        except BlockingIOError:
            if not outgoing.watched:
                outgoing.watched = True
                self._selector.register(outgoing.socket, selectors.EVENT_WRITE, lambda: self.write(dst))
            return
        except OSError as error:
            return self._break(dst, f"its connection failed: {error.strerror or error}")
        if outgoing.watched:
            outgoing.watched = False
            self._selector.unregister(outgoing.socket)

    def _break(self, dst: int, reason: str) -> None:
        """Send nothing more to `dst`."""
        outgoing = self.outgoing[dst]
        # The sends in the queue are never finished: their waits end because `dst` is in `broken`.
        self.broken.add(dst)
        self.failures.setdefault(dst, reason)
        outgoing.queue.clear()
        if outgoing.watched:
            outgoing.watched = False
            self._selector.unregister(outgoing.socket)

    # Receiving

    def post_receive(self, receive: SocketReceive, tag: int, first: bool = False) -> None:
        """Match `receive` with a message that is here or held, or queue it, in front of the others if `first`."""
        # Messages that are in memory came before those that are held back in the network.
        if not self._matcher.match_receive(receive, tag):
            self._matcher.post(receive, tag, first)
        for incoming in list(self.held):
            self._release(incoming)

    def check(self) -> None:
        """Do what no event of a socket asks for. To be called now and then, by those that wait."""
        # Also where there is less than the kernel would report: so that slow progress is seen.
        for incoming in self.incoming - self.held:
            self._read(incoming)
        for dst, outgoing in self.outgoing.items():
            if dst not in self.broken and outgoing.is_cut_off():
                host = self._membership.peers[dst].host
                self._break(dst, f"{host} has acknowledged nothing for {self._membership.member.patience_s:g} s")
        # Ended by itself: it handles what is there, and waits for nothing.
        self.reception.poll()
        self._take_arrivals()

    def may_still_arrive(self, peer: int, now: float, lost_at: float) -> bool:
        """Whether data was moving on a connection from `peer` a moment ago. The peer itself was lost at `lost_at`."""
        # A connection that has not proved yet whose it is may be the one from `peer`; later ones cannot be.
        if self.reception.has_stranger_since(now - STALLED_SECONDS, lost_at):
            return True
        self._take_arrivals()
        candidates = [incoming for incoming in self.incoming if peer in (ANY, incoming.src)]
        return any(incoming.progressed_at > now - STALLED_SECONDS for incoming in candidates)

    def held_from(self, peer: int) -> IncomingMessage | None:
        """The message of `peer` that is held, if there is one."""
        return next((incoming.message for incoming in self.held if incoming.src == peer), None)

    def _take_arrivals(self) -> None:
        while self.reception.arrivals:
            incoming = IncomingConnection(*self.reception.arrivals.popleft())
            self.incoming.add(incoming)
            self._watch(incoming)
            self._read(incoming)  # Its first messages may have come with its hello.

    def _watch(self, incoming: IncomingConnection) -> None:
        self._selector.register(incoming.socket, selectors.EVENT_READ, lambda: self._read(incoming))

    def _read(self, incoming: IncomingConnection) -> None:
        if incoming.secure:
            self._buffered.discard(incoming)
        try:
            for _ in range(_READS_AT_ONCE):
                # At most the present item: the next header decides where the bytes after it go.
                count = incoming.socket.recv_into(incoming.unread)
                # End of the stream: the peer has closed its end.
                if count == 0:
                    return self._drop(incoming, incoming.failure())
                incoming.progressed_at = self.progressed_at[incoming.src] = self.progressed_at[ANY] = time.monotonic()
                incoming.unread = incoming.unread[count:]
                if incoming.unread.nbytes:
                    incoming.wake_for_rest()
                elif not (incoming.num_dropped and incoming.drop_more()) and not self._item_complete(incoming):
                    break
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError as error:
            return self._drop(incoming, f"its connection failed: {error.strerror or error}")
        if incoming.secure and incoming.has_buffered and incoming not in self.held:
            self._buffered.add(incoming)

    def _item_complete(self, incoming: IncomingConnection) -> bool:
        """Go on after a header or payload was read; return whether to read on at once."""
        if incoming.message is not None:
            self._matcher.complete(incoming.message)
            incoming.expect_header()
            return False  # The caller may have been waiting for just this message.
        tag, num_bytes, dtype_code = HEADER.unpack(incoming.head)
        if (fault := header_fault(num_bytes, dtype_code)) is not None:
            self._drop(incoming, fault)
            return False
        incoming.message = message = IncomingMessage(incoming.src, tag, num_bytes, dtype_code)
        if not self._find_place(message):
            self.held.add(incoming)
            self._selector.unregister(incoming.socket)
            return False
        incoming.expect_payload(message)
        # An empty message is complete: reading zero bytes would look like the end of the connection.
        return num_bytes > 0 or self._item_complete(incoming)

    def _find_place(self, message: IncomingMessage) -> bool:
        """Decide where to read a message to; return whether there is a place."""
        matcher = self._matcher
        if matcher.match_message(message):
            return True
        # A large one is kept only if a receive is posted that a message behind it could satisfy.
        if (message.num_bytes > _EAGER_BYTES and not matcher.awaits(message.src)) or not matcher.has_room(message):
            return False
        matcher.keep(message)
        return True

    def _release(self, incoming: IncomingConnection) -> None:
        """Read a held message after all, if there is a place for it now."""
        assert incoming.message is not None
        if self._find_place(incoming.message):
            self.held.discard(incoming)
            incoming.expect_payload(incoming.message)
            # Only registers the socket: its data is read by the next `step`, not in the middle of posting a receive.
            self._watch(incoming)
            if not incoming.unread.nbytes:  # An empty message, of which no event tells.
                self._item_complete(incoming)
            if incoming.secure and incoming.has_buffered:
                self._buffered.add(incoming)

    def _drop(self, incoming: IncomingConnection, reason: str | None = None) -> None:
        """Close a connection that the other end has closed, or that failed for a `reason`."""
        # Held connections are not read, so they never get here: this one is registered.
        self._selector.unregister(incoming.socket)
        self.incoming.discard(incoming)
        self._buffered.discard(incoming)
        incoming.socket.close()
        self.ended.add(incoming.src)
        if reason is not None:
            self.failures.setdefault(incoming.src, reason)
        if incoming.message is not None:
            receive = self._matcher.discard(incoming.message)
            if receive is not None:  # It accepts any source: another rank's message may take the place of this one.
                self.post_receive(receive, incoming.message.tag, first=True)
