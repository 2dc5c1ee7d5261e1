"""Messages between simulated ranks: how they are matched, and when they arrive."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tutti.errors import RankLost, ReplicaMismatch
from tutti.simulation.network import Network, Pipe
from tutti.simulation.work import Pending
from tutti.transports.base import ANY
from tutti.transports.membership import rank_lost_error

if TYPE_CHECKING:
    from tutti.simulation.rank import Rank


class SimulatedMessage(Pending):
    """A message, and the work of sending it: done when its last byte has left."""

    __slots__ = ("_hop", "_start_s", "_stop_s", "arrival_s", "box", "num_bytes", "payload", "receive")

    def __init__(self, box: "Mailbox", tensor: Tensor) -> None:
        # Spelt out, as for `Receive`: a large simulation makes hundreds of millions of these.
        self.rank = box.src
        self.finish_s = None
        self.error = None
        self.wake = None
        self.box = box
        self.num_bytes: int = tensor.nbytes
        self.payload: Any = tensor
        self.receive: Receive | None = None
        self.arrival_s: float | None = None

    def depart(self) -> None:
        """Take the first pipe as soon as it is free."""
        box, rank = self.box, self.rank
        if rank.gone is not None:
            return
        route, engine = box.route, rank.engine
        now, num_bytes = engine.now, self.num_bytes
        pipe = route.first
        free_s = pipe.free_s
        start_s = self._start_s = free_s if free_s > now else now
        pipe.free_s = self.finish_s = left_s = start_s + num_bytes * pipe.seconds_per_byte
        pipe.num_bytes += num_bytes
        self._stop_s = left_s + route.latency_s
        rank.num_messages += 1
        if self.wake is not None:
            engine.at(left_s, self.wake)
        if box.receives:
            box.receives.popleft().match(self)
        else:
            box.keep(self)
        route.last.pending += 1
        self._hop = 0
        engine.at(start_s + route.latency_s, self._travel)

    def _travel(self) -> None:
        """Take the next pipes, now; where one is busy, the rest when it is free."""
        engine, rest = self.rank.engine, self.box.route.rest
        while self._hop < len(rest):
            start_s = self._take(rest[self._hop], engine.now)
            self._hop += 1
            if start_s > engine.now and self._hop < len(rest):
                engine.at(start_s, self._travel)
                return
        rest[-1].pending -= 1
        box = self.box
        self._stop_s = box.newest_s = max(self._stop_s, box.newest_s)  # On lanes a short one might overtake.
        self._arrive()

    def _take(self, pipe: Pipe, now: float) -> float:
        start_s = pipe.free_s if pipe.free_s > now else now
        stop_s = start_s + self.num_bytes * pipe.seconds_per_byte
        pipe.free_s = stop_s if pipe.lanes is None else pipe.occupy(stop_s)
        pipe.num_bytes += self.num_bytes
        self._stop_s = max(self._stop_s, stop_s)
        return start_s

    def _arrive(self) -> None:
        arrival_s = self.arrival_s = self._stop_s
        box = self.box
        self.rank.moving(self._start_s, arrival_s)
        box.dst.moving(self._start_s, arrival_s)
        if box.open is not None:
            self.rank.engine.at(arrival_s, partial(box.land, self))
        elif self.receive is not None:
            receive, self.receive = self.receive, None  # Or the two would keep each other.
            receive.complete(arrival_s)

    @property
    def under_way_s(self) -> float:
        return self.rank.engine.now

    def describe(self) -> str:
        return f"a message to rank {self.box.dst.number} to leave"


class Receive(Pending):
    """A receive, and the message that it is for once that is known."""

    __slots__ = ("_source", "mailbox", "src", "tensor")

    def __init__(self, rank: "Rank", tensor: Tensor, src: int, mailbox: "Mailbox | AnySourceMailbox") -> None:
        self.rank = rank
        self.finish_s = None
        self.error = None
        self.wake = None
        self.tensor = tensor
        self.src = src
        self.mailbox = mailbox
        self._source = ANY  # Until there is a message.

    def match(self, message: SimulatedMessage) -> None:
        """Take what the message brings. It may be on its way still; nobody looks at the tensor before it is there."""
        payload, message.payload = message.payload, None
        if not self.take(payload, message.box):
            return
        if message.arrival_s is None:
            message.receive = self
        else:
            self.complete(message.arrival_s)

    def take(self, payload: Tensor, box: "Mailbox") -> bool:
        """Copy what was sent; False, and this has failed, if something else was expected."""
        tensor = self.tensor
        self._source = box.key[0]
        if payload.nbytes != tensor.nbytes or payload.dtype != tensor.dtype:
            self.fail(
                ReplicaMismatch(
                    f"rank {self.rank.number}: expected {tensor.numel()} × {tensor.dtype} from rank "
                    f"{box.src.number}, got {payload.numel()} × {payload.dtype}."
                )
            )
            return False
        if not payload.is_meta:
            tensor.detach().copy_(payload if payload.shape == tensor.shape else payload.reshape(tensor.shape))
        return True

    def overdue(self, error: Exception) -> None:
        self.mailbox.forget(self)
        self.fail(error)

    @property
    def source(self) -> int:
        return self._source

    @property
    def under_way_s(self) -> float:
        comes = self._source != ANY or self.mailbox.comes(self.src)
        return self.rank.engine.now if comes else 0.0

    def describe(self) -> str:
        channel = self.mailbox.channel
        who = "any rank" if self.src == ANY else f"rank {channel.ranks[self.src].number}"
        return f"a message from {who} (tag {self.mailbox.tag}, in '{channel.name}')"


class Mailbox:
    """Messages from one rank to another under one tag: matched in the order in which they were sent."""

    def __init__(self, channel: "SimulatedChannel", src: int, dst: int, tag: int) -> None:
        self.channel = channel
        self.src, self.dst = channel.ranks[src], channel.ranks[dst]
        self.key, self.tag = (src, dst, tag), tag
        self.route = channel.network.route(self.src.number, self.dst.number)
        self.messages: deque[SimulatedMessage] = deque()
        self.receives: deque[Receive] = deque()
        self.open: AnySourceMailbox | None = channel.open.get((dst, tag))
        """Where messages go if they may be received from ANY."""
        self.on_the_way = 0
        """To there."""
        self.newest_s = 0.0
        """When the last message whose arrival is known arrives."""

    def send_straight(self, tensor: Tensor) -> Pending | None:
        """Send what somebody waits for over a way on which nothing is or can come before it; None if it is not so.

        The whole journey is known at once, and nothing has to be put on the agenda but its end.
        """
        route, src = self.route, self.src
        first, last, engine = route.first, route.last, src.engine
        now = engine.now
        if not (self.receives and route.direct and first.free_s <= now and not last.pending) or src.gone is not None:
            return None
        num_bytes = tensor.nbytes
        sent = Pending(src)
        first.free_s = sent.finish_s = now + num_bytes * first.seconds_per_byte
        first.num_bytes += num_bytes
        arrival_s, head_s = sent.finish_s + route.latency_s, now + route.latency_s
        last.free_s = stop_s = (last.free_s if last.free_s > head_s else head_s) + num_bytes * last.seconds_per_byte
        last.num_bytes += num_bytes
        arrival_s = max(arrival_s, stop_s)
        src.num_messages += 1
        for rank in (src, self.dst):  # As `Rank.moving`, without the calls: this is what large simulations consist of.
            until_s = rank.moving_until_s
            if arrival_s > until_s:
                rank.moving_s += arrival_s - (now if now > until_s else until_s)
                rank.moving_until_s = arrival_s
        receive = self.receives.popleft()
        if receive.take(tensor, self):
            receive.finish_s = arrival_s
            if receive.wake is not None:
                engine.at(arrival_s, receive.wake)
        return sent

    def keep(self, message: SimulatedMessage) -> None:
        """Nobody waits for this message yet: keep its content until somebody does."""
        if not message.payload.is_meta:
            message.payload = message.payload.detach().clone()
        if self.open is None:
            self.messages.append(message)
        else:
            self.on_the_way += 1

    def ask(self, receive: Receive) -> None:
        if self.open is not None:
            self.open.ask(receive)
        elif self.messages:
            receive.match(self.messages.popleft())
        elif self.key[0] in self.channel.closed:
            receive.fail(self.channel.lost(receive.rank, self.key[0]))
        else:
            self.receives.append(receive)

    def forget(self, receive: Receive) -> None:
        """It has waited too long: what comes is for the next."""
        if self.open is not None:
            self.open.forget(receive)
        elif receive in self.receives:
            self.receives.remove(receive)

    def comes(self, src: int) -> bool:
        """Whether a message that was not matched yet is on its way."""
        return self.open is not None and self.open.comes(src)

    def land(self, message: SimulatedMessage) -> None:
        assert self.open is not None
        if message.receive is not None:
            receive, message.receive = message.receive, None
            receive.complete(message.rank.engine.now)
        else:
            self.on_the_way -= 1
            self.open.land(message)
            self.open.check()


class AnySourceMailbox:
    """Messages to one rank under one tag that may be received from ANY: matched in the order of arrival."""

    def __init__(self, channel: "SimulatedChannel", dst: int, tag: int) -> None:
        self.channel = channel
        self.tag = tag
        self._dst = dst
        self._landed: list[SimulatedMessage] = []
        self._receives: list[Receive] = []
        now = channel.ranks[dst].engine.now
        for (_, to, box_tag), box in channel.boxes.items():
            if (to, box_tag) == (dst, tag):
                box.open = self
                self._receives += box.receives
                self._take_over(box, now)
        self._landed.sort(key=lambda message: message.arrival_s or 0.0)

    def _take_over(self, box: Mailbox, now: float) -> None:
        for message in box.messages:
            if message.arrival_s is not None and message.arrival_s <= now:
                self._landed.append(message)
                continue
            box.on_the_way += 1
            if message.arrival_s is not None:  # Else it lands when that is known.
                message.rank.engine.at(message.arrival_s, partial(box.land, message))
        box.messages.clear()
        box.receives.clear()

    def ask(self, receive: Receive) -> None:
        for message in self._landed:
            if receive.src in (ANY, message.box.key[0]):
                self._landed.remove(message)
                receive.match(message)
                return
        self._receives.append(receive)
        self.check()

    def land(self, message: SimulatedMessage) -> None:
        for receive in self._receives:
            if receive.src in (ANY, message.box.key[0]):
                self._receives.remove(receive)
                receive.match(message)
                return
        self._landed.append(message)

    def check(self) -> None:
        """Fail receives from those who have gone, if nothing of theirs is on its way."""
        channel = self.channel
        others = set(range(len(channel.ranks))) - {self._dst}
        for receive in list(self._receives):
            sources = others if receive.src == ANY else {receive.src}
            if sources <= channel.closed.keys() and not self._coming(sources):
                self._receives.remove(receive)
                receive.fail(channel.lost(receive.rank, max(sources)))

    def forget(self, receive: Receive) -> None:
        if receive in self._receives:
            self._receives.remove(receive)

    def comes(self, src: int) -> bool:
        return self._coming(set(range(len(self.channel.ranks))) if src == ANY else {src})

    def _coming(self, sources: set[int]) -> bool:
        return any(box.open is self and box.key[0] in sources and box.on_the_way for box in self.channel.boxes.values())


class SimulatedChannel:
    """What some ranks say to each other, apart from all else they say."""

    def __init__(self, name: str, ranks: Sequence["Rank"], network: Network, over: Callable[[], None]) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.network = network
        self.over = over
        """Called when all have closed it."""
        self.boxes: dict[tuple[int, int, int], Mailbox] = {}
        self._of_rank: dict[int, list[Mailbox]] = {}
        self.open: dict[tuple[int, int], AnySourceMailbox] = {}
        self.closed: dict[int, str] = {}
        """Those who will answer no more, and why."""
        self.host_sums: dict[int, Any] = {}
        """What all of them do together, by number."""

    def box(self, src: int, dst: int, tag: int) -> Mailbox:
        box = self.boxes.get((src, dst, tag))
        if box is None:
            box = self.boxes[src, dst, tag] = Mailbox(self, src, dst, tag)
            for rank in (src, dst):
                self._of_rank.setdefault(rank, []).append(box)
        return box

    def any_source_mailbox(self, dst: int, tag: int) -> AnySourceMailbox:
        if (dst, tag) not in self.open:
            self.open[dst, tag] = AnySourceMailbox(self, dst, tag)
        return self.open[dst, tag]

    def close(self, rank: "Rank", why: str) -> None:
        """A rank answers here no more: those who wait for it are told, unless it has sent what they wait for."""
        mine = self.ranks.index(rank)
        if mine in self.closed:
            return
        self.closed[mine] = why
        for box in self._of_rank.get(mine, ()):
            receives, box.receives = box.receives, deque()
            for receive in receives:
                receive.fail(self.lost(receive.rank, mine))
        for any_source_mailbox in self.open.values():
            any_source_mailbox.check()
        for host_sum in list(self.host_sums.values()):
            host_sum.fail(mine)
        if len(self.closed) == len(self.ranks):
            self.over()

    def lost(self, me: "Rank", who: int) -> RankLost:
        """The error for `me`, who waits for `who` in vain."""
        if self.ranks[who] is me:
            return RankLost(f"rank {me.number}: this channel was closed while it waited for a peer.")
        causes = {rank.number: rank.gone for rank in self.ranks if rank.gone is not None and not rank.fled}
        return rank_lost_error(me.number, causes or {self.ranks[who].number: self.closed[who]})
