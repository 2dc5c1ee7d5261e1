"""`SimulatedCoordinator`: the coordinator of a simulated run, whose messages take virtual time.

How it works
------------
What it knows and decides is the real `CoordinatorState`. This module brings it what happens, at the virtual time at
which it would hear of it: a message takes the latency of its sender's host in each direction. The coordinator is on a
host of its own. All of this runs in the engine's thread, but for `connect` and `post`, which schedule only.

*Order.* A message departs by the clock of its sender, which may be ahead of the engine; departures happen in the order
of these times. From then on, messages of one connection are kept in a queue for each direction, so that none overtakes
another. What a stopped rank would send or receive is kept (`Rank.stopped`), as is what goes from or to a host that is
cut off.

*Losses.* A process that ends closes its connection, which the coordinator sees one latency later. It then has the
state of the process looked at by an observer, which is on every host, as in real runs. A rank that is stopped or cut
off is silent, and evicted after the patience; its process is ended then. When others are told of a loss, the channels
of the lost rank close: waits for it end.

*Time.* Real members send heartbeats, and the real coordinator looks at the time again and again. Here nothing happens
while nothing is to be noticed: `_tick` runs from every event on for as long as anything can follow from it by time
alone. So a simulation in which all wait for each other has no event left, which the engine reports as a deadlock.
"""

import json
from collections import deque
from collections.abc import Callable
from functools import partial

import tutti
from tutti.coordination.description import MemberDescription, ProcessState
from tutti.coordination.frames import Message
from tutti.coordination.member import Member
from tutti.coordination.state import CoordinatorState
from tutti.simulation.engine import Engine
from tutti.simulation.network import Network
from tutti.simulation.rank import Rank
from tutti.simulation.recovery import NOTICE_S, PATIENCE_S
from tutti.simulation.runs.elastic.member import SimulatedMember

_SOON_S = NOTICE_S / 2
"""How soon the time is looked at after the end of a connection."""
_FOLLOWS_S = 5.0
"""How long after the patience something may still follow from an event by time alone."""
_LAUNCHER = "launcher"


class _Connection:
    """The connection of a rank or an observer."""

    def __init__(self, member: Member, host: str, latency_s: float, rank: Rank | None) -> None:
        self.member, self.host, self.latency_s, self.rank = member, host, latency_s, rank
        self.sent: deque[Message] = deque()
        """On their way to the coordinator."""
        self.received: deque[Message] = deque()
        """On their way from it."""


class SimulatedCoordinator:
    """The members of a simulated run."""

    def __init__(self, engine: Engine, network: Network, evict: Callable[[int], None]) -> None:
        """Start without members; `evict` is called with the number of a rank that the others go on without."""
        self._engine, self._network, self._evict = engine, network, evict
        self._state = CoordinatorState(PATIENCE_S, "the launcher", engine.now)
        self._connections: dict[str, _Connection] = {}
        self._by_rank: dict[int, _Connection] = {}
        self._cut: dict[str, list[Callable[[], None]]] = {}
        """What waits until a host is reached again, by host."""
        self._awake_until, self._ticks_at = 0.0, float("inf")
        self._in_loop = False
        """Whether a member is told something now, by the engine's thread."""
        self.is_over = False
        """Whether all ranks have ended."""
        self._observers: dict[str, str] = {}
        """The member that looks at processes, by host."""
        self._num_observers = 0
        for host in dict.fromkeys(host.name for host in network.hosts):
            self._observe(host)

    def connect(self, rank: Rank) -> Member:
        """Make the member of a rank, and connect it. Called by the rank's thread."""
        host = rank.host.name
        # As a process: its number, and a start time, are all that anybody asks.
        description = MemberDescription(f"worker-{rank.number}", rank.number, host, host, rank.number, 0)
        member = SimulatedMember(description, rank, self.process_state)
        connection = self._by_rank[rank.number] = _Connection(member, host, _latency_s(self._network, host), rank)
        self._connections[description.id] = connection
        self._post(connection, member.hello(tutti.__version__))
        member.attach(partial(self._post, connection))
        return member

    def process_state(self, number: int) -> ProcessState:
        """Return the state of a rank's process."""
        rank = self._by_rank[number].rank
        assert rank is not None
        return "ended" if rank.gone is not None else "running" if rank.stopped is None else "stopped"

    def ended(self, rank: Rank) -> None:
        """A rank was killed: its connection breaks. An action of the engine."""
        connection = self._by_rank.get(rank.number)
        if connection is None:  # It was still starting.
            rank.close_channels()
            return
        self._travel(connection, lambda: self._engine_later(connection.latency_s, lambda: self._broken(connection)))

    def more_come(self, yes: bool) -> None:
        """The launcher has started more ranks, or is about to; or it is not."""
        self._state.generations.replaces[_LAUNCHER] = yes
        self.wake()

    def cut(self, host: str) -> None:
        """Let no message from or to a host through. An action of the engine."""
        self._cut.setdefault(host, [])
        self.wake()

    def restore(self, host: str) -> None:
        """Let messages through again. An action of the engine."""
        for action in self._cut.pop(host, []):
            action()
        if self._observers[host] not in self._state.members:
            self._observe(host)  # It was silent for too long, and was given up.
        self.wake()

    def _observe(self, host: str) -> None:
        """Have somebody on a host look at its processes."""
        self._num_observers += 1
        description = MemberDescription(f"observer-{self._num_observers}", -1, host, host, -self._num_observers, 0)
        member = SimulatedMember(description, None, self.process_state)
        self._observers[host] = description.id
        connection = _Connection(member, host, _latency_s(self._network, host), None)
        self._connections[description.id] = connection
        self._post(connection, member.hello(tutti.__version__))
        member.attach(partial(self._post, connection))

    # From members

    def _post(self, connection: _Connection, message: Message) -> None:
        """Send a message of a member. Called by the rank's thread at its clock, or by the engine's."""
        rank, now = connection.rank, self._engine.now
        at_s = now if rank is None or self._in_loop else max(rank.clock, now)
        # As JSON has it, and as it is now: its sender may change what is in it.
        self._engine.schedule(at_s, partial(self._depart, connection, json.loads(json.dumps(message))))

    def _depart(self, connection: _Connection, message: Message) -> None:
        rank = connection.rank
        if rank is not None and rank.thread.died:
            return
        if rank is not None and rank.stopped is not None:
            rank.stopped.append(partial(self._depart, connection, message))
            return

        def travel() -> None:
            connection.sent.append(message)
            self._engine_later(connection.latency_s, lambda: self._arrive(connection))

        self._travel(connection, travel)

    def _arrive(self, connection: _Connection) -> None:
        message, member = connection.sent.popleft(), connection.member.description.id
        if message["op"] == "hello":
            self._state.connect(message, self._engine.now)
        else:
            self._state.receive(member, message, self._engine.now)
        self._deliver()
        self.wake()

    def _broken(self, connection: _Connection) -> None:
        assert connection.rank is not None
        if connection.member.description.id in self._state.members:
            self._state.disconnect(connection.member.description.id, self._engine.now)
            self._deliver()
            self._tick_at(self._engine.now + _SOON_S)
            self.wake()
        else:
            connection.rank.close_channels()

    # To members

    def _deliver(self) -> None:
        """Send what the coordinator has to say, and follow its losses."""
        for member, message in self._state.drain():
            connection = self._connections[member]
            rank = connection.rank
            if message["op"] == "refused" and rank is not None and rank.gone is not None:
                rank.close_channels()
            self._travel(connection, partial(self._send, connection, json.loads(json.dumps(message))))
        while self._state.evicted:
            description, _ = self._state.evicted.popleft()
            if (evicted := self._connections[description.id].rank) is not None:
                self._evict(evicted.number)
                evicted.close_channels()

    def _send(self, connection: _Connection, message: Message) -> None:
        connection.received.append(message)
        self._engine_later(connection.latency_s, lambda: self._tell(connection))

    def _tell(self, connection: _Connection) -> None:
        rank = connection.rank
        if rank is not None and (rank.thread.died or rank.thread.ended):
            return
        if rank is not None and rank.stopped is not None:
            rank.stopped.append(lambda: self._tell(connection))
            return
        self._in_loop = True
        try:
            connection.member.received(connection.received.popleft())
        finally:
            self._in_loop = False

    def _travel(self, connection: _Connection, action: Callable[[], None]) -> None:
        """Do something to a connection, once its host can be reached."""
        if (held := self._cut.get(connection.host)) is not None:
            held.append(action)
        else:
            action()

    def _engine_later(self, seconds: float, action: Callable[[], None]) -> None:
        self._engine.schedule(self._engine.now + seconds, action)

    # Time

    def wake(self) -> None:
        """Something has happened, from which more may follow by time."""
        self._awake_until = self._engine.now + PATIENCE_S + _FOLLOWS_S
        if self._ticks_at == float("inf"):
            self._tick_at(self._engine.now + _SOON_S)

    def _tick_at(self, time_s: float) -> None:
        if time_s < self._ticks_at:
            self._ticks_at = time_s
            self._engine.schedule(time_s, partial(self._tick, time_s))

    def _tick(self, planned_s: float) -> None:
        """Look at the time. An action of the engine."""
        if planned_s != self._ticks_at:  # It was planned anew, for an earlier time.
            return
        now, self._ticks_at = self._engine.now, float("inf")
        if self.is_over:
            return
        for member, record in self._state.members.items():
            connection = self._connections[member]
            rank = connection.rank
            silent = rank is not None and (rank.stopped is not None or rank.gone is not None)
            if not silent and connection.host not in self._cut:
                record.heard_at = now  # Its heartbeat.
        delay_s = self._state.tick(now)
        self._deliver()
        if now < self._awake_until:
            self._tick_at(now + delay_s)


def _latency_s(network: Network, host: str) -> float:
    """Return the latency of messages to and from a host."""
    found = next(each for each in network.hosts if each.name == host)
    return (found.link or network.cluster.within).latency_s
