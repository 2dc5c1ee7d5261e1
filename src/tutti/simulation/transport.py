"""The transport of simulated ranks: the interface of any transport, over channels in virtual time.

How it works
------------
All transports of a simulation share one `ChannelRegistry`. Ranks that open a channel of the same name and members, for
the same time, get the same `SimulatedChannel`, whenever each of them comes: a count per name and members makes the
second one another channel. The registry forgets a channel when all members have closed it.

A send by the rank's thread is scheduled at the rank's clock, which may be ahead of the engine. A send inside an
operation happens at the engine's time, so it departs at once, and takes the short path of `Mailbox.send_direct` where
it can. Receives are posted at once in both cases: posting one early changes nothing that another rank could see.

`close` closes channels opened from it first, fails its own operations, and schedules the end of its channel at this
rank's time: peers that wait for it then get `RankLost`. Nothing here blocks.
"""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from weakref import WeakSet

from torch import Tensor

from tutti.errors import ConfigError, RankLost
from tutti.simulation.channel import SimulatedChannel
from tutti.simulation.mailboxes import AnySourceMailbox, Mailbox
from tutti.simulation.messages import Receive, SimulatedMessage
from tutti.simulation.network import Network
from tutti.simulation.rank import Rank
from tutti.simulation.work import ConcurrentOperations, OperationSequence, SimulatedSignal
from tutti.transports.base import ANY, Operation, Signal, Transport, Work


class ChannelRegistry:
    """State that all transports of one simulation share: its ranks, its network, and the open channels."""

    def __init__(self, ranks: list[Rank], network: Network) -> None:
        self.ranks = ranks
        """All ranks, by number. Ranks may be added."""
        self.network = network
        self._channels: dict[tuple[str, tuple[int, ...]], SimulatedChannel] = {}

    def channel(self, name: str, numbers: tuple[int, ...]) -> SimulatedChannel:
        """Return the channel of that name between these ranks; made by the first of them that asks."""
        key = (name, numbers)
        if key not in self._channels:
            ranks = [self.ranks[number] for number in numbers]
            made = self._channels[key] = SimulatedChannel(name, ranks, self.network, partial(self._remove, key))
            for rank in ranks:
                rank.take_part(made)
            return made
        return self._channels[key]

    def _remove(self, key: tuple[str, tuple[int, ...]]) -> None:
        channel = self._channels.pop(key)  # All members have closed it: a long simulation opens many.
        for rank in channel.ranks:
            if channel in rank.channels:  # Not of a rank that was gone before.
                rank.channels.remove(channel)


class SimulatedTransport(Transport):
    """Messages between ranks of one process, in virtual time."""

    def __init__(
        self, registry: ChannelRegistry, me: Rank, name: str = "world", numbers: tuple[int, ...] | None = None
    ) -> None:
        self._registry = registry
        self._me = me
        self._numbers = tuple(range(len(registry.ranks))) if numbers is None else numbers
        """The members' numbers in the world."""
        self._channel = registry.channel(name, self._numbers)
        self.rank, self.size = self._numbers.index(me.number), len(self._numbers)
        self.world_ranks = self._numbers
        self.hosts = tuple(registry.network.hosts[number].name for number in self._numbers)
        self.cluster = registry.network.cluster
        # By rank and channel, so that no two of them draw the same random times.
        self.seed = f"{self.cluster.seed} {me.number} {name}"
        self.bytes_sent = 0
        self._sequence, self._concurrent = OperationSequence(), ConcurrentOperations()
        self._num_opened: dict[tuple[str, tuple[int, ...]], int] = {}
        """How often each name was opened for these members."""
        self._children: WeakSet[SimulatedTransport] = WeakSet()
        """Channels opened from this one. Weak: one that is used no more need not be closed from here."""
        self._closed = False

    @property
    def timeout(self) -> timedelta:  # type: ignore[override]
        return self._me.timeout

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        if self._closed or not 0 <= dst < self.size or dst == self.rank:
            raise self._refusal(dst)
        me, channel = self._me, self._channel
        # The lookup is written out, as this line runs for every message.
        mailbox = channel.mailboxes.get((self.rank, dst, tag)) or channel.mailbox(self.rank, dst, tag)
        self.bytes_sent += tensor.nbytes
        if not me.stepping:  # The rank's clock may be ahead of the engine: departing now would be too early.
            message = SimulatedMessage(mailbox, tensor)
            me.engine.schedule(me.clock, message.depart)
            return message
        if (sent := mailbox.send_direct(tensor)) is not None:
            return sent
        message = SimulatedMessage(mailbox, tensor)
        message.depart()
        return message

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        if self._closed or (src != ANY and (not 0 <= src < self.size or src == self.rank)):
            raise self._refusal(src)
        channel = self._channel
        # A receive from anyone looks at all senders' mailboxes, in order of arrival; the other looks at one.
        if src == ANY:
            mailbox: Mailbox | AnySourceMailbox = channel.any_source_mailbox(self.rank, tag)
        else:
            mailbox = channel.mailboxes.get((src, self.rank, tag)) or channel.mailbox(src, self.rank, tag)
        receive = Receive(self._me, tensor, src, mailbox)
        mailbox.post(receive)
        return receive

    def channel(self, name: str, ranks: Sequence[int] | None = None) -> "SimulatedTransport":
        numbers = self._numbers if ranks is None else tuple(self._numbers[rank] for rank in ranks)
        # Every member counts alike, so the n-th opening of a name is one channel on all of them.
        count = self._num_opened[name, numbers] = self._num_opened.get((name, numbers), 0) + 1
        opened = SimulatedTransport(self._registry, self._me, f"{self._channel.name}/{name}.{count}", numbers)
        self._children.add(opened)
        return opened

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

    def sleep(self, seconds: float) -> None:
        self._me.sleep(seconds)

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
        self._closed = True  # First: operations that fail below may try to use this transport.
        for child in list(self._children):
            child.close()
        self._children.clear()
        me = self._me
        for operations in (self._sequence, self._concurrent):
            operations.fail(RankLost(f"rank {me.number}: this transport was closed with work still to do."))
        why = "it has closed this channel"
        if me.gone is not None:  # Its channels are closed when the others learn that it is gone.
            return
        # A rank that is being unwound may be behind the engine, and nothing can be scheduled in the past.
        me.engine.schedule(max(me.time, me.engine.now), partial(self._channel.close, me, why))

    def shared(self) -> Transport:
        """Return the same channel with sums in shared memory, for ranks of one host."""
        from tutti.simulation.shared_memory import SimulatedSharedMemory  # It imports this module.

        return SimulatedSharedMemory(self)

    def member(self) -> tuple[Rank, SimulatedChannel]:
        """Return the rank and the channel, for a wrapper. Raises `ConfigError` once this is closed."""
        if self._closed:
            raise self._refusal(self.rank)
        return self._me, self._channel

    def _refusal(self, peer: int) -> ConfigError:
        if self._closed:
            return ConfigError(f"rank {self._me.number}: this transport is closed.")
        return ConfigError(f"rank {self._me.number}: no peer {peer} in a world of {self.size}.")
