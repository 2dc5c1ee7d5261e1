"""Simulated messages and receives: how a message travels through the network, and what a receive takes from it.

How it works
------------
A message is also the work of sending it. `depart` is called at the sender's time: it occupies the first pipe of the
route as soon as that is free, which settles when the send is done, and schedules `_travel` for the moment at which the
head of the message reaches the next pipe (cut-through: the head moves on while the tail still leaves). `_travel` takes
the other pipes in turn; where one is busy, it continues when that is free. The arrival is the last end of all pipes.

Messages of one mailbox are matched with receives in the order of sending, at departure: the payload is copied into the
receiver's tensor right then, or into a copy if no receive is posted yet. That is early in virtual time, but no rank
looks at the tensor before the receive is done, and the receive is done at the message's arrival. Messages to a mailbox
that receives from ANY rank are matched in the order of arrival instead (see `mailboxes`).

The two `__init__` methods do not call their base class's, and frequent lines are written out: a large simulation makes
hundreds of millions of these objects.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tutti.errors import ReplicaMismatch
from tutti.simulation.network import Pipe
from tutti.simulation.work import SimulatedWork
from tutti.transports.base import ANY

if TYPE_CHECKING:
    from tutti.simulation.mailboxes import AnySourceMailbox, Mailbox
    from tutti.simulation.rank import Rank


class SimulatedMessage(SimulatedWork):
    """A message, and the work of sending it, which is done when its last byte has left the sender."""

    __slots__ = ("_hop", "_start_s", "_stop_s", "arrival_s", "mailbox", "num_bytes", "payload", "receive")

    def __init__(self, mailbox: "Mailbox", tensor: Tensor) -> None:
        self.rank = mailbox.src
        self.finish_s = None
        self.error = None
        self.on_finish = None
        self.mailbox = mailbox
        self.num_bytes: int = tensor.nbytes
        self.payload: Any = tensor
        """The sender's tensor, or a copy of it; None once a receive has copied it."""
        self.receive: Receive | None = None
        """The receive that it was matched with, until it has arrived."""
        self.arrival_s: float | None = None
        """Time at which its last byte arrives; None until that is known."""

    def depart(self) -> None:
        """Take the first pipe as soon as it is free, and match the message with a receive. An action of the engine."""
        mailbox, rank = self.mailbox, self.rank
        if rank.gone is not None:  # It died between the call of `isend` and this time.
            return
        route, engine = mailbox.route, rank.engine
        now, num_bytes = engine.now, self.num_bytes
        pipe = route.first
        if rank.stopped is not None or pipe.held is not None:
            (pipe.held if rank.stopped is None else rank.stopped).append(self.depart)  # type: ignore[union-attr]
            return
        free_s = pipe.free_s
        # `max`, written out: a call costs more than the comparison.
        start_s = self._start_s = free_s if free_s > now else now
        pipe.free_s = self.finish_s = left_s = start_s + num_bytes * pipe.seconds_per_byte
        pipe.num_bytes += num_bytes
        # The earliest end of the journey; slower pipes on the way postpone it.
        self._stop_s = left_s + route.latency_s
        rank.num_messages += 1
        if self.on_finish is not None:
            engine.schedule(left_s, self.on_finish)
        if mailbox.receives:
            mailbox.receives.popleft().match(self)
        else:
            mailbox.keep(self)
        # As long as this is on its way, no later message may be timed by `send_direct`.
        route.last.pending += 1
        self._hop = 0
        engine.schedule(start_s + route.latency_s, self._travel)

    def _travel(self) -> None:
        """Take the remaining pipes now; where one is busy, those after it when it is free. An action of the engine."""
        engine, rest = self.rank.engine, self.mailbox.route.rest
        while self._hop < len(rest):
            if (held := rest[self._hop].held) is not None:
                held.append(self._travel)
                return
            start_s = self._take(rest[self._hop], engine.now)
            self._hop += 1
            # The pipe is busy. Those after it are taken when the head gets there: others may come first.
            if start_s > engine.now and self._hop < len(rest):
                engine.schedule(start_s, self._travel)
                return
        rest[-1].pending -= 1
        mailbox = self.mailbox
        # A switch carries several messages at once: a short one must not overtake an earlier one of the same mailbox.
        self._stop_s = mailbox.newest_s = max(self._stop_s, mailbox.newest_s)
        self._arrive()

    def _take(self, pipe: Pipe, now: float) -> float:
        """Occupy a pipe as soon as it is free; returns when that is."""
        start_s = pipe.free_s if pipe.free_s > now else now
        stop_s = start_s + self.num_bytes * pipe.seconds_per_byte
        # A switch is free again when the first of its slots is.
        pipe.free_s = stop_s if pipe.slots is None else pipe.occupy_slot(stop_s)
        pipe.num_bytes += self.num_bytes
        self._stop_s = max(self._stop_s, stop_s)
        return start_s

    def _arrive(self) -> None:
        """Settle the arrival, which may still lie in the future."""
        arrival_s = self.arrival_s = self._stop_s
        mailbox = self.mailbox
        for travel in mailbox.travels:
            travel.add(self._start_s, arrival_s)
        # ANY receives are matched in the order of arrival, so the message is handed over at that time.
        if mailbox.any_source is not None:
            self.rank.engine.schedule(arrival_s, partial(mailbox.deliver, self))
        elif self.receive is not None:
            receive, self.receive = self.receive, None  # Breaks the reference cycle of the two.
            receive.complete(arrival_s)

    @property
    def active_until_s(self) -> float:
        return self.rank.engine.now

    def describe(self) -> str:
        return f"a message to rank {self.mailbox.dst.number} to leave"


class Receive(SimulatedWork):
    """A receive, and the message that it was matched with, once there is one."""

    __slots__ = ("_source", "mailbox", "src", "tensor")

    def __init__(self, rank: "Rank", tensor: Tensor, src: int, mailbox: "Mailbox | AnySourceMailbox") -> None:
        self.rank = rank
        self.finish_s = None
        self.error = None
        self.on_finish = None
        self.tensor = tensor
        self.src = src
        self.mailbox = mailbox
        self._source = ANY  # Until it is matched.

    def match(self, message: SimulatedMessage) -> None:
        """Copy what the message carries, and finish when it arrives, which may be later or long ago."""
        payload, message.payload = message.payload, None  # Frees the copy, if it was one.
        if not self.take(payload, message.mailbox):
            return
        if message.arrival_s is None:
            # `_arrive` completes this receive.
            message.receive = self
        else:
            self.complete(message.arrival_s)

    def take(self, payload: Tensor, mailbox: "Mailbox") -> bool:
        """Copy the payload into the receiver's tensor. Fails this receive and returns False if they do not fit."""
        tensor = self.tensor
        self._source = mailbox.key[0]
        # As real transports do: bytes and dtype must agree, shapes need not.
        if payload.nbytes != tensor.nbytes or payload.dtype != tensor.dtype:
            self.fail(
                ReplicaMismatch(
                    f"rank {self.rank.number}: expected {tensor.numel()} × {tensor.dtype} from rank "
                    f"{mailbox.src.number}, got {payload.numel()} × {payload.dtype}."
                )
            )
            return False
        # A dry run has sizes only. `detach`: the receiver's tensor may require grad.
        if not payload.is_meta:
            tensor.detach().copy_(payload if payload.shape == tensor.shape else payload.reshape(tensor.shape))
        return True

    def time_out(self, error: Exception) -> None:
        self.mailbox.cancel(self)  # The next message is for the next receive.
        self.fail(error)

    @property
    def source(self) -> int:
        return self._source

    @property
    def active_until_s(self) -> float:
        # As long as a message is on its way, the network is slow and nobody is lost: no deadline.
        travelling = self._source != ANY or self.mailbox.has_travelling(self.src)
        return self.rank.engine.now if travelling else 0.0

    def describe(self) -> str:
        channel = self.mailbox.channel
        who = "any rank" if self.src == ANY else f"rank {channel.ranks[self.src].number}"
        return f"a message from {who} (tag {self.mailbox.tag}, in '{channel.name}')"
