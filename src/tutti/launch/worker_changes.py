"""`WorkerChanges`: workers that are started, added and asked to leave while an elastic run goes on.

How it works. The supervisor's loop calls `act` in every round, and `lost` for each worker that the others go on
without. Everything happens in that thread. Three sources ask for changes:

- a loss: the slot of the worker gets another one after a while (`Restarts`), while restarts are left;
- a user, by `tutti workers` through the coordinator, who gets an answer at once;
- chaos.

A worker that leaves on purpose is not replaced. Once a worker has come to the end of the training, nobody is replaced
any more, and those that have not joined yet are ended when the last of the others has.

The coordinator is told whether workers are about to come. With fewer members than the minimum, the others wait for
these; without, they save their state and end.
"""

from collections.abc import Callable
from typing import Protocol

from tutti.coordination.launchers import ManagementRequest
from tutti.launch.chaos_runner import ChaosRunner
from tutti.launch.chaos_targets import RunTargets
from tutti.launch.elastic_run import ElasticRun
from tutti.launch.launcher import Launcher
from tutti.launch.restarts import Restarts
from tutti.launch.run_control import RunControl
from tutti.launch.supervised_worker import SupervisedWorker


class StartWorker(Protocol):
    """Starts a worker in a slot."""

    def __call__(self, slot: int, number: int, *, is_new: bool) -> SupervisedWorker:
        """Return the worker, which has the number `number`."""
        ...


class WorkerChanges:
    """Changes of the workers of one launcher."""

    def __init__(
        self,
        elastic: ElasticRun,
        launcher: Launcher,
        workers: list[SupervisedWorker],
        start: StartWorker,
        show: Callable[[str], None],
    ) -> None:
        """Change `workers`, the list of the supervisor, and `show` a line for what users should know."""
        self._elastic, self._workers = elastic, workers
        self._start, self._show = start, show
        self._restarts = Restarts(elastic.restarts)
        self._chaos = None if elastic.chaos is None else ChaosRunner(elastic.chaos, RunTargets(self, launcher), show)
        self._control: RunControl | None = None
        self._told: bool | None = None
        """What the coordinator was told last."""

    def begin(self, control: RunControl) -> None:
        """The workers of the beginning are about to be started."""
        self._control = control

    @property
    def are_expected(self) -> bool:
        """Whether further workers will be started."""
        return bool(self._restarts.waiting)

    def act(self) -> None:
        """Do what is due."""
        if any(worker.has_finished for worker in self._workers):
            self._end_of_training()
        for slot in self._restarts.due():
            self._start(slot, self._number(), is_new=True)
        while self._control is not None and self._control.requests:
            self._answer(self._control.requests.popleft())
        self._cause_chaos()
        self._tell()

    def lost(self, worker: SupervisedWorker) -> str:
        """Plan a worker in place of a lost one; return what will happen, for a message."""
        failure = worker.inbox.failure
        ended = any(each.has_finished for each in self._workers)
        if ended or worker.is_leaving or (failure is not None and failure.is_mistake and not worker.knocked_on):
            return ""
        delay_s = self._restarts.lost(worker.slot, (worker.ended_at or worker.started_at) - worker.started_at)
        self._tell()
        if delay_s is None:
            return "" if not self._elastic.restarts else ", and no restart is left"
        return f"; another worker takes its place in {delay_s:g} s"

    def cancel(self) -> None:
        """Start no more workers: the run is over."""
        self._restarts.cancel()

    def close(self) -> None:
        """End what chaos has begun."""
        if self._chaos is not None:
            self._chaos.close()

    def _end_of_training(self) -> None:
        self._restarts.cancel()
        running = self.running()
        if running and all(worker.is_starting for worker in running):
            for worker in running:
                worker.remove()

    def running(self) -> list[SupervisedWorker]:
        """Return the workers that run."""
        return [worker for worker in self._workers if worker.ended_at is None and not worker.is_removed]

    def _tell(self) -> None:
        """Tell the coordinator whether workers are about to come."""
        come = self.are_expected or any(worker.is_starting for worker in self.running())
        if come != self._told and self._control is not None:
            self._told = come
            self._control.replaces_workers(come)

    def _number(self) -> int:
        assert self._control is not None
        return self._control.take_numbers(1)

    # What users ask

    def _answer(self, asked: ManagementRequest) -> None:
        assert self._control is not None
        done, text = self.add(asked.number) if asked.action == "add" else self._remove(asked.number)
        self._control.answer(asked, text, done=done)

    def add(self, count: int) -> tuple[bool, str]:
        """Start more workers; return whether that is possible, and what came of it."""
        assert self._control is not None
        there, most = self._num_workers(), self._elastic.maximum
        if count < 1:
            return False, f"the number of workers to add is 1 or more, got {count}"
        if there + count > most:
            return False, f"the run has {there} workers, and at most {most} are allowed"
        numbers = [self._start(slot, self._number(), is_new=True).number for slot in self._free_slots(count)]
        self._tell()
        names = ", ".join(map(str, numbers))
        text = f"rank {names} was started"
        self._show(f"tutti: {text}")
        return True, text

    def _num_workers(self) -> int:
        """Number of workers of all launchers, with those that are about to come to this one."""
        assert self._control is not None
        own = {worker.number for worker in self.running()}
        return len(own | set(self._control.present())) + len(self._restarts.waiting)

    def _free_slots(self, count: int) -> list[int]:
        taken = {worker.slot for worker in self.running()} | self._restarts.waiting
        free = (slot for slot in range(len(taken) + count) if slot not in taken)
        return [next(free) for _ in range(count)]

    def _remove(self, number: int) -> tuple[bool, str]:
        """Ask a worker to leave; return whether that is possible, and what came of it."""
        worker = next((each for each in self.running() if each.number == number), None)
        if worker is None:
            known = ", ".join(str(each.number) for each in self.running())
            return False, f"this launcher runs no worker with rank {number}; it runs rank {known or 'none'}"
        there = self._num_workers()
        if there <= self._elastic.minimum:
            return False, f"the run has {there} workers, and needs {self._elastic.minimum}"
        worker.ask_to_leave()
        text = f"rank {number} is asked to leave"
        self._show(f"tutti: {text}")
        return True, text

    def can_end_one(self, slot: int, *, leaves: bool) -> bool:
        """Whether a worker may be lost, or leave, without ending the run.

        Nobody takes the place of one that leaves, and one that is alone takes the state with it.
        """
        if leaves:
            stay = [worker for worker in self.running() if worker.slot != slot and not worker.is_leaving]
            return any(worker.has_joined for worker in stay)
        return bool(self._restarts.left) or len(self.running()) > 1

    def _cause_chaos(self) -> None:
        if self._chaos is None:
            return
        if not self._chaos.has_started and all(worker.has_joined for worker in self._workers):
            self._chaos.start()
        self._chaos.act()
