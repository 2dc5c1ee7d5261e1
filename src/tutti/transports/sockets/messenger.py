"""Tagged messages between ranks over TCP, without a thread: whoever waits, or asks, moves everything along.

Every rank listens on one port. A rank that sends opens a connection of its own to the receiver with the first message,
and data goes one way on it: so opening needs nobody's help, and closing loses nothing that was sent. A large message
that nobody has asked for yet stays in the network, which holds its sender back, until it is asked for or something
behind it is.
"""

import secrets
import selectors
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

from torch import Tensor
from torch.distributed import PrefixStore

from tutti.errors import ConfigError, DeadlineExceeded, RankLost, ReplicaMismatch
from tutti.transports.base import ANY, Work
from tutti.transports.event_loop import Mover
from tutti.transports.membership import WATCH_SECONDS, ChannelMembership, Membership, loss_of
from tutti.transports.sockets.frames import CODES, DTYPES, HEADER, HELLO, FrameHeader, Incoming, Outgoing, raw

_EAGER_BYTES = 256 * 2**10
_READS_AT_ONCE = 64
_WORTH_WAKING_BYTES = 64 * 2**10
"""A slow link brings a large message a frame at a time: whoever waits is woken once for so much of it."""
_STALLED_SECONDS = 3.0


class Sending(Work):
    """A message on its way out; done when the kernel has all of it."""

    deed = "take a message"

    def __init__(self, messenger: "Messenger", dst: int, tensor: Tensor) -> None:
        self.messenger, self.peer = messenger, dst
        self.finished = False
        self._tensor = tensor  # Its memory is being read.

    @property
    def hopeless(self) -> bool:
        return self.peer in self.messenger.broken

    def done(self) -> bool:
        return self.messenger.poll(self)

    def wait(self) -> None:
        self.messenger.wait(self)


class Receiving(Work):
    """A message that is asked for."""

    deed = "send a message"

    def __init__(self, messenger: "Messenger", src: int, tensor: Tensor) -> None:
        self.messenger = messenger
        self.asked_of = self.peer = src  # `peer` is who sends it, as soon as that is known.
        self.tensor = tensor
        self.finished = False
        self.error: Exception | None = None

    @property
    def hopeless(self) -> bool:
        return self.peer in self.messenger.ended

    def done(self) -> bool:
        return self.messenger.poll(self)

    def wait(self) -> None:
        self.messenger.wait(self)
        if self.error is not None:
            raise self.error

    @property
    def source(self) -> int:
        self.wait()
        return self.peer


class Messenger(Mover):
    """All messages of one conversation on one rank. One thread at a time; `interrupt` may come from another."""

    def __init__(self, membership: Membership, address: str, name: str) -> None:
        self.guard = threading.RLock()
        self.membership = membership
        self.rank = membership.rank
        self.conversation = ChannelMembership(membership, name)
        self.on_progress: Callable[[], None] = lambda: None
        """Called when a wait is over, and now and then while one is long but data moves."""
        self.serves = False
        """Whether a loop uses this: who is lost then is one among many."""
        self._name = f"{name}/messages"
        self._store = PrefixStore(self._name, membership.store)
        self._token = secrets.token_bytes(16)
        self._interrupted = False
        self._closed = False
        self._outgoing: dict[int, Outgoing] = {}
        self._incoming: set[Incoming] = set()
        self._asked: defaultdict[int, list[Receiving]] = defaultdict(list)  # By tag, in the order asked.
        self._unasked: defaultdict[int, list[FrameHeader]] = defaultdict(list)  # By tag, in the order of arrival.
        self.ended: set[int] = set()  # Peers whose connection to us is over.
        self.broken: set[int] = set()  # Peers that no longer take what we send.
        self._watched_at = 0.0
        self._moved_at = [0.0] * (
            membership.size + 1
        )  # The last read or write, by peer; the last entry is of ANY read.
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        self._listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._listener.bind((address, 0))
        self._listener.listen(4096)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        port = self._listener.getsockname()[1]
        self._store.set(f"at/{self.rank}", f"{address} {port} {self._token.hex()}")

    def send(self, tensor: Tensor, dst: int, tag: int) -> Sending:
        """Start sending a contiguous CPU tensor."""
        self._check_open()
        work = Sending(self, dst, tensor)
        out = self._outgoing.get(dst) or self._reach(dst)
        if out is None:
            return work
        data = raw(tensor)
        header = memoryview(HEADER.pack(tag, data.nbytes, CODES[tensor.dtype]))
        if data.nbytes:
            out.queue += [(header, None), (data, work)]
        else:
            out.queue.append((header, work))
        if not out.watched:
            self._write(dst)
        return work

    def receive(self, tensor: Tensor, src: int, tag: int) -> Receiving:
        """Start receiving into a contiguous CPU tensor."""
        self._check_open()
        work = Receiving(self, src, tensor)
        self._ask(work, tag)
        return work

    def poll(self, work: Sending | Receiving) -> bool:
        """Move along what can be moved at once; whether waiting for `work` would be over at once."""
        if not (work.finished or self._interrupted):
            self._step(0)
        return work.finished or self._interrupted or work.hopeless

    def wait(self, work: Sending | Receiving) -> None:
        """Move everything along until `work` is finished."""
        patience = self.membership.timeout.total_seconds()
        started = now = time.monotonic()
        watch = now + WATCH_SECONDS
        while not work.finished:
            if self._interrupted:
                raise self.conversation.closed_meanwhile()
            if work.hopeless:
                raise self._loss(work.peer)
            self._step(max(0.0, watch - now))
            now = time.monotonic()
            if work.finished or now < watch:
                continue
            watch = now + min(WATCH_SECONDS, patience)
            self._look_after(work, now)
            if now > max(started, self._moved_at[work.peer]) + patience:
                raise self._overdue(work)
        self.on_progress()  # Many short waits may be long together.

    def idle(self, seconds: float = WATCH_SECONDS) -> None:
        if not self._step(seconds) or time.monotonic() > self._watched_at + WATCH_SECONDS:
            self._watched_at = time.monotonic()
            with self.guard:
                self._watch_all()

    def wake(self) -> None:
        with suppress(OSError):
            self._waker.send(b"\0")

    def over(self, work: Work) -> bool:
        return work.finished or work.hopeless if isinstance(work, Sending | Receiving) else work.done()

    def failure(self, work: Work) -> Exception | None:
        if not isinstance(work, Sending | Receiving):
            return None
        if work.finished:
            return work.error if isinstance(work, Receiving) else None
        who = self.membership.peers[work.peer]
        why = self.membership.how_gone(who) or self.conversation.said_by(work.peer) or "its connection is closed"
        return loss_of(self.membership.me, {who.rank: why})

    def overdue(self, what: str) -> DeadlineExceeded:
        self.conversation.abort()
        return self.membership.overdue(what)

    def interrupt(self) -> None:
        """Make whoever waits stop waiting, from any thread. Idempotent."""
        if not self._interrupted:
            self._interrupted = True
            self.wake()

    def close(self) -> None:
        """Close every connection; what was sent still arrives. Nobody may be waiting. Idempotent."""
        self.interrupt()
        if self._closed:
            return
        self._closed = True
        self.conversation.close()
        self._selector.close()
        sockets = [self._listener, self._wake, self._waker]
        sockets += [incoming.socket for incoming in self._incoming]
        sockets += [outgoing.socket for outgoing in self._outgoing.values()]
        for each in sockets:
            each.close()
        self._incoming.clear()
        self._outgoing.clear()

    def _check_open(self) -> None:
        if self._interrupted:
            raise ConfigError(f"rank {self.membership.me}: this transport is closed.")

    def _step(self, seconds: float) -> bool:
        """Do what is ready, or becomes so within `seconds`; whether there was anything."""
        ready = self._selector.select(seconds)
        with self.guard:
            for key, _ in ready:
                key.data()
        return bool(ready)

    def _woken(self) -> None:
        self._wake.recv(16)

    def _reach(self, dst: int) -> Outgoing | None:
        """A connection to `dst`; None if there is none to be had and others are served all the same."""
        if not self.serves:
            return self._connect(dst)
        if dst in self.broken:
            return None
        try:
            return self._connect(dst)
        except (RankLost, DeadlineExceeded):
            self.broken.add(dst)
            return None

    def _connect(self, dst: int) -> Outgoing:
        address, port, token = self._address_of(dst)
        patience_s = _STALLED_SECONDS if self.serves else self.membership.timeout.total_seconds()
        deadline = time.monotonic() + patience_s
        connection = None
        while connection is None:
            if self._interrupted:
                raise self.conversation.closed_meanwhile()
            try:
                connection = socket.create_connection((address, port), WATCH_SECONDS)
            except TimeoutError:  # Nothing answers there: a host that vanished, or a wall between.
                if lost := self.conversation.lost(dst):
                    raise self.membership.loss(lost) from None
                if time.monotonic() > deadline:
                    self._give_up()
                    who = f"rank {self.membership.peers[dst].rank} at {address}"
                    raise self.membership.overdue(f"{who} to let a connection in") from None
            except OSError as error:
                raise self._loss(dst, error) from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        out = self._outgoing[dst] = Outgoing(connection)
        out.queue.append((memoryview(HELLO.pack(token, self.rank)), None))
        return out

    def _address_of(self, dst: int) -> tuple[str, int, bytes]:
        """Where `dst` listens, and what to say there. It may not have come to this conversation yet."""
        key = f"{self._name}/at/{dst}"

        def lost() -> dict[int, str]:
            if self._interrupted:
                raise self.conversation.closed_meanwhile()
            return self.conversation.lost(dst)

        self.membership.await_keys([key], f"rank {self.membership.peers[dst].rank} to open a conversation", lost)
        address, port, token = self.membership.store.get(key).decode().split()
        return address, int(port), bytes.fromhex(token)

    def _write(self, dst: int) -> None:
        """Write as much as the kernel takes, and be woken for the rest."""
        out = self._outgoing[dst]
        try:
            while out.queue:
                sent = out.socket.sendmsg([data for data, _ in islice(out.queue, 8)])
                self._moved_at[dst] = time.monotonic()
                while sent:
                    data, work = out.queue.popleft()
                    if sent < data.nbytes:
                        out.queue.appendleft((data[sent:], work))
                        break
                    sent -= data.nbytes
                    if work is not None:
                        work.finished = True
        except BlockingIOError:
            if not out.watched:
                out.watched = True
                self._selector.register(out.socket, selectors.EVENT_WRITE, lambda: self._write(dst))
            return
        except OSError:
            self.broken.add(dst)
            out.queue.clear()
        if out.watched:
            out.watched = False
            self._selector.unregister(out.socket)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # It went away before it was let in, or there are too many: it is asked for again.
        connection.setblocking(False)
        incoming = Incoming(connection)
        self._incoming.add(incoming)
        self._watch_incoming(incoming)

    def _watch_incoming(self, incoming: Incoming) -> None:
        self._selector.register(incoming.socket, selectors.EVENT_READ, lambda: self._read(incoming))

    def _read(self, incoming: Incoming) -> None:
        try:
            for _ in range(_READS_AT_ONCE):
                count = incoming.socket.recv_into(incoming.rest)
                if count == 0:
                    return self._drop(incoming)
                incoming.moved_at = self._moved_at[incoming.src] = self._moved_at[ANY] = time.monotonic()
                incoming.rest = incoming.rest[count:]
                if incoming.rest.nbytes:
                    incoming.wake_at(min(incoming.rest.nbytes, _WORTH_WAKING_BYTES))
                elif not self._turn(incoming):
                    return
        except BlockingIOError:
            return
        except OSError:
            self._drop(incoming)

    def _turn(self, incoming: Incoming) -> bool:
        """What was expected has been read: go on to what follows. Whether to read on at once."""
        if incoming.message is not None:
            self._complete(incoming.message)
            incoming.expect_header()
            return False  # Whoever waits may have been waiting for just this.
        if incoming.src == ANY:
            token, src = HELLO.unpack(incoming.head)
            if token != self._token or not 0 <= src < self.membership.size:
                self._drop(incoming)
                return False
            incoming.src = src
            incoming.expect_header()
            return True
        return self._announced(incoming, FrameHeader(incoming.src, *HEADER.unpack(incoming.head)))

    def _announced(self, incoming: Incoming, message: FrameHeader) -> bool:
        incoming.message = message
        for work in self._asked[message.tag]:
            if work.peer in (ANY, message.src):
                self._asked[message.tag].remove(work)
                incoming.rest = self._bind(message, work)
                break
        else:
            if message.num_bytes > _EAGER_BYTES and not self._expects(message.src):
                incoming.held = True
                self._selector.unregister(incoming.socket)
                return False
            incoming.rest = self._keep(message)
        if not incoming.rest.nbytes:
            return self._turn(incoming)
        incoming.wake_at(min(incoming.rest.nbytes, _WORTH_WAKING_BYTES))
        return True

    def _expects(self, src: int) -> bool:
        """Whether something that may be behind a message of `src` is asked for."""
        return any(work.peer in (ANY, src) for works in self._asked.values() for work in works)

    def _bind(self, message: FrameHeader, work: Receiving) -> memoryview:
        """Have `message` read into the memory of `work`, if it fits."""
        message.receiving = work
        work.peer = message.src
        tensor = work.tensor
        if (message.num_bytes, message.code) == (tensor.nbytes, CODES[tensor.dtype]):
            return raw(tensor)
        got, sender = DTYPES[message.code], self.membership.peers[message.src].rank
        work.error = ReplicaMismatch(
            f"rank {self.membership.me}: expected {tensor.numel()} × {tensor.dtype} from rank {sender}, which sent "
            f"{message.num_bytes // got.itemsize} × {got}. All ranks must call with tensors of one length and dtype."
        )
        message.buffer = bytearray(message.num_bytes)  # Read, and dropped.
        return memoryview(message.buffer)

    def _keep(self, message: FrameHeader) -> memoryview:
        message.buffer = bytearray(message.num_bytes)
        self._unasked[message.tag].append(message)
        return memoryview(message.buffer)

    def _let_in(self, incoming: Incoming, work: Receiving, tag: int) -> bool:
        """Have a held message read: whether it is for `work`. If not, it only makes way for what is behind it."""
        message = incoming.message
        assert message is not None
        incoming.held = False
        wanted = message.tag == tag
        incoming.rest = self._bind(message, work) if wanted else self._keep(message)
        self._watch_incoming(incoming)
        return wanted

    def _give(self, message: FrameHeader, work: Receiving) -> None:
        """Hand a message that was kept, or is being read, to who asks for it now."""
        kept = message.buffer
        self._bind(message, work)
        message.buffer = kept
        if message.complete:
            self._complete(message)

    def _complete(self, message: FrameHeader) -> None:
        message.complete = True
        work = message.receiving
        if work is None:
            return  # Kept until it is asked for.
        if message.buffer is not None and work.error is None:
            raw(work.tensor)[:] = message.buffer
        work.finished = True

    def _drop(self, incoming: Incoming) -> None:
        """The other end is closed, or is not one of us."""
        self._selector.unregister(incoming.socket)
        self._incoming.discard(incoming)
        incoming.socket.close()
        if incoming.src == ANY:
            return
        self.ended.add(incoming.src)
        message = incoming.message
        if message is None:
            return
        # It will never be whole.
        if message in self._unasked[message.tag]:
            self._unasked[message.tag].remove(message)
        work = message.receiving
        if work is not None and work.asked_of == ANY:
            work.peer = ANY
            self._ask(work, message.tag, first=True)

    def _ask(self, work: Receiving, tag: int, first: bool = False) -> None:
        """Find the message that `work` should have, or have it looked for in what is to come."""
        for message in self._unasked[tag]:
            if work.peer in (ANY, message.src):
                self._unasked[tag].remove(message)
                self._give(message, work)
                return
        for incoming in [it for it in self._incoming if it.held and work.peer in (ANY, it.src)]:
            if self._let_in(incoming, work, tag):
                return
        self._asked[tag].insert(0 if first else len(self._asked[tag]), work)

    def _look_after(self, work: Sending | Receiving, now: float) -> None:
        """Raise if whom this rank waits for will never answer."""
        peer = work.peer
        for incoming in [it for it in self._incoming if not it.held]:
            self._read(incoming)  # Perhaps not enough to be woken for, but it moves.
        if self._moved_at[peer] > now - 2 * WATCH_SECONDS:
            self.on_progress()
        if isinstance(work, Receiving) and self._may_still_come(peer, now):
            return
        if peer != ANY:
            lost = self.conversation.lost(peer)
        else:
            others = [self.conversation.lost(rank) for rank in range(self.membership.size) if rank != self.rank]
            lost = {who: why for each in others for who, why in each.items()} if all(others) else {}
        # It may have connected, sent and left a moment ago: then its message is here by now.
        if lost and not (self._step(0) or work.finished):
            self.conversation.abort()
            raise self.membership.loss(lost)

    def _watch_all(self) -> None:
        """Look whether those who are asked for something are still there, also those who never connected."""
        now = time.monotonic()
        for incoming in [it for it in self._incoming if not it.held]:
            self._read(incoming)  # Perhaps not enough to be woken for, but it moves.
        asked = {work.peer for works in self._asked.values() for work in works} - self.ended - {ANY}
        for peer in asked:
            if not self._may_still_come(peer, now) and self.conversation.lost(peer) and not self._step(0):
                self.ended.add(peer)

    def _may_still_come(self, peer: int, now: float) -> bool:
        """Whether there is a connection on which data was moving a moment ago: its sender may be gone already."""
        from_it = [incoming for incoming in self._incoming if peer == ANY or incoming.src in (ANY, peer)]
        return any(incoming.moved_at > now - _STALLED_SECONDS for incoming in from_it)

    def _overdue(self, work: Sending | Receiving) -> Exception:
        self.conversation.abort()
        who = "any rank" if work.peer == ANY else f"rank {self.membership.peers[work.peer].rank}"
        return self.membership.overdue(f"{who} to {work.deed}")

    def _loss(self, peer: int, cause: OSError | None = None) -> Exception:
        """Why `peer` cannot be reached any more."""
        deadline = time.monotonic() + 1.0
        # A dying peer's connections close a moment before its process is seen to have ended.
        while not (lost := self.conversation.lost(peer)) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._give_up()
        return self.membership.loss(lost, str(cause or "connection closed"))

    def _give_up(self) -> None:
        """Tell the others that this rank goes no further here, unless it serves, and goes on without whom it lost."""
        if not self.serves:
            self.conversation.abort()
