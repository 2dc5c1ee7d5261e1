"""Matching of messages with receives, by tag and source, as in MPI.

How it works
------------
There are two queues per tag: receives that were posted and have no message yet, and unexpected messages, whose header
came before a matching receive was posted. A message goes to the first posted receive that accepts its source; a receive
takes the first unexpected message that it accepts. So messages of one source and tag are received in the order sent.

A matched message is read straight into the tensor of its receive. An unexpected one is read into a buffer and copied
when it is matched; it may be matched while it is still being read, and is copied when it is complete. A message of
another length or dtype than the receive expects is read and dropped, and the receive gets `ReplicaMismatch`: so the
connection stays usable.

The buffers of unexpected messages of one peer have at most `_KEPT_BYTES` together, and as much again as the receives
that are posted for that peer expect (`has_room`). So what a peer sends unasked cannot use up the memory of this rank.

All methods are called by the thread that handles messages, under the messenger's guard.
"""

from collections import defaultdict
from typing import Any

import numpy as np

from tutti.errors import ReplicaMismatch
from tutti.transports.base import ANY
from tutti.transports.membership import Membership
from tutti.transports.sockets.frames import DTYPE_CODES, DTYPES, tensor_bytes
from tutti.transports.sockets.messages import IncomingMessage, SocketReceive

_KEPT_BYTES = 64 * 2**20
"""Bytes of unexpected messages that are kept of one peer, whatever receives are posted."""
_MESSAGE_BYTES = 512
"""Approximate bytes of an unexpected message beside its payload."""


class ReceiveMatcher:
    """The posted receives and the unexpected messages of one channel."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        # By tag, in the order posted. Tags without an entry are removed: a program may use a new one for each message.
        self._posted: dict[int, list[SocketReceive]] = {}
        self.unexpected: dict[int, list[IncomingMessage]] = {}
        """Messages without a receive, by tag, in the order of arrival."""
        self._kept_bytes: defaultdict[int, int] = defaultdict(int)
        """What unexpected messages use, by peer."""

    def match_message(self, message: IncomingMessage) -> bool:
        """Match a new message with a posted receive, into whose memory it is read; return whether there is one."""
        posted = self._posted.get(message.tag, ())
        for receive in posted:  # In the order posted: an older ANY comes before a younger receive from this source.
            if receive.peer in (ANY, message.src):
                _remove(self._posted, message.tag, receive)
                self._bind(message, receive)
                message.memory = None if receive.error else tensor_bytes(receive.tensor)
                return True
        return False

    def match_receive(self, receive: SocketReceive, tag: int) -> bool:
        """Match a new receive with an unexpected message; return whether there is one."""
        for message in self.unexpected.get(tag, ()):
            if receive.peer in (ANY, message.src):
                self._forget(message)
                self._bind(message, receive)
                # Otherwise the connection is still reading into the buffer, and calls `complete` at its end.
                if message.complete:
                    self.complete(message)
                return True
        return False

    def post(self, receive: SocketReceive, tag: int, first: bool = False) -> None:
        """Queue a receive for messages to come, in front of the others if `first`."""
        posted = self._posted.setdefault(tag, [])
        posted.insert(0 if first else len(posted), receive)

    def _bind(self, message: IncomingMessage, receive: SocketReceive) -> None:
        """Assign `message` to `receive`, which gets an error if they do not fit."""
        message.receive = receive
        receive.peer = message.src
        tensor = receive.tensor
        if (message.num_bytes, message.dtype_code) == (tensor.nbytes, DTYPE_CODES[tensor.dtype]):
            return
        got, sender = DTYPES[message.dtype_code], self._membership.peers[message.src].rank
        receive.error = ReplicaMismatch(
            f"rank {self._membership.world_rank}: expected {tensor.numel()} × {tensor.dtype} from rank {sender}, which "
            f"sent {message.num_bytes // got.itemsize} × {got}. All ranks must call with tensors of one length and "
            "dtype."
        )

    def has_room(self, message: IncomingMessage) -> bool:
        """Whether a message that no receive was posted for may be kept in memory."""
        excess = self._kept_bytes[message.src] + message.num_bytes + _MESSAGE_BYTES - _KEPT_BYTES
        if excess <= 0:
            return True
        posted = (receive for queue in self._posted.values() for receive in queue)
        return excess <= sum(receive.tensor.nbytes for receive in posted if receive.peer in (ANY, message.src))

    def keep(self, message: IncomingMessage) -> None:
        """Queue a message that no receive was posted for, to be read into memory of its own."""
        # Not filled with zeros: pages that nothing is written to are never allocated.
        message.memory = memoryview(np.empty(message.num_bytes, np.uint8))  # type: ignore[arg-type]
        message.is_kept = True
        self._kept_bytes[message.src] += message.num_bytes + _MESSAGE_BYTES
        self.unexpected.setdefault(message.tag, []).append(message)

    def complete(self, message: IncomingMessage) -> None:
        """Note that all bytes of `message` were read; finish its receive if it has one."""
        message.complete = True
        receive = message.receive
        if receive is None:
            return  # Kept until a receive is posted.
        if message.is_kept and receive.error is None:
            assert message.memory is not None
            tensor_bytes(receive.tensor)[:] = message.memory
        receive.finished = True

    def discard(self, message: IncomingMessage) -> SocketReceive | None:
        """Forget a message that will never be complete; return its receive if that may take another rank's message."""
        if message in self.unexpected.get(message.tag, ()):
            self._forget(message)
        receive = message.receive
        # A receive from this very source cannot finish any more: its wait ends because the source is in `ended`.
        if receive is None or receive.requested_source != ANY:
            return None
        receive.peer, receive.error = ANY, None
        return receive

    def _forget(self, message: IncomingMessage) -> None:
        """Take a message out of the unexpected ones."""
        _remove(self.unexpected, message.tag, message)
        self._kept_bytes[message.src] -= message.num_bytes + _MESSAGE_BYTES

    def awaits(self, src: int) -> bool:
        """Whether a receive is posted that a message of `src` may match."""
        return any(receive.peer in (ANY, src) for posted in self._posted.values() for receive in posted)

    def awaited_peers(self) -> set[int]:
        """The ranks from which receives are posted, `ANY` not counted."""
        return {receive.peer for posted in self._posted.values() for receive in posted} - {ANY}


def _remove(queues: dict[int, list[Any]], tag: int, item: object) -> None:
    """Take an item out of the queue of a tag; remove the queue if it was the last."""
    queue = queues[tag]
    queue.remove(item)
    if not queue:
        del queues[tag]
