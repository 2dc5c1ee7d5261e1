"""Tagged messages between ranks over TCP, without an I/O thread: the thread that waits moves all messages.

How it works
------------
`send` and `receive` start a message and move what can be moved at once. From then on messages move only inside `poll`,
`wait` and `idle`, which call `SocketConnections.step`. Each of them moves all messages of the channel, not only the
one that is asked about. So a rank that computes without calling the transport moves nothing; the kernel's buffers take
what fits, and its peers are held back by TCP.

One thread at a time uses a messenger. The exceptions are `interrupt` and `wake`, which any thread may call, and the
event loop with callers of `spawn_inline`, which exclude each other by `guard`.

A wait for a work ends when
- its last byte was moved (`finished`), by this wait or by another thread's step;
- the peer is lost (`peer_lost`): its connection ended, or writing to it failed;
- the peer is found gone. `_check_peer` asks membership every `WATCH_SECONDS`, and when the coordinator has told
  something, which wakes the selector. Data may still be on its way from a rank that has sent and left, so a connection
  with recent progress is read first;
- nothing moved between the two for `timeout`: slow data restarts the deadline, and is reported by `on_progress`;
- `interrupt` is called, which sets the flag and wakes the selector.

A rank that fails here aborts the channel (`ChannelHealth`), so that peers which wait for it fail soon and name the rank
that was lost first. With spawned operations, only those that depend on the lost peer fail.
"""

import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from tutti.coordination.activity import Wait
from tutti.errors import DeadlineExceeded
from tutti.transports.base import ANY, Work
from tutti.transports.event_loop import ProgressEngine
from tutti.transports.membership import WATCH_SECONDS, ChannelMembership, Membership, waiting_for
from tutti.transports.sockets.connections import SocketConnections
from tutti.transports.sockets.connector import Connector
from tutti.transports.sockets.frames import DTYPE_CODES, HEADER, tensor_bytes
from tutti.transports.sockets.health import ChannelHealth
from tutti.transports.sockets.matching import ReceiveMatcher
from tutti.transports.sockets.messages import SocketReceive, SocketSend

_UNREPORTED_SECONDS = 0.1
"""A wait that lasts longer is reported to the coordinator."""


class Messenger(ProgressEngine):
    """All messages of one channel on one rank."""

    def __init__(self, membership: Membership, name: str) -> None:
        """Listen for peers; `name` identifies the channel in the membership's scope."""
        # Re-entrant: operations that the event loop resumes under it may call `done`, and a step takes it again.
        self.guard = threading.RLock()
        self.membership = membership
        self.health = ChannelHealth(membership, name)
        self.on_progress: Callable[[], None] = lambda: None
        """Called when a wait is over, and every `WATCH_SECONDS` of a long wait in which data moved."""
        self.matcher = ReceiveMatcher(membership)
        prefix = f"{name}/messages"
        self.connections = SocketConnections(membership, self.matcher, self.guard, self.health.failures)
        # Peers find this rank's address under the same prefix (`Connector`).
        membership.set(f"{prefix}/at/{membership.rank}", self.connections.reception.location)
        self.connector = Connector(self.health, self.connections, prefix)
        # A rank that waits in the selector is woken when another is lost or closes the channel.
        self._stop_listening = membership.member.on_change(self.connections.wake)
        self.ended, self.broken = self.connections.ended, self.connections.broken
        self._checked_at = 0.0
        self._lost_at: dict[int, float] = {}
        """When it was first noticed that a peer is lost. What connects later does not come from it."""
        self._closed = False

    @property
    def channel_membership(self) -> ChannelMembership:
        return self.health.channel_membership

    def send(self, tensor: Tensor, dst: int, tag: int) -> SocketSend:
        """Start sending a contiguous CPU tensor. Connects first, if this is the first message to `dst`."""
        self.health.check_open()
        send = SocketSend(self, dst, tensor)
        outgoing = self.connections.outgoing.get(dst) or self.connector.reach(dst)
        if outgoing is None:
            return send  # `dst` is in `broken`: the wait fails.
        data = tensor_bytes(tensor)
        header = memoryview(HEADER.pack(tag, data.nbytes, DTYPE_CODES[tensor.dtype]))
        if data.nbytes:
            # The send is finished with its last range: the payload, or the header if there is no payload.
            outgoing.queue += [(header, None), (data, send)]
        else:
            outgoing.queue.append((header, send))
        if not outgoing.watched:  # Otherwise the kernel is full, and the selector continues when it is not.
            self.connections.write(dst)
        return send

    def receive(self, tensor: Tensor, src: int, tag: int) -> SocketReceive:
        """Start receiving into a contiguous CPU tensor."""
        self.health.check_open()
        receive = SocketReceive(self, src, tensor)
        self.connections.post_receive(receive, tag)
        return receive

    def poll(self, work: SocketSend | SocketReceive) -> bool:
        """Move what can be moved at once; return whether waiting for `work` would end at once."""
        if not (work.finished or self.health.interrupted):
            self.connections.step(0)
        return work.finished or self.health.interrupted or work.peer_lost

    def wait(self, work: SocketSend | SocketReceive) -> None:
        """Move all messages until `work` is finished."""
        if not self._move(work, _UNREPORTED_SECONDS):
            with waiting_for(self.membership, work.peer, work.awaited_action) as wait:
                self._move(work, wait=wait)
        self.on_progress()  # Many short waits may be long together.

    def _move(self, work: SocketSend | SocketReceive, seconds: float = math.inf, wait: Wait | None = None) -> bool:
        """Move all messages until `work` is finished; return False after `seconds`. Reports progress to `wait`."""
        health, step, progressed_at = self.health, self.connections.step, self.connections.progressed_at
        timeout_s = self.membership.timeout.total_seconds()
        started = now = time.monotonic()
        interval_s, member = min(WATCH_SECONDS, timeout_s, seconds), self.membership.member
        check_at = now + interval_s
        num_changes = member.num_changes
        while not work.finished:
            # Checked in every round: `interrupt` sets the flag before it wakes the selector, so it cannot be missed.
            health.check_not_interrupted()
            # Checked after `finished`: what a peer sent before it closed the connection still counts.
            if work.peer_lost:
                raise health.connection_error(work.peer)
            step(max(0.0, check_at - now))
            now = time.monotonic()
            # At intervals, for slow progress; and at once when the coordinator has told something.
            if work.finished or (now < check_at and num_changes == member.num_changes):
                continue
            check_at, num_changes = now + interval_s, member.num_changes
            self._check_peer(work, now)
            if wait is not None and progressed_at[work.peer] > wait.since:
                wait.moved()
            # Bytes that moved with this peer restart the deadline, also those of other messages.
            if now > max(started, progressed_at[work.peer]) + timeout_s:
                raise health.timeout_error(self._awaited(work))
            if now - started >= seconds:
                return False
        return True

    def idle(self, seconds: float = WATCH_SECONDS) -> None:
        if not self.connections.step(seconds) or time.monotonic() > self._checked_at + WATCH_SECONDS:
            self._checked_at = time.monotonic()
            with self.guard:
                self._check_awaited_peers()

    def wake(self) -> None:
        self.connections.wake()

    def over(self, work: Work) -> bool:
        # Not `done` for messages: that would call `step` from within a pass of the event loop.
        return work.finished or work.peer_lost if isinstance(work, SocketSend | SocketReceive) else work.done()

    def failure(self, work: Work) -> Exception | None:
        if not isinstance(work, SocketSend | SocketReceive):
            return None
        if work.finished:
            return work.error if isinstance(work, SocketReceive) else None
        # `over` was true without `finished`: so the peer is lost.
        return self.health.operation_error(work.peer)

    def timeout_error(self, awaited: str) -> DeadlineExceeded:
        return self.health.timeout_error(awaited)

    def waiting(self, work: Work | None) -> AbstractContextManager[Wait]:
        # Without a message it waits for another operation of this rank: whom that one waits for is not known here.
        peer = work.peer if isinstance(work, SocketSend | SocketReceive) else ANY
        return waiting_for(self.membership, peer, getattr(work, "awaited_action", "reply"))

    def check(self, work: Work | None, wait: Wait) -> None:
        self.membership.member.check()
        moved_at = self.connections.progressed_at
        if (moved_at[work.peer] if isinstance(work, SocketSend | SocketReceive) else max(moved_at)) > wait.since:
            wait.moved()

    def interrupt(self) -> None:
        """End every wait, from any thread. Idempotent."""
        if not self.health.interrupted:
            # Before the wake-up: a wait that wakes must see the flag.
            self.health.interrupted = True
            self.wake()

    def close(self) -> None:
        """Close every connection; what was sent still arrives. No thread may be waiting. Idempotent."""
        self.interrupt()
        if self._closed:
            return
        self._closed = True
        # Announced before the sockets close: peers then know why, and do not take it for a failure.
        self.channel_membership.close()
        self._stop_listening()
        self.connections.close()

    def _check_peer(self, work: SocketSend | SocketReceive, now: float) -> None:
        """Raise if the peer of `work` will never answer."""
        peer, connections = work.peer, self.connections
        # Before what has come is read: so everything is read that a peer sent before it was lost.
        lost = self.health.lost(peer)
        connections.check()
        # Data has moved since about the last check.
        if connections.progressed_at[peer] > now - 2 * WATCH_SECONDS:
            self.on_progress()
        # A receive from any rank whose message broke off waits for another rank now.
        if not lost or work.finished or work.peer != peer:
            return
        if not (isinstance(work, SocketReceive) and self._may_arrive(peer, now)):
            self.channel_membership.abort()
            raise self.membership.loss_error(lost)

    def _may_arrive(self, peer: int, now: float) -> bool:
        """Whether a message of a peer that is lost may still be in the network, though its sender has left."""
        return self.connections.may_still_arrive(peer, now, self._lost_at.setdefault(peer, time.monotonic()))

    def _awaited(self, work: SocketSend | SocketReceive) -> str:
        """What is waited for, for messages."""
        if work.peer == ANY:
            return f"any rank to {work.awaited_action}"
        awaited = f"rank {self.membership.peers[work.peer].rank} to {work.awaited_action}"
        held = self.connections.held_from(work.peer) if isinstance(work, SocketReceive) else None
        if held is None:
            return awaited
        return f"{awaited} (before it, it sent {held.num_bytes} bytes with tag {held.tag} that no receive asks for)"

    def _check_awaited_peers(self) -> None:
        """Mark the peers of posted receives that are gone as ended, also those that never connected."""
        now = time.monotonic()
        # A peer that never connected has no connection whose end would be noticed.
        awaited = self.matcher.awaited_peers() - self.ended
        # Before what has come is read: so everything is read that a peer sent before it was lost.
        lost = [peer for peer in awaited if self.channel_membership.lost(peer)]
        self.connections.check()
        for peer in lost:
            if not self._may_arrive(peer, now):
                self.ended.add(peer)
