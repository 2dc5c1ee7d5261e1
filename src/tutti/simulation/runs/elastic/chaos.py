"""`SimulatedChaos`: failures of simulated ranks and hosts that are caused on purpose.

How it works. `ChaosRunner` decides what is due, as in real runs, by the virtual clock. What is due is an alarm of the
engine: it happens only while anything else is to come, so that failures to come do not hide a deadlock.
"""

import signal
from collections.abc import Callable, Sequence
from typing import Protocol

from tutti.cluster import Host
from tutti.launch.chaos import Chaos
from tutti.launch.chaos_runner import ChaosRunner
from tutti.simulation.engine import Engine
from tutti.simulation.network import Network
from tutti.simulation.runs.elastic.coordinator import SimulatedCoordinator
from tutti.simulation.runs.elastic.worker import SimulatedWorker

_ALARM = -1
"""The number of the engine's alarm for failures: ranks have others."""


class ChangeableRanks(Protocol):
    """The ranks of a simulated run."""

    @property
    def restarts_are_left(self) -> bool:
        """Whether another one would take the place of a rank that is lost."""
        ...

    def running(self) -> list[SimulatedWorker]:
        """Return the ranks that run."""
        ...

    def add(self) -> str:
        """Start a rank more; return what came of it."""
        ...

    def remove(self, worker: SimulatedWorker) -> None:
        """End a rank that nobody needs."""
        ...


class SimulatedTargets:
    """`ChaosTargets` of a simulated run."""

    def __init__(
        self, ranks: ChangeableRanks, coordinator: SimulatedCoordinator, network: Network, places: Sequence[Host]
    ) -> None:
        """Act on ranks and on the hosts of `places`."""
        self._ranks, self._coordinator, self._network = ranks, coordinator, network
        self._hosts = list(dict.fromkeys(host.name for host in places))

    def slots(self) -> list[int]:
        """Return the places in which a rank runs."""
        return sorted(worker.slot for worker in self._ranks.running())

    def can_end(self, slot: int, *, leaves: bool) -> bool:
        """Return whether a rank may be lost, or leave, without ending the run."""
        running = self._ranks.running()
        if leaves:  # Nobody takes its place, and if it is alone, it takes the state with it.
            stay = [worker for worker in running if worker.slot != slot and not worker.is_asked_to_leave]
            return any(worker.has_joined for worker in stay)
        return self._ranks.restarts_are_left or len(running) > 1

    def signal(self, slot: int, sign: signal.Signals) -> None:
        """Kill, stop or continue the rank in a place."""
        for worker in self._in(slot):
            actions = {signal.SIGKILL: worker.rank.kill, signal.SIGSTOP: worker.rank.stop}
            actions.get(sign, worker.rank.go_on)()
            self._coordinator.wake()

    def add(self) -> str:
        """Start a rank more; return what came of it."""
        return self._ranks.add()

    def leave(self, slot: int) -> None:
        """Ask the rank in a place to leave."""
        for worker in self._in(slot):
            worker.is_asked_to_leave = True
            if not worker.has_joined:
                self._ranks.remove(worker)

    def link(self, host: int, *, up: bool) -> None:
        """Put the link of a host up or down."""
        name = self._hosts[host]
        if up:
            self._network.restore(name)
            self._coordinator.restore(name)
        else:
            self._network.cut(name)
            self._coordinator.cut(name)

    def _in(self, slot: int) -> list[SimulatedWorker]:
        return [worker for worker in self._ranks.running() if worker.slot == slot]


class SimulatedChaos:
    """Causes failures in virtual time."""

    def __init__(self, chaos: Chaos, targets: SimulatedTargets, engine: Engine, note: Callable[[str], None]) -> None:
        """Cause the failures of `chaos` on `targets`, and `note` a line for each."""
        self._targets, self._engine = targets, engine
        self._runner = ChaosRunner(chaos, targets, note, lambda: engine.now)

    def start(self) -> None:
        """All ranks train: times count from now. Idempotent."""
        if not self._runner.has_started:
            self._runner.start()
            self._plan()

    def _plan(self) -> None:
        if (due_s := self._runner.next_due) is not None and self._targets.slots():
            self._engine.set_alarm(due_s, _ALARM, self._act)

    def _act(self) -> None:
        self._runner.act()
        self._plan()
