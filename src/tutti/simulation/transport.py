"""The transport of simulated ranks."""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from weakref import WeakSet

from torch import Tensor

from tutti.errors import ConfigError, RankLost
from tutti.simulation.messages import AnySourceMailbox, Mailbox, Receive, SimulatedChannel, SimulatedMessage
from tutti.simulation.network import Network
from tutti.simulation.rank import Rank
from tutti.simulation.work import ConcurrentOperations, OperationSequence, SimulatedSignal
from tutti.transports.base import ANY, Operation, Signal, Transport, Work


class ChannelRegistry:
    """All that the transports of one simulation share: ranks, network and channels."""

    def __init__(self, ranks: Sequence[Rank], network: Network) -> None:
        self.ranks = tuple(ranks)
        self.network = network
        self._channels: dict[tuple[str, tuple[int, ...]], SimulatedChannel] = {}

    def channel(self, name: str, numbers: tuple[int, ...]) -> SimulatedChannel:
        """The one of that name between these ranks."""
        key = (name, numbers)
        if key not in self._channels:
            ranks, over = [self.ranks[each] for each in numbers], partial(self._forget, key)
            self._channels[key] = SimulatedChannel(name, ranks, self.network, over)
        return self._channels[key]

    def _forget(self, key: tuple[str, tuple[int, ...]]) -> None:
        over = self._channels.pop(key)
        for rank in over.ranks:
            rank.channels.remove(over)


class SimulatedTransport(Transport):
    """Messages between ranks of one process, in virtual time."""

    def __init__(
        self, registry: ChannelRegistry, me: Rank, name: str = "world", numbers: tuple[int, ...] | None = None
    ) -> None:
        self._registry = registry
        self._me = me
        self._numbers = tuple(range(len(registry.ranks))) if numbers is None else numbers
        self._channel = registry.channel(name, self._numbers)
        self.rank, self.size = self._numbers.index(me.number), len(self._numbers)
        self.world_rank = me.number
        self.hosts = tuple(registry.network.hosts[number].name for number in self._numbers)
        self.cluster = registry.network.cluster
        self.seed = f"{self.cluster.seed} {me.number} {name}"
        self.bytes_sent = 0
        self._sequence, self._concurrent = OperationSequence(), ConcurrentOperations()
        self._opened: dict[tuple[str, tuple[int, ...]], int] = {}
        self._children: WeakSet[SimulatedTransport] = WeakSet()
        self._closed = False
        me.channels.append(self._channel)

    @property
    def timeout(self) -> timedelta:  # type: ignore[override]
        return self._me.timeout

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        if self._closed or not 0 <= dst < self.size or dst == self.rank:
            raise self._refusal(dst)
        me, channel = self._me, self._channel
        box = channel.boxes.get((self.rank, dst, tag)) or channel.box(self.rank, dst, tag)
        self.bytes_sent += tensor.nbytes
        if not me.stepping:
            message = SimulatedMessage(box, tensor)
            me.engine.at(me.clock, message.depart)
            return message
        if (sent := box.send_straight(tensor)) is not None:
            return sent
        message = SimulatedMessage(box, tensor)
        message.depart()
        return message

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        if self._closed or (src != ANY and (not 0 <= src < self.size or src == self.rank)):
            raise self._refusal(src)
        channel = self._channel
        if src == ANY:
            mailbox: Mailbox | AnySourceMailbox = channel.any_source_mailbox(self.rank, tag)
        else:
            mailbox = channel.boxes.get((src, self.rank, tag)) or channel.box(src, self.rank, tag)
        receive = Receive(self._me, tensor, src, mailbox)
        mailbox.ask(receive)
        return receive

    def channel(self, name: str, ranks: Sequence[int] | None = None) -> "SimulatedTransport":
        numbers = self._numbers if ranks is None else tuple(self._numbers[rank] for rank in ranks)
        count = self._opened[name, numbers] = self._opened.get((name, numbers), 0) + 1
        made = SimulatedTransport(self._registry, self._me, f"{self._channel.name}/{name}.{count}", numbers)
        self._children.add(made)
        return made

    def start(self, operation: Operation) -> Work:
        if self._closed:
            raise ConfigError(f"rank {self._me.number}: this transport is closed.")
        return self._sequence.start(self._me, operation)

    def spawn(self, operation: Operation, *, deadline: bool = True) -> Work:
        if self._closed:
            raise ConfigError(f"rank {self._me.number}: this transport is closed.")
        return self._concurrent.start(self._me, operation, deadline)

    def signal(self) -> Signal:
        return SimulatedSignal(self._me)

    def now(self) -> float:
        return self._me.time

    def elapse(self, seconds: float) -> None:
        """Compute for `seconds`, on a rank of speed 1; this rank may take longer or less."""
        if not 0 <= seconds < float("inf"):
            raise ConfigError(f"rank {self._me.number}: elapse takes seconds, 0 or more, got {seconds}.")
        self._me.elapse(seconds)

    def interrupt(self) -> None:
        self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for channel in list(self._children):
            channel.close()
        self._children.clear()
        me = self._me
        for operations in (self._sequence, self._concurrent):
            operations.fail(RankLost(f"rank {me.number}: this transport was closed with work still to do."))
        why = "it has closed this channel"
        me.engine.at(max(me.time, me.engine.now), partial(self._channel.close, me, why))

    def shared(self) -> Transport:
        """The same channel with sums in memory, for ranks of one host."""
        from tutti.simulation.shared_memory import SimulatedMemory

        return SimulatedMemory(self)

    def member(self) -> tuple[Rank, SimulatedChannel]:
        """Who talks to whom here, for those who add to it. Refused once it is closed."""
        if self._closed:
            raise self._refusal(self.rank)
        return self._me, self._channel

    def _refusal(self, peer: int) -> ConfigError:
        if self._closed:
            return ConfigError(f"rank {self._me.number}: this transport is closed.")
        return ConfigError(f"rank {self._me.number}: no peer {peer} in a world of {self.size}.")
