"""Mailboxes: where messages of one channel wait for receives, and receives for messages.

How it works
------------
A `Mailbox` belongs to one sender, one receiver and one tag. Either `messages` or `receives` is empty: whichever comes
first waits there, and they are matched first in, first out.

A receive from ANY rank needs the order of arrival over all senders. The first such receive makes an
`AnySourceMailbox` for its receiver and tag. It takes over what waits in the mailboxes of that receiver and tag, and
from then on every message there is counted in `num_travelling` until its arrival, and delivered by `deliver` at that
time. Receives from a certain rank then go through it as well, so that no message is matched twice.

When a rank is gone, `SimulatedChannel.close` fails the receives that wait for it. Messages that it sent before still
arrive; so receives at an `AnySourceMailbox` are failed by `fail_hopeless` only when nothing travels to them any more.
"""

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from tutti.simulation.messages import Receive, SimulatedMessage
from tutti.simulation.work import SimulatedWork
from tutti.transports.base import ANY

if TYPE_CHECKING:
    from tutti.simulation.channel import SimulatedChannel


class Mailbox:
    """Messages from one rank to another under one tag, matched in the order in which they were sent."""

    def __init__(self, channel: "SimulatedChannel", src: int, dst: int, tag: int) -> None:
        self.channel = channel
        self.src, self.dst = channel.ranks[src], channel.ranks[dst]
        self.key, self.tag = (src, dst, tag), tag
        self.route = channel.network.route(self.src.number, self.dst.number)
        self.travels = (self.src.travel, self.dst.travel)
        self.messages: deque[SimulatedMessage] = deque()
        """Messages that wait for a receive."""
        self.receives: deque[Receive] = deque()
        """Receives that wait for a message."""
        self.any_source: AnySourceMailbox | None = channel.any_source_mailboxes.get((dst, tag))
        """The mailbox that messages are delivered to if the receiver takes them from ANY rank."""
        self.num_travelling = 0
        """Messages that were sent and not yet delivered to `any_source`."""
        self.newest_s = 0.0
        """Arrival of the last message whose arrival is known; no later message may arrive before it."""

    def send_direct(self, tensor: Tensor) -> SimulatedWork | None:
        """Send what a receive waits for over a route on which nothing can overtake it; None where that is impossible.

        The whole journey is then known at once, and only its end is scheduled. Large simulations consist of these.
        """
        route, src = self.route, self.src
        first, last, engine = route.first, route.last, src.engine
        now = engine.now
        # A receive waits, the sender's card is free, and nothing sent before is still on its way to the other card.
        if not (self.receives and route.direct and first.free_s <= now and not last.pending) or src.gone is not None:
            return None
        if first.held is not None:  # Its card is cut off.
            return None
        # The head travels on while the tail still leaves: times as in `SimulatedMessage.depart` and `_travel`.
        num_bytes = tensor.nbytes
        sent = SimulatedWork(src)
        first.free_s = sent.finish_s = now + num_bytes * first.seconds_per_byte
        first.num_bytes += num_bytes
        # The head reaches the receiver's card at `head_s`, which takes it when it is free.
        arrival_s, head_s = sent.finish_s + route.latency_s, now + route.latency_s
        last.free_s = stop_s = (last.free_s if last.free_s > head_s else head_s) + num_bytes * last.seconds_per_byte
        last.num_bytes += num_bytes
        # The slower of the two cards decides.
        arrival_s = max(arrival_s, stop_s)
        src.num_messages += 1
        for travel in self.travels:  # `TravelTime.add`, without the calls.
            until_s = travel.until_s
            if arrival_s > until_s:
                travel.total_s += arrival_s - (now if now > until_s else until_s)
                travel.until_s = arrival_s
        receive = self.receives.popleft()
        # `SimulatedWork.complete`, without the call. A receive of another size or dtype has failed in `take`.
        if receive.take(tensor, self):
            receive.finish_s = arrival_s
            if receive.on_finish is not None:
                engine.schedule(arrival_s, receive.on_finish)
        return sent

    def keep(self, message: SimulatedMessage) -> None:
        """Keep a message that no receive waits for, with a copy of its content: the sender may change its tensor."""
        if not message.payload.is_meta:
            message.payload = message.payload.detach().clone()
        if self.any_source is None:
            self.messages.append(message)
        else:
            self.num_travelling += 1  # Until `deliver`, which `_arrive` schedules.

    def post(self, receive: Receive) -> None:
        """Match a receive with the oldest message, or let it wait; fail it if the sender is gone."""
        if self.any_source is not None:
            self.any_source.post(receive)
        elif self.messages:
            receive.match(self.messages.popleft())
        # Only now: what the sender sent before it left can still be received.
        elif self.key[0] in self.channel.closed:
            receive.fail(self.channel.loss_error(receive.rank, self.key[0]))
        else:
            self.receives.append(receive)

    def cancel(self, receive: Receive) -> None:
        """Remove a receive that has waited too long: the next message is for the next receive."""
        if self.any_source is not None:
            self.any_source.cancel(receive)
        elif receive in self.receives:
            self.receives.remove(receive)

    def has_travelling(self, src: int) -> bool:
        """Whether a message that was not matched yet is on its way."""
        return self.any_source is not None and self.any_source.has_travelling(src)

    def deliver(self, message: SimulatedMessage) -> None:
        """Hand a message that has arrived to the receive it was matched with, or to the any-source mailbox."""
        assert self.any_source is not None
        if message.receive is not None:
            # It was matched at departure, before the mailbox was taken over.
            receive, message.receive = message.receive, None
            receive.complete(message.rank.engine.now)
        else:
            self.num_travelling -= 1
            self.any_source.deliver(message)
            # The sender may have left meanwhile: this was perhaps the last message on its way.
            self.any_source.fail_hopeless()


class AnySourceMailbox:
    """Messages to one rank under one tag that may be received from ANY rank, matched in the order of arrival."""

    def __init__(self, channel: "SimulatedChannel", dst: int, tag: int) -> None:
        self.channel = channel
        self.tag = tag
        self._dst = dst
        self._arrived: list[SimulatedMessage] = []
        self._receives: list[Receive] = []
        now = channel.ranks[dst].engine.now
        for (_, to, mailbox_tag), mailbox in channel.mailboxes.items():
            if (to, mailbox_tag) == (dst, tag):
                mailbox.any_source = self
                self._receives += mailbox.receives
                self._take_over(mailbox, now)
        # They come from several mailboxes, each in its own order.
        self._arrived.sort(key=lambda message: message.arrival_s or 0.0)

    def _take_over(self, mailbox: Mailbox, now: float) -> None:
        """Take the messages that wait in a mailbox: those that have arrived, and those that will."""
        for message in mailbox.messages:
            if message.arrival_s is not None and message.arrival_s <= now:
                self._arrived.append(message)
                continue
            mailbox.num_travelling += 1
            if message.arrival_s is not None:  # Else `_arrive` schedules the delivery, once the time is known.
                message.rank.engine.schedule(message.arrival_s, partial(mailbox.deliver, message))
        mailbox.messages.clear()
        mailbox.receives.clear()

    def post(self, receive: Receive) -> None:
        """Match a receive with the first message that has arrived, or let it wait."""
        for message in self._arrived:
            if receive.src in (ANY, message.mailbox.key[0]):
                self._arrived.remove(message)
                receive.match(message)
                return
        self._receives.append(receive)
        self.fail_hopeless()

    def deliver(self, message: SimulatedMessage) -> None:
        """Match a message that has arrived with the first receive that takes it, or keep it."""
        for receive in self._receives:
            if receive.src in (ANY, message.mailbox.key[0]):
                self._receives.remove(receive)
                receive.match(message)
                return
        self._arrived.append(message)

    def fail_hopeless(self) -> None:
        """Fail receives all of whose senders are gone, if nothing from them is still travelling."""
        channel = self.channel
        others = set(range(len(channel.ranks))) - {self._dst}
        for receive in list(self._receives):
            # The ranks that could still end this receive.
            sources = others if receive.src == ANY else {receive.src}
            if sources <= channel.closed.keys() and not self._any_travelling(sources):
                self._receives.remove(receive)
                lost = max(sources)  # Any of them: the error names those that went first.
                receive.fail(channel.loss_error(receive.rank, lost))

    def cancel(self, receive: Receive) -> None:
        """Remove a receive that has waited too long."""
        if receive in self._receives:
            self._receives.remove(receive)

    def has_travelling(self, src: int) -> bool:
        """Whether a message from `src`, which may be ANY, is on its way."""
        return self._any_travelling(set(range(len(self.channel.ranks))) if src == ANY else {src})

    def _any_travelling(self, sources: set[int]) -> bool:
        return any(
            mailbox.any_source is self and mailbox.key[0] in sources and mailbox.num_travelling
            for mailbox in self.channel.mailboxes.values()
        )
