"""`SimulatedLauncher`: starts simulated ranks, and others in place of lost ones.

How it works. It does in virtual time what the supervisor of a real run does (`tutti.launch.worker_changes`), with the
same rules: `Restarts` has the back-off. A place is that of a worker on its host. Whoever
is started in it later has another number. Starting takes `STARTUP_S`.

All of it are actions of the engine, but for `_run`, which is the function of the ranks' threads.
"""

import os
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from tutti.cluster import Host
from tutti.coordination.elastic_member import WorldLimits
from tutti.errors import TrainingEnded
from tutti.launch.elastic_run import ElasticRun
from tutti.launch.restarts import Restarts
from tutti.launch.worker import describe_failure
from tutti.simulation.engine import Engine
from tutti.simulation.rank import Rank
from tutti.simulation.recovery import STARTUP_S
from tutti.simulation.runs.elastic.chaos import SimulatedChaos, SimulatedTargets
from tutti.simulation.runs.elastic.coordinator import SimulatedCoordinator
from tutti.simulation.runs.elastic.worker import SimulatedWorker
from tutti.simulation.runs.elastic.world import SimulatedConnections, join
from tutti.simulation.transport import ChannelRegistry
from tutti.world import World

Start = Callable[[Rank, Callable[[], World]], Any]
"""Makes the calling thread a rank of the world that is returned, and calls the user's function."""


class SimulatedLauncher:
    """The ranks of a simulated run that come and go."""

    def __init__(
        self,
        engine: Engine,
        registry: ChannelRegistry,
        elastic: ElasticRun,
        places: Sequence[Host],
        start: Start,
        timeout: timedelta,
    ) -> None:
        """Run what `start` does in every rank, on the hosts of `places`. The ranks of `registry` are added to."""
        self._engine, self._registry, self._elastic = engine, registry, elastic
        self._ranks = registry.ranks
        self._places, self._start, self._timeout = places, start, timeout
        self.workers: list[SimulatedWorker] = []
        self._restarts = Restarts(elastic.restarts, lambda: engine.now)
        self._coordinator = SimulatedCoordinator(engine, registry.network, self._end)
        self.joined: dict[int, float] = {}
        """When each rank was first among the others."""
        self.log: list[tuple[float, str]] = []
        """What was done to ranks, and when."""
        targets = SimulatedTargets(self, self._coordinator, registry.network, places)
        self._chaos = None if elastic.chaos is None else SimulatedChaos(elastic.chaos, targets, engine, self._note)
        self._tells: bool | None = None

    def begin(self) -> None:
        """Start the first ranks."""
        for slot in range(self._elastic.num_started):
            self._start_in(slot, is_new=False)

    def _note(self, text: str) -> None:
        self.log.append((self._engine.now, text.removeprefix("chaos: ")))

    # Ranks

    def _start_in(self, slot: int, *, is_new: bool) -> SimulatedWorker:
        network, number, now = self._registry.network, len(self._ranks), self._engine.now
        host = self._places[slot]
        if number >= len(network.hosts):
            network.hosts.append(host)
        else:
            network.hosts[number] = host
        rank = Rank(self._engine, number, host, network.cluster, self._timeout, place=slot)
        self._ranks.append(rank)
        worker = SimulatedWorker(rank, slot, is_new, now)
        self.workers.append(worker)
        rank.on_gone = partial(self._gone, worker)
        rank.start(partial(self._run, worker), now + (STARTUP_S if is_new else 0.0))
        return worker

    def _run(self, worker: SimulatedWorker) -> Any:
        """Be a rank. The target of its thread."""
        worker.rank.check_alive()  # It may have been ended while it started.
        made: list[World] = []

        def world() -> World:
            made.append(self._join(worker))
            return made[0]

        try:
            return self._start(worker.rank, world)
        finally:
            if made and not worker.rank.thread.died:
                made[0].close()
                made[0].elastic.member.member.bye()  # type: ignore[union-attr]

    def _join(self, worker: SimulatedWorker) -> World:
        elastic, rank = self._elastic, worker.rank
        # As many computing threads as a launch of so many workers here would give each, so that sums agree to the bit.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // elastic.num_started))
        member = self._coordinator.connect(rank)
        connections = SimulatedConnections(self._registry, rank, lambda: setattr(worker, "has_left", True))
        limits = WorldLimits(elastic.minimum, elastic.maximum, expected=elastic.num_started)
        world = join(member, limits, connections, rank, partial(_requested, worker))
        world.tolerate_loss = partial(self._tolerates_loss, worker)
        return world

    def _tolerates_loss(self, worker: SimulatedWorker, yes: bool) -> None:
        """A rank trains. Called by its thread."""
        if yes:
            self._engine.schedule(max(worker.rank.clock, self._engine.now), partial(self._joined, worker))

    def _joined(self, worker: SimulatedWorker) -> None:
        worker.has_joined = True
        self.joined.setdefault(worker.rank.number, self._engine.now)
        self._tell()
        first = self.workers[: self._elastic.num_started]
        if self._chaos is not None and all(each.has_joined for each in first):
            self._chaos.start()

    def _gone(self, worker: SimulatedWorker) -> None:
        """A rank has ended."""
        rank = worker.rank
        if rank.thread.died:
            self._coordinator.ended(rank)
        else:
            rank.close_channels()  # As its process does at its end.
        if self._is_lost(worker):
            delay_s = self._restarts.lost(worker.slot, self._engine.now - worker.started_s)
            if delay_s is not None:
                self._engine.schedule(self._engine.now + delay_s, self._start_due)
        if any(each.has_finished for each in self.workers):
            self._end_of_training()
        self._coordinator.is_over = not self.running() and not self._restarts.waiting
        self._tell()

    def _is_lost(self, worker: SimulatedWorker) -> bool:
        """Whether another one takes the place of a rank that has ended."""
        if worker.has_finished or worker.has_left or worker.is_removed or worker.is_asked_to_leave:
            return False
        if any(each.has_finished for each in self.workers):
            return False
        error = worker.rank.thread.error
        if worker.rank.thread.died or error is None:
            return worker.rank.thread.died
        return not isinstance(error, TrainingEnded) and not describe_failure(error).is_mistake

    def _end_of_training(self) -> None:
        self._restarts.cancel()
        running = self.running()
        if running and all(worker.is_new and not worker.has_joined for worker in running):
            for worker in running:
                self.remove(worker)

    def remove(self, worker: SimulatedWorker) -> None:
        """End a rank that nobody needs."""
        worker.is_removed = True
        worker.rank.kill()

    def _start_due(self) -> None:
        for slot in self._restarts.due():
            self._start_in(slot, is_new=True)
        self._tell()

    def _end(self, number: int) -> None:
        """The others go on without a rank whose process is still there."""
        self._note(f"rank {number} was silent and is evicted")
        self._ranks[number].kill()

    def running(self) -> list[SimulatedWorker]:
        """Return the ranks that run."""
        return [worker for worker in self.workers if worker.runs]

    def _tell(self) -> None:
        """Tell the coordinator whether ranks are about to come."""
        starting = any(worker.is_new and not worker.has_joined for worker in self.running())
        come = bool(self._restarts.waiting) or starting
        if come != self._tells:
            self._tells = come
            self._coordinator.more_come(come)

    def add(self) -> str:
        """Start a rank more; return what came of it."""
        taken = {worker.slot for worker in self.running()} | self._restarts.waiting
        if len(taken) >= self._elastic.maximum:
            return f"the run has {len(taken)} workers, which is its maximum"
        slot = next(slot for slot in range(self._elastic.maximum) if slot not in taken)
        worker = self._start_in(slot, is_new=True)
        self._tell()
        return f"rank {worker.rank.number} is started"

    @property
    def restarts_are_left(self) -> bool:
        """Whether another one would take the place of a rank that is lost."""
        return bool(self._restarts.left)


def _requested(worker: SimulatedWorker) -> int:
    """Return the signal that asked a rank to leave; 0 if none did. Called by the rank's thread."""
    worker.rank.waiter.catch_up()  # Between two steps: what has happened by now is known from here on.
    return int(signal.SIGTERM) if worker.is_asked_to_leave else 0
