"""`RunTargets`: the workers and hosts of a run, as chaos reaches them."""

import signal
from typing import Protocol

from tutti.launch.launcher import Launcher
from tutti.launch.supervised_worker import SupervisedWorker


class ChangeableWorkers(Protocol):
    """The workers of a run, which may come and go."""

    def running(self) -> list[SupervisedWorker]:
        """Return the workers that run."""
        ...

    def can_end_one(self, slot: int, *, leaves: bool) -> bool:
        """Whether a worker may be lost, or leave, without ending the run."""
        ...

    def add(self, count: int) -> tuple[bool, str]:
        """Start more workers; return whether that is possible, and what came of it."""
        ...


class RunTargets:
    """`ChaosTargets` of a run."""

    def __init__(self, workers: ChangeableWorkers, launcher: Launcher) -> None:
        self._workers, self._launcher = workers, launcher

    def slots(self) -> list[int]:
        """Return the places in which a worker runs."""
        return sorted(worker.slot for worker in self._workers.running())

    def can_end(self, slot: int, *, leaves: bool) -> bool:
        """Whether a worker may be lost, or leave, without ending the run."""
        return self._workers.can_end_one(slot, leaves=leaves)

    def signal(self, slot: int, sign: signal.Signals) -> None:
        """Send a signal to the worker in a place, and to all that it has started."""
        for worker in self._there(slot):
            worker.process.signal_group(sign)

    def add(self) -> str:
        """Start a worker more; return what came of it."""
        return self._workers.add(1)[1]

    def leave(self, slot: int) -> None:
        """Ask the worker in a place to leave."""
        for worker in self._there(slot):
            worker.ask_to_leave()

    def link(self, host: int, *, up: bool) -> None:
        """Put the link of a lab's host up or down."""
        self._launcher.link(host, up=up)

    def _there(self, slot: int) -> list[SupervisedWorker]:
        return [worker for worker in self._workers.running() if worker.slot == slot]
