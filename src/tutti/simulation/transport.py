"""The transport of simulated ranks."""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from weakref import WeakSet

from torch import Tensor

from tutti.errors import ConfigError, RankLost
from tutti.simulation.messages import Conversation, Mailbox, Message, OpenBox, Receive
from tutti.simulation.network import Network
from tutti.simulation.rank import Rank
from tutti.simulation.work import LooseTasks, SimulatedSignal, Tasks
from tutti.transports.base import ANY, Operation, Signal, Transport, Work


class Stage:
    """All that the transports of one simulation share: ranks, network and conversations."""

    def __init__(self, ranks: Sequence[Rank], network: Network) -> None:
        self.ranks = tuple(ranks)
        self.network = network
        self._conversations: dict[tuple[str, tuple[int, ...]], Conversation] = {}

    def conversation(self, name: str, numbers: tuple[int, ...]) -> Conversation:
        """The one of that name between these ranks."""
        key = (name, numbers)
        if key not in self._conversations:
            ranks, over = [self.ranks[each] for each in numbers], partial(self._forget, key)
            self._conversations[key] = Conversation(name, ranks, self.network, over)
        return self._conversations[key]

    def _forget(self, key: tuple[str, tuple[int, ...]]) -> None:
        over = self._conversations.pop(key)
        for rank in over.ranks:
            rank.conversations.remove(over)


class SimulatedTransport(Transport):
    """Messages between ranks of one process, in virtual time."""

    def __init__(self, stage: Stage, me: Rank, name: str = "world", numbers: tuple[int, ...] | None = None) -> None:
        self._stage = stage
        self._me = me
        self._numbers = tuple(range(len(stage.ranks))) if numbers is None else numbers
        self._talk = stage.conversation(name, self._numbers)
        self.rank, self.size = self._numbers.index(me.number), len(self._numbers)
        self.world_rank = me.number
        self.hosts = tuple(stage.network.hosts[number].name for number in self._numbers)
        self.cluster = stage.network.cluster
        self.seed = f"{self.cluster.seed} {me.number} {name}"
        self.bytes_sent = 0
        self._tasks, self._loose = Tasks(), LooseTasks()
        self._opened: dict[tuple[str, tuple[int, ...]], int] = {}
        self._channels: WeakSet[SimulatedTransport] = WeakSet()
        self._closed = False
        me.conversations.append(self._talk)

    @property
    def timeout(self) -> timedelta:  # type: ignore[override]
        return self._me.timeout

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        if self._closed or not 0 <= dst < self.size or dst == self.rank:
            raise self._refusal(dst)
        me, talk = self._me, self._talk
        box = talk.boxes.get((self.rank, dst, tag)) or talk.box(self.rank, dst, tag)
        self.bytes_sent += tensor.nbytes
        if not me.stepping:
            message = Message(box, tensor)
            me.engine.at(me.clock, message.depart)
            return message
        if (sent := box.send_straight(tensor)) is not None:
            return sent
        message = Message(box, tensor)
        message.depart()
        return message

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        if self._closed or (src != ANY and (not 0 <= src < self.size or src == self.rank)):
            raise self._refusal(src)
        talk = self._talk
        if src == ANY:
            place: Mailbox | OpenBox = talk.open_box(self.rank, tag)
        else:
            place = talk.boxes.get((src, self.rank, tag)) or talk.box(src, self.rank, tag)
        receive = Receive(self._me, tensor, src, place)
        place.ask(receive)
        return receive

    def channel(self, name: str, ranks: Sequence[int] | None = None) -> "SimulatedTransport":
        numbers = self._numbers if ranks is None else tuple(self._numbers[rank] for rank in ranks)
        count = self._opened[name, numbers] = self._opened.get((name, numbers), 0) + 1
        made = SimulatedTransport(self._stage, self._me, f"{self._talk.name}/{name}.{count}", numbers)
        self._channels.add(made)
        return made

    def start(self, operation: Operation) -> Work:
        if self._closed:
            raise ConfigError(f"rank {self._me.number}: this transport is closed.")
        return self._tasks.start(self._me, operation)

    def spawn(self, operation: Operation, *, deadline: bool = True) -> Work:
        if self._closed:
            raise ConfigError(f"rank {self._me.number}: this transport is closed.")
        return self._loose.start(self._me, operation, deadline)

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
        for channel in list(self._channels):
            channel.close()
        self._channels.clear()
        me = self._me
        for tasks in (self._tasks, self._loose):
            tasks.fail(RankLost(f"rank {me.number}: this transport was closed with work still to do."))
        why = "it has closed this conversation"
        me.engine.at(max(me.time, me.engine.now), partial(self._talk.close, me, why))

    def shared(self) -> Transport:
        """The same conversation with sums in memory, for ranks of one host."""
        from tutti.simulation.shared_memory import SimulatedMemory

        return SimulatedMemory(self)

    def member(self) -> tuple[Rank, Conversation]:
        """Who talks to whom here, for those who add to it. Refused once it is closed."""
        if self._closed:
            raise self._refusal(self.rank)
        return self._me, self._talk

    def _refusal(self, peer: int) -> ConfigError:
        if self._closed:
            return ConfigError(f"rank {self._me.number}: this transport is closed.")
        return ConfigError(f"rank {self._me.number}: no peer {peer} in a world of {self.size}.")
