"""Non-blocking TCP connections of one rank in one channel, moved by the thread that waits.

How it works
------------
Every rank listens on one port. To send, a rank opens its own connection to the receiver, and data goes one way on it:
so opening needs no help from the peer's threads, and closing loses nothing that was sent. There is no I/O thread.
`step` waits in the selector and calls the handlers of the sockets that are ready; every thread that waits for a
message, and the event loop, call it.

An incoming connection goes through these states: hello (16 bytes of token and a rank; a wrong token closes it),
header, payload, header, ... `unread` is the memory that is still to be filled in the present state. `_item_complete`
moves on to the next state. `_read` ends after each complete message, because the caller may have been waiting for
just that one.

Flow control: a large message (over `_EAGER_BYTES`) without a receive is *held*. Its connection leaves the selector, so
the kernel's buffers fill and TCP holds its sender back. It is read when a matching receive is posted, or when a receive
is posted that a message behind it may match: then it is kept in memory, to make way. Without that rule two ranks could
wait for each other for ever. For the same reason a message is not held while such a receive is posted.

An outgoing connection has a queue of byte ranges. `write` hands as many to the kernel as it takes; while some are left,
the socket is registered for writing.

State that others read: `ended` (peers whose connection to this rank is over: nothing more comes from them), `broken`
(peers that no longer take what is sent) and `progressed_at`. Once a peer is in one of the sets, it stays there.

Threads: handlers run under `guard`. The selector is waited for outside of it, so that a thread under the guard can post
receives and register sockets meanwhile; epoll takes changes into account while it waits.
"""

import secrets
import selectors
import socket
import time
from collections import deque
from contextlib import AbstractContextManager, suppress
from itertools import islice

from tutti.transports.base import ANY
from tutti.transports.membership import Membership, address_family
from tutti.transports.sockets.frames import HEADER, HELLO
from tutti.transports.sockets.matching import ReceiveMatcher
from tutti.transports.sockets.messages import IncomingMessage, SocketReceive, SocketSend

_EAGER_BYTES = 256 * 2**10
"""Larger messages are not read before a receive is posted."""
_READS_AT_ONCE = 64
"""Reads from one connection before the others get their turn."""
_WAKE_BYTES = 64 * 2**10
"""A slow link delivers a large message one packet at a time. The waiting thread is woken once for this much of it."""
_SHORT_BYTES = 4096
"""Up to this size no wake-up threshold is set: such messages arrive whole."""
_MAX_BUFFERS = 8
"""Byte ranges handed to one `sendmsg` call."""
STALLED_SECONDS = 3.0
"""A connection without progress for this long counts as stalled."""


class IncomingConnection:
    """A connection that a peer opened, and the state of reading from it."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.src = ANY  # Unknown until the hello is read.
        self.progressed_at = time.monotonic()
        self.head = bytearray(HELLO.size)  # The hello, later the present header.
        self.unread = memoryview(self.head)
        self.message: IncomingMessage | None = None  # The one whose payload is being read.
        self.held = False  # Whether `message` stays in the network until a receive is posted.
        self._wakes_at = 1

    def wake_at(self, num_bytes: int) -> None:
        """Let the kernel report the socket as readable only when `num_bytes` are there."""
        num_bytes = num_bytes if num_bytes > _SHORT_BYTES else 1
        if num_bytes != self._wakes_at:
            self._wakes_at = num_bytes
            with suppress(OSError):  # It is only an optimisation.
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def expect_header(self) -> None:
        """Read a header next."""
        self.wake_at(1)
        self.message = None
        self.head = bytearray(HEADER.size)
        self.unread = memoryview(self.head)


class OutgoingConnection:
    """A connection to a peer, and the bytes that are still to be written to it."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.queue: deque[tuple[memoryview, SocketSend | None]] = deque()
        """Byte ranges, each with the send that it finishes."""
        self.watched = False
        """Whether it is registered for writing, because the kernel's buffer was full."""


class SocketConnections:
    """All connections of one rank in one channel, and the selector that watches them."""

    def __init__(
        self,
        membership: Membership,
        matcher: ReceiveMatcher,
        guard: AbstractContextManager[object],
    ) -> None:
        """Listen on the address of this rank."""
        self.outgoing: dict[int, OutgoingConnection] = {}
        self.incoming: set[IncomingConnection] = set()
        self.ended: set[int] = set()
        """Peers whose connection to this rank is over."""
        self.broken: set[int] = set()
        """Peers that no longer take what this rank sends."""
        self.progressed_at = [0.0] * (membership.size + 1)
        """Time of the last read or write, by peer. The last entry, which `ANY` indexes, is that of any read."""
        self._size, self._matcher, self._guard = membership.size, matcher, guard
        # Known only to members of the job. Whoever connects without it is dropped after its hello.
        self._token = secrets.token_bytes(16)
        self._selector = selectors.DefaultSelector()
        # A byte sent through this pair ends a `select` that another thread waits in.
        self._wake_receiver, self._wake_sender = socket.socketpair()
        # A full pair has woken the loop already. The thread that runs `step` wakes too, and would wait for itself.
        self._wake_sender.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, self._drain_wakeups)
        address = membership.address
        self.listener = socket.socket(address_family(address))
        self.listener.bind((address, 0))
        # Many ranks may connect at once, and nothing accepts them while this rank computes.
        self.listener.listen(4096)
        self.listener.setblocking(False)
        self._selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.location = f"{address} {self.listener.getsockname()[1]} {self._token.hex()}"
        """Where it listens, and what peers have to show: for members of the job only."""

    def step(self, seconds: float) -> bool:
        """Handle the sockets that are ready, or become ready within `seconds`; return whether there were any."""
        ready = self._selector.select(seconds)
        with self._guard:
            for key, _ in ready:
                key.data()
        return bool(ready)

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
        sockets = [self.listener, self._wake_receiver, self._wake_sender]
        sockets += [incoming.socket for incoming in self.incoming]
        sockets += [outgoing.socket for outgoing in self.outgoing.values()]
        for closing in sockets:
            closing.close()
        self.incoming.clear()
        self.outgoing.clear()

    # Sending

    def add_outgoing(self, dst: int, connection: socket.socket, hello: bytes) -> OutgoingConnection:
        """Use a connected socket for messages to `dst`, after `hello`."""
        # Otherwise a short message waits until the one before it is acknowledged (Nagle).
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        outgoing = self.outgoing[dst] = OutgoingConnection(connection)
        outgoing.queue.append((memoryview(hello), None))
        return outgoing

    def write(self, dst: int) -> None:
        """Write as much of the queue to `dst` as the kernel takes; watch the socket for the rest."""
        outgoing = self.outgoing[dst]
        try:
            while outgoing.queue:
                # Several ranges in one call, so that a header and its payload leave in one packet.
                sent = outgoing.socket.sendmsg([data for data, _ in islice(outgoing.queue, _MAX_BUFFERS)])
                self.progressed_at[dst] = time.monotonic()
                while sent:
                    data, send = outgoing.queue.popleft()
                    if sent < data.nbytes:  # The kernel's buffer is full: the rest of this range goes first next time.
                        outgoing.queue.appendleft((data[sent:], send))
                        break
                    sent -= data.nbytes
                    if send is not None:
                        send.finished = True
        except BlockingIOError:
            if not outgoing.watched:
                outgoing.watched = True
                self._selector.register(outgoing.socket, selectors.EVENT_WRITE, lambda: self.write(dst))
            return
        except OSError:
            # The sends in the queue are never finished: their waits end because `dst` is in `broken`.
            self.broken.add(dst)
            outgoing.queue.clear()
        if outgoing.watched:
            outgoing.watched = False
            self._selector.unregister(outgoing.socket)

    # Receiving

    def post_receive(self, receive: SocketReceive, tag: int, first: bool = False) -> None:
        """Match `receive` with a message that is here or held, or queue it, in front of the others if `first`."""
        # Messages that are in memory came before those that are held back in the network.
        if self._matcher.match_receive(receive, tag):
            return
        # A held message of another tag is taken into memory, as the wanted one may be behind it on the connection.
        for incoming in [incoming for incoming in self.incoming if incoming.held]:
            if receive.peer in (ANY, incoming.src) and self._release(incoming, receive, tag):
                return
        self._matcher.post(receive, tag, first)

    def read_partial(self) -> None:
        """Read what is there, also where it is less than the kernel would report: so that slow progress is seen."""
        for incoming in [incoming for incoming in self.incoming if not incoming.held]:
            self._read(incoming)

    def may_still_arrive(self, peer: int, now: float) -> bool:
        """Whether data was moving on a connection from `peer` a moment ago. The peer itself may be gone already."""
        # A connection whose hello is not read yet may be the one from `peer`.
        candidates = [incoming for incoming in self.incoming if peer == ANY or incoming.src in (ANY, peer)]
        return any(incoming.progressed_at > now - STALLED_SECONDS for incoming in candidates)

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return  # The peer went away, or there are too many open files: the selector reports it again.
        connection.setblocking(False)
        incoming = IncomingConnection(connection)
        self.incoming.add(incoming)
        self._watch(incoming)

    def _watch(self, incoming: IncomingConnection) -> None:
        self._selector.register(incoming.socket, selectors.EVENT_READ, lambda: self._read(incoming))

    def _read(self, incoming: IncomingConnection) -> None:
        try:
            for _ in range(_READS_AT_ONCE):
                # At most the present item: the next header decides where the bytes after it go.
                count = incoming.socket.recv_into(incoming.unread)
                # End of the stream: the peer has closed its end.
                if count == 0:
                    return self._drop(incoming)
                incoming.progressed_at = self.progressed_at[incoming.src] = self.progressed_at[ANY] = time.monotonic()
                incoming.unread = incoming.unread[count:]
                if incoming.unread.nbytes:
                    # Never more than is left of the message: its sender may wait for a reply before it sends more.
                    incoming.wake_at(min(incoming.unread.nbytes, _WAKE_BYTES))
                elif not self._item_complete(incoming):
                    return
        except BlockingIOError:
            return
        except OSError:
            self._drop(incoming)

    def _item_complete(self, incoming: IncomingConnection) -> bool:
        """Go on after a hello, header or payload was read; return whether to read on at once."""
        if incoming.message is not None:
            self._matcher.complete(incoming.message)
            incoming.expect_header()
            return False  # The caller may have been waiting for just this message.
        if incoming.src == ANY:
            token, src = HELLO.unpack(incoming.head)
            # Nothing of a stranger's bytes is interpreted before the token matches.
            if token != self._token or not 0 <= src < self._size:
                self._drop(incoming)
                return False
            incoming.src = src
            incoming.expect_header()
            return True
        return self._header_complete(incoming, IncomingMessage(incoming.src, *HEADER.unpack(incoming.head)))

    def _header_complete(self, incoming: IncomingConnection, message: IncomingMessage) -> bool:
        """Decide where to read `message` to, or hold it; return whether to read on at once."""
        incoming.message = message
        memory = self._matcher.match_message(message)
        if memory is None:
            # Held only if no receive is posted that a message behind this one could satisfy.
            if message.num_bytes > _EAGER_BYTES and not self._matcher.awaits(message.src):
                incoming.held = True
                self._selector.unregister(incoming.socket)
                return False
            memory = self._matcher.keep(message)
        incoming.unread = memory
        if not memory.nbytes:  # An empty message: reading zero bytes would look like the end of the connection.
            return self._item_complete(incoming)
        incoming.wake_at(min(memory.nbytes, _WAKE_BYTES))
        return True

    def _release(self, incoming: IncomingConnection, receive: SocketReceive, tag: int) -> bool:
        """Read a held message after all; return whether it is for `receive`, or only makes way for what is behind."""
        message = incoming.message
        assert message is not None
        incoming.held = False
        matches = message.tag == tag
        incoming.unread = self._matcher.bind(message, receive) if matches else self._matcher.keep(message)
        # Only registers the socket: its data is read by the next `step`, not in the middle of posting a receive.
        self._watch(incoming)
        return matches

    def _drop(self, incoming: IncomingConnection) -> None:
        """Close a connection whose other end is closed, or did not send the token."""
        # Held connections are not read, so they never get here: this one is registered.
        self._selector.unregister(incoming.socket)
        self.incoming.discard(incoming)
        incoming.socket.close()
        if incoming.src == ANY:
            return
        self.ended.add(incoming.src)
        if incoming.message is not None:
            receive = self._matcher.discard(incoming.message)
            if receive is not None:  # It accepts any source: another rank's message may take the place of this one.
                self.post_receive(receive, incoming.message.tag, first=True)
