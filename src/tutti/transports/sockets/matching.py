"""Matching of messages with receives, by tag and source, as in MPI.

How it works
------------
There are two queues per tag: receives that were posted and have no message yet, and unexpected messages, whose header
came before a matching receive was posted. A message goes to the first posted receive that accepts its source; a receive
takes the first unexpected message that it accepts. So messages of one source and tag are received in the order sent.

A matched message is read straight into the tensor of its receive. An unexpected one is read into a buffer and copied
when it is matched; it may be matched while it is still being read, and is copied when it is complete. A message of
another length or dtype than the receive expects is read into a buffer and dropped, and the receive gets
`ReplicaMismatch`: so the connection stays usable.

All methods are called by the thread that handles messages, under the messenger's guard.
"""

from collections import defaultdict

from tutti.errors import ReplicaMismatch
from tutti.transports.base import ANY
from tutti.transports.membership import Membership
from tutti.transports.sockets.frames import DTYPE_CODES, DTYPES, tensor_bytes
from tutti.transports.sockets.messages import IncomingMessage, SocketReceive


class ReceiveMatcher:
    """The posted receives and the unexpected messages of one channel."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._posted: defaultdict[int, list[SocketReceive]] = defaultdict(list)  # By tag, in the order posted.
        self.unexpected: defaultdict[int, list[IncomingMessage]] = defaultdict(list)
        """Messages without a receive, by tag, in the order of arrival."""

    def match_message(self, message: IncomingMessage) -> memoryview | None:
        """Match a new message with a posted receive: the memory to read it into, or None if there is no receive."""
        posted = self._posted[message.tag]
        for receive in posted:  # In the order posted: an older ANY comes before a younger receive from this source.
            if receive.peer in (ANY, message.src):
                posted.remove(receive)
                return self.bind(message, receive)
        return None

    def match_receive(self, receive: SocketReceive, tag: int) -> bool:
        """Match a new receive with an unexpected message; return whether there is one."""
        for message in self.unexpected[tag]:
            if receive.peer in (ANY, message.src):
                self.unexpected[tag].remove(message)
                buffer = message.buffer  # `bind` replaces it if the message does not fit the receive.
                self.bind(message, receive)
                message.buffer = buffer
                # Otherwise the connection is still reading into the buffer, and calls `complete` at its end.
                if message.complete:
                    self.complete(message)
                return True
        return False

    def post(self, receive: SocketReceive, tag: int, first: bool = False) -> None:
        """Queue a receive for messages to come, in front of the others if `first`."""
        self._posted[tag].insert(0 if first else len(self._posted[tag]), receive)

    def bind(self, message: IncomingMessage, receive: SocketReceive) -> memoryview:
        """Assign `message` to `receive`: the memory to read it into, which is the tensor's own if it fits."""
        message.receive = receive
        receive.peer = message.src
        tensor = receive.tensor
        if (message.num_bytes, message.dtype_code) == (tensor.nbytes, DTYPE_CODES[tensor.dtype]):
            return tensor_bytes(tensor)
        got, sender = DTYPES[message.dtype_code], self._membership.peers[message.src].rank
        receive.error = ReplicaMismatch(
            f"rank {self._membership.world_rank}: expected {tensor.numel()} × {tensor.dtype} from rank {sender}, which "
            f"sent {message.num_bytes // got.itemsize} × {got}. All ranks must call with tensors of one length and "
            "dtype."
        )
        message.buffer = bytearray(message.num_bytes)  # Read, so that the next header is found, and dropped.
        return memoryview(message.buffer)

    def keep(self, message: IncomingMessage) -> memoryview:
        """Queue a message that no receive was posted for: the memory to read it into."""
        message.buffer = bytearray(message.num_bytes)
        self.unexpected[message.tag].append(message)
        return memoryview(message.buffer)

    def complete(self, message: IncomingMessage) -> None:
        """Note that all bytes of `message` were read; finish its receive if it has one."""
        message.complete = True
        receive = message.receive
        if receive is None:
            return  # Kept until a receive is posted.
        if message.buffer is not None and receive.error is None:
            tensor_bytes(receive.tensor)[:] = message.buffer
        receive.finished = True

    def discard(self, message: IncomingMessage) -> SocketReceive | None:
        """Forget a message that will never be complete; return its receive if that may take another rank's message."""
        if message in self.unexpected[message.tag]:
            self.unexpected[message.tag].remove(message)
        receive = message.receive
        # A receive from this very source cannot finish any more: its wait ends because the source is in `ended`.
        if receive is None or receive.requested_source != ANY:
            return None
        receive.peer = ANY
        return receive

    def awaits(self, src: int) -> bool:
        """Whether a receive is posted that a message of `src` may match."""
        return any(receive.peer in (ANY, src) for posted in self._posted.values() for receive in posted)

    def awaited_peers(self) -> set[int]:
        """The ranks from which receives are posted, `ANY` not counted."""
        return {receive.peer for posted in self._posted.values() for receive in posted} - {ANY}
