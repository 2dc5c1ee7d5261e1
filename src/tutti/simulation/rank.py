"""A simulated rank: its clock, its thread, its waits, and the account of its time.

How it works
------------
A rank has its own clock, which may be ahead of the engine's: it computes as far as it can without knowing what others
did meanwhile. What it sends is scheduled at the time of its own clock. Before it reads anything that another rank may
have changed, it lets the engine catch up (see `waits`). So no rank sees an effect before its cause.

Operations of a rank (`work.SimulatedOperation`) are advanced by the engine while the rank computes or waits. During
such a step `stepping` is True, and the time is the engine's, not the rank's clock.

A rank ends in one of three ways, and `leave` then closes its channels, which fails the waits of its peers:

- Its function returns or raises: `resume` sees that the thread has ended, and schedules `leave` at the rank's clock.
- It is killed: `_die` is on the event queue at the time that the cluster's `failures` give, or `kill` is called. It
  ends a wait at once; a rank that computes is stopped when its clock passes that time (`check_alive`).
- The simulation stops, or a deadlock is found: the next `check_alive` unwinds the thread.

Where ranks come and go (`simulation.runs.elastic`), `on_gone` is called instead: the others learn of a loss later.

A stopped rank (`stop`) does nothing, as a process that got SIGSTOP: its thread gets no turn, its operations do not
advance, and nothing that it sent by its own clock departs. All of it is kept in `stopped`, and done by `go_on`.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tutti.cluster import Cluster, Host, format_time
from tutti.errors import ConfigError, RankLost
from tutti.simulation.engine import Engine
from tutti.simulation.randomness import Randomness
from tutti.simulation.rank_thread import RankThread
from tutti.simulation.time_account import ComputeSpeed, TimeAccount, TravelTime
from tutti.simulation.waits import Waiter

if TYPE_CHECKING:
    from tutti.simulation.channel import SimulatedChannel


_LEFT = "it goes on with other ranks"


class Rank:
    """One simulated rank. `thread` runs its function, `waiter` does its waiting."""

    def __init__(
        self, engine: Engine, number: int, host: Host, cluster: Cluster, timeout: timedelta, place: int | None = None
    ) -> None:
        """Make a rank that has not started.

        Args:
            place: the number under which the cluster slows ranks down; `number` by default.
        """
        self.engine = engine
        self.number = number
        self.host = host
        self.timeout = timeout
        """Virtual time after which a wait for other ranks fails."""
        self.clock = 0.0
        """The rank's own virtual time, in seconds; never behind what it knows of."""
        self.stepping = False
        """Whether an operation of this rank is being advanced, at the engine's time and not at the rank's own."""
        self.thread = RankThread(engine, f"rank {number}")
        self.waiter = Waiter(self)
        self.randomness = Randomness()
        self.channels: list[SimulatedChannel] = []
        self.gone: str | None = None
        """The reason why this rank has left the simulation; None as long as it takes part."""
        self.lost_a_peer = False
        """Whether this rank has left only because it lost another one."""
        self.time_account = TimeAccount()
        self.travel = TravelTime()
        self.num_messages = 0
        self.dies_s = cluster.failures.get(number, float("inf"))
        """Time at which this rank is killed, by the cluster's `failures` or by `kill`; infinite for most."""
        self.stopped: list[Callable[[], None]] | None = None
        """While it is stopped: what it would have done. None otherwise."""
        self.on_gone: Callable[[], None] = self.close_channels
        """Called when it is gone."""
        self._has_closed = False
        self._left: set[str] = set()
        """Names of transports that this rank has left for good."""
        self._speed = ComputeSpeed(cluster, number, cluster.speed_of(number if place is None else place, host))

    @property
    def time(self) -> float:
        """The virtual time of whatever acts for this rank now: an operation of it, or its thread."""
        return self.engine.now if self.stepping else self.clock

    def start(self, function: Callable[[], Any], at_s: float = 0.0) -> None:
        """Start the thread, and schedule its first turn and its death."""
        self.thread.start(function)
        self.clock = at_s
        # Ranks that begin at the same time are started in the order of their numbers, and so run in it.
        self.engine.schedule(at_s, self.resume)
        if self.dies_s < float("inf"):
            self.engine.schedule(self.dies_s, self._die)

    def resume(self) -> None:
        """Let the thread run until it waits or ends. An action of the engine."""
        thread = self.thread
        if thread.ended:  # Its death resumed and ended it before this event.
            return
        if self.stopped is not None and not thread.died:
            self.stopped.append(self.resume)
            return
        self.engine.run_rank(self)
        if thread.ended:
            self.time_account.flush()
            # Peers learn of the end at the time of this rank's clock, which may be ahead of the engine's.
            lost_a_peer = isinstance(thread.error, RankLost)
            why = "it has left" if thread.error is None else f"it failed: {type(thread.error).__name__}"
            self.engine.schedule(max(self.clock, self.engine.now), lambda: self.leave(why, lost_a_peer))

    def leave(self, why: str, lost_a_peer: bool = False) -> None:
        """Leave the simulation: close all channels, which fails the waits for this rank with the reason `why`."""
        # The first reason stays: a rank that died must not be reported as one that left.
        if self.gone is None:
            self.gone, self.lost_a_peer = why, lost_a_peer
            self.on_gone()

    def close_channels(self) -> None:
        """Close all channels of this rank, which is gone, and those that others open with it from now on."""
        assert self.gone is not None
        self._has_closed = True
        for channel in list(self.channels):
            channel.close(self, self.gone)

    def take_part(self, channel: "SimulatedChannel") -> None:
        """A channel with this rank is made."""
        if self._has_closed:
            assert self.gone is not None
            channel.close(self, self.gone)
        elif channel.name.partition("/")[0] in self._left:
            channel.close(self, _LEFT)
        else:
            self.channels.append(channel)

    def leave_transport(self, name: str) -> None:
        """Close all channels of a transport, and those that others open of it from now on. An action of the engine."""
        self._left.add(name)
        for channel in list(self.channels):
            if channel.name.partition("/")[0] == name:
                channel.close(self, _LEFT)

    def kill(self) -> None:
        """End this rank now, as SIGKILL would. An action of the engine."""
        if self.gone is None:
            self.dies_s = self.engine.now
            self._die()

    def stop(self) -> None:
        """Stop this rank now, as SIGSTOP would. An action of the engine."""
        if self.stopped is None:
            self.stopped = []

    def go_on(self) -> None:
        """Let a stopped rank go on. An action of the engine."""
        held, self.stopped = self.stopped or [], None
        for action in held:
            self.engine.schedule(self.engine.now, action)

    def _die(self) -> None:
        """End this rank at `dies_s`. An action of the engine."""
        thread = self.thread
        if thread.ended and not thread.died:  # It came to its end before.
            return
        thread.died = True
        # Before its thread unwinds: from this moment on, peers must not wait for it any more.
        self.leave(f"it died at {format_time(self.dies_s)}")
        self.go_on()
        # A rank that waits is woken, and unwinds in `pause`. Any other one unwinds at its next `check_alive`.
        if not thread.ended and self.waiter.interrupt(self.dies_s):
            self.resume()

    def pause(self) -> None:
        """Yield the turn until the engine resumes this rank; raises `Stopped` if it is to go no further."""
        self.check_alive()
        self.thread.yield_turn()
        self.check_alive()  # It may have died, or the simulation ended, while it waited.

    def check_alive(self) -> None:
        """Unwind the thread if this rank is to go no further. Raises `ConfigError` inside an operation."""
        thread = self.thread
        # Operations run in the engine's thread: to wait there would stop the simulation.
        if self.stepping:
            raise ConfigError(
                f"rank {self.number}: operations yield the work they wait for; they neither wait nor compute."
            )
        if self.clock >= self.dies_s:
            thread.died = True
        elif not self.engine.stopping and self.gone is None and thread.doom is None:
            return
        thread.unwind()

    def sleep(self, seconds: float) -> None:
        """Do nothing for so long."""
        self.spend_waiting(self.clock + seconds, self.travel.before(self.clock))
        self.check_alive()
        self.waiter.catch_up()

    def elapse(self, seconds: float) -> None:
        """Compute for as long as a rank of speed 1 would in `seconds`."""
        # A rank that dies meanwhile computes until then, so its account of time is exact.
        stop_s = min(self._speed.finish_s(self.clock, seconds), self.dies_s)
        self.time_account.add_computing(self.clock, stop_s)
        self.clock = stop_s
        self.check_alive()

    def spend_waiting(self, time_s: float, travelled_s: float) -> None:
        """Move the clock to `time_s`, as waiting.

        The part of it in which messages to or from this rank travelled counts as communicating; `travelled_s` is how
        long they had travelled before.
        """
        spent_s = time_s - self.clock
        if spent_s <= 0:
            return
        # Arrivals may be known ahead of time: `before` leaves out what travels after `time_s`.
        communicating_s = min(spent_s, max(0.0, self.travel.before(time_s) - travelled_s))
        self.time_account.add_waiting(self.clock, time_s, communicating_s)
        self.clock = time_s
