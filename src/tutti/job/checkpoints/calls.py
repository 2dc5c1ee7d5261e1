"""`JobCheckpoints`: the part of a job that saves all state of a run, and continues from it."""

import logging
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args
from weakref import ref

from torch import nn

from tutti.checkpoint.background import BackgroundWriter
from tutti.checkpoint.interval import Every
from tutti.checkpoint.parts import PartRanks
from tutti.checkpoint.snapshots import EncodedSnapshot
from tutti.collectives.calls import Combine
from tutti.coordination.activity import IDLE
from tutti.data.sharded_data import ShardedData
from tutti.errors import CheckpointError, ConfigError
from tutti.job.checkpoints import signals
from tutti.job.checkpoints.first_rank import FirstRankState
from tutti.job.checkpoints.parts import LocalParts, load_parts, named_parts
from tutti.job.checkpoints.random_state import RandomStates, set_random_state
from tutti.job.checkpoints.restored import Restored, load_model, receive
from tutti.job.checkpoints.schedule import CheckpointSchedule, Schedules
from tutti.job.checkpoints.snapshot import keeping_buffers, take
from tutti.job.checkpoints.stop_requests import stop_requested
from tutti.job.membership import refuse_on_membership
from tutti.parallel.model_on_mesh import ModelOnMesh
from tutti.replica import HookedReplica
from tutti.world import World

if TYPE_CHECKING:
    from tutti.job.handle import Job

_log = logging.getLogger("tutti")

WhenBusy = Literal["wait", "skip"]
_WHEN_BUSY = get_args(WhenBusy)


class JobCheckpoints:
    """Checkpoints of a job. `Job` sets the fields."""

    _checkpoints: "Checkpoints"

    def checkpoint(
        self,
        run: str | PathLike[str],
        *parts: Any,
        every: Every | None = None,
        extra: Mapping[str, Any] | None = None,
        keep: int = 3,
        when_busy: WhenBusy = "wait",
    ) -> bool:
        """Save all state of the run to a new folder in `run`; return whether one was taken. Collective.

        Call it between two steps, on every rank. The state is copied at once and written in the background. It holds
        the model, the optimiser, the strategy's state, random states, and the states of the `parts`.

        Args:
            run: the folder of the run's checkpoints. Only the first rank writes, or each rank of the first replica if a
                mesh splits the model.
            parts: objects with `state_dict` and `load_state_dict`: what `shard` returned, schedulers, a GradScaler.
            every: take one only now and then: a number of steps, or a time such as "5m". `tutti run
                --checkpoint-every` overrules it. When the process gets SIGTERM or SIGUSR1, one more is written, and the
                program ends.
            extra: values of your own, which `restore` returns.
            keep: number of checkpoints that stay; older ones are deleted.
            when_busy: whether to "wait" if the one before is still being written, or to "skip" this one.
        """
        checkpoints = self._checkpoints
        if checkpoints.none_due(run, every):  # First of all: a loop calls this in every step.
            return False
        return checkpoints.checkpoint(run, parts, every, Request(dict(extra or {}), keep, when_busy))

    def track(self, *parts: Any) -> None:
        """State what belongs to the training beside model, optimiser and data, before the first batch.

        Only a run whose workers come and go needs it: the states of these parts go to workers that join, and are put
        back after a step that a lost worker has made void. What is given to `restore` need not be given here too.

        Args:
            parts: objects with `state_dict` and `load_state_dict`: learning-rate schedulers, a GradScaler.
        """
        self._checkpoints.parts.add(named_parts(parts))

    def restore(self, run: str | PathLike[str], *parts: Any) -> Restored | None:
        """Continue from the newest complete checkpoint in `run`; None if there is none yet. Collective.

        Call it after `distribute`, before the first step, on every rank. It may have been saved under another strategy
        and by another number of ranks. What has no meaning here is left out, and a line says what that means.

        Args:
            run: the folder of the run's checkpoints, or one checkpoint in it. Only the first rank reads.
            parts: objects whose states are loaded too, as given to `checkpoint`.
        """
        return self._checkpoints.restore(Path(run), parts)


@dataclass(frozen=True)
class Request:
    """The options of one call of `job.checkpoint`."""

    extra: dict[str, Any]
    keep: int
    when_busy: WhenBusy

    def __post_init__(self) -> None:
        if self.when_busy not in _WHEN_BUSY:
            raise ConfigError(f'checkpoint: when_busy must be "wait" or "skip", got {self.when_busy!r}.')
        if not isinstance(self.keep, int) or self.keep < 1:
            raise ConfigError(f"checkpoint: keep must be a number of 1 or more, got {self.keep!r}.")


class Checkpoints:
    """The checkpoints of one job: its schedules, and on ranks that write the writers.

    How it works. A checkpoint takes one collective call where rank 0 has all that ranks agree on (`first_rank`), and
    otherwise two around the copying (`snapshot.take`). In the first, ranks agree on whether it is taken: the leader may
    have a mistake to report (the folder is in use) or be busy, and any rank may have been asked to stop. The answer is
    the same on all ranks, so they take it together or not at all.
    """

    def __init__(self, job: "Job", world: World, replica: HookedReplica, model_on_mesh: ModelOnMesh | None) -> None:
        """`world` is that of all ranks that save together: on a mesh, more than `job.world`."""
        self._job = ref(job)  # Weak: the job holds this.
        self._world, self._replica, self._model_on_mesh = world, replica, model_on_mesh
        transport = None if model_on_mesh is None else model_on_mesh.parts_transport
        self._part_ranks = None if transport is None else PartRanks(transport)
        """The ranks that write together, if a mesh splits the model."""
        self._replica_ranks = [world.rank] if model_on_mesh is None else model_on_mesh.mesh.replica_ranks(world.rank)
        self._writers: dict[Path, BackgroundWriter] = {}
        self.schedules = Schedules()
        self._schedules_by_call: dict[tuple[str, Every], CheckpointSchedule] = {}
        """The same by what calls are given. Empty in an elastic world, where each call is noted (`save_last`)."""
        self._begun: set[Path] = set()
        """Folders that a checkpoint was taken for. From then on, a mistake there does not end the training."""
        self._restored_step = -1
        """The step from which the run continues; -1 if it began at the start."""
        self._restored_from: Path | None = None
        """The folder of that checkpoint."""
        self._watches = False
        self.parts = LocalParts()
        self._last: tuple[Path, Request] | None = None
        """Where, and how, checkpoints are written."""

    def save_last(self) -> Path | None:
        """Save the state before the run ends; return where, or None if no checkpoints are written. Collective."""
        if self._last is None:
            return None
        run, request = self._last
        self._take(run, self.parts.parts, request)
        return run

    def none_due(self, run: str | PathLike[str], every: Every | None) -> bool:
        """Whether this is one of several calls with a schedule, and no checkpoint is due in it. Collective at times."""
        schedule = None if every is None else self._schedules_by_call.get((fspath(run), every))
        return schedule is not None and not schedule.due(self._replica.steps)

    def checkpoint(
        self, run: str | PathLike[str], parts: tuple[Any, ...], every: Every | None, request: Request
    ) -> bool:
        """As `JobCheckpoints.checkpoint`, after `none_due`."""
        if self._replica.in_consensus:
            raise ConfigError("job.checkpoint() inside job.consensus(): end that first.")
        refuse_on_membership(self._world)
        named = named_parts(parts)
        self.parts.add(named)
        self._last = (Path(run), request)
        self._watch()
        if every is None:
            return self._take(Path(run), named, request)
        steps, call = self._replica.steps, (fspath(run), every)
        if (schedule := self._schedules_by_call.get(call)) is None:
            schedule = self._schedule(Path(run), every, request)
            if self._world.elastic is None:
                self._schedules_by_call[call] = schedule
            if not schedule.due(steps):
                return False
        taken = self._take(Path(run), named, request)
        schedule.written(steps)
        return taken

    def _schedule(self, run: Path, every: Every, request: Request) -> CheckpointSchedule:
        """Return the schedule of a call that `none_due` does not know. Collective when it is made."""
        every = self._world.checkpoints.every or every
        if (schedule := self.schedules.get(str(run), every)) is None:
            job = self._job()
            synchronous = job is not None and job.strategy.synchronous
            schedule = CheckpointSchedule(every, self._world, synchronous, self._call, self._restored_step)
            if not self.schedules.add(str(run), every, schedule):  # Else the others have opened the folder.
                self._open(run, request)
        return schedule

    def restore(self, run: Path, parts: tuple[Any, ...]) -> Restored | None:
        """As `JobCheckpoints.restore`."""
        self.parts.add(named_parts(parts))
        if self._world.elastic is not None and self._world.elastic.has_joined:
            return None  # It has the state of the others.
        if self._replica.steps:
            raise ConfigError(
                f"job.restore must be called before the first step, and {self._replica.steps} were taken."
            )
        job = self._job()
        assert job is not None
        found = self._world.collective(lambda: _load(job, self._world, run, parts), same_answer=True)
        if found is None:
            return None
        restored = Restored(**{**found, "folder": Path(found["folder"])})
        self._restored_step, self._restored_from = restored.steps, restored.folder
        return restored

    def _take(self, run: Path, parts: dict[str, Any], request: Request) -> bool:
        """Take a checkpoint on all ranks, and end the program if a signal asks for that. Collective."""
        job = self._job()
        assert job is not None
        # Of a copy of the model that each rank keeps by itself, rank 0 has no mean.
        has_copies = any(isinstance(part, nn.Module) for part in parts.values())
        # In an elastic world a lost rank ends nothing: where rank 0 had gathered the state, another one has to save it.
        stays = self._world.elastic is None
        in_one_call = stays and job._exchange.agreed_on_first and self._model_on_mesh is None and not has_copies
        self._world.transport.activity.enter("checkpoint")
        try:
            taken, stop = (self._take_in_one_call if in_one_call else self._take_together)(run, parts, request, job)
        finally:
            self._world.transport.activity.enter(IDLE)
        if stop:
            self._end(run, stop)
        return taken

    def _take_in_one_call(self, run: Path, parts: dict[str, Any], request: Request, job: "Job") -> tuple[bool, int]:
        """Take a checkpoint that rank 0 has alone; return whether that was done, and the signal to stop. Collective."""
        state, apart = FirstRankState(job, self._world, parts, request.extra), None
        answer: list[Any] | ConfigError
        try:
            if job.is_leader:
                ready = self._ready(run, request)
                apart = state.taken_apart(self._writers[run].layout)
                answer = [ready, stop_requested(self._world), None]
            else:
                answer = [True, stop_requested(self._world), state.packed()]
        except ConfigError as error:
            answer = ConfigError(str(error))

        def agree(answers: dict[int, Any]) -> list[Any]:
            state.gather({rank: packed for rank, (_, _, packed) in answers.items() if packed is not None})
            return _agreed(answers)

        taken, stop = self._call(f"job.checkpoint('{run}')", answer, agree)
        if taken or stop:
            self._begun.add(run)
            if apart is not None:
                self._submit(run, request, apart.copied(self._writers[run].memory(), state.gathered))
        return taken, stop

    def _take_together(self, run: Path, parts: dict[str, Any], request: Request, job: "Job") -> tuple[bool, int]:
        """As `_take_in_one_call`, where ranks have to agree on the model, or hold parts of it. Collective."""
        taken, stop, random = self._agree(run, request, job)
        if taken or stop:
            writer = self._writers.get(run)  # On ranks that write.
            memory = None if writer is None else writer.memory()
            state = {"random": random, "extra": request.extra}
            # Other strategies put them back themselves, or exchange statistics with the parameters.
            with keeping_buffers(self._replica.model) if job._exchange.equal_after_steps else nullcontext():
                snapshot, savers = take(job, parts, state, self._call, memory, self._replica_ranks)
            self._begun.add(run)
            if snapshot is not None:
                self._submit(run, request, snapshot)
            if not savers:  # The leader was lost. Who is asked to stop saves the state in the next call.
                taken, stop = False, 0
        return taken, stop

    def _open(self, run: Path, request: Request) -> None:
        """Lock the folder on the leader, before the first checkpoint is due: a mistake shows at once. Collective."""
        mistake: ConfigError | None = None
        job = self._job()
        if job is not None and job.is_leader:
            try:
                self._writer(run, request.keep)
            except CheckpointError as error:
                mistake = ConfigError(str(error))
        self._call(f"job.checkpoint('{run}')", mistake, lambda values: None)

    def _agree(self, run: Path, request: Request, job: "Job") -> tuple[bool, int, list[Any]]:
        """Return whether a checkpoint is taken now, the signal that asks to stop, and all random states. Collective."""
        random = RandomStates().values()
        answer: list[Any] | ConfigError = [True, stop_requested(self._world), random]
        if job.is_leader:
            try:
                answer = [self._ready(run, request), stop_requested(self._world), random]
            except CheckpointError as error:
                answer = ConfigError(str(error))
                if run in self._begun:  # The leader before this one was lost, and its process may live on.
                    _log.error("%s Training goes on.", error)
                    answer = [False, stop_requested(self._world), random]
        # The name has the folder in it: ranks with different ones get an error that shows both.
        taken, stop, states = self._call(f"job.checkpoint('{run}')", answer, _agreed_with_states)
        if sum(state is not None for state in states) < self._world.size:
            self._world.confirm()  # Cut off from all others, it must not write what it has alone.
        return taken, stop, states

    def _ready(self, run: Path, request: Request) -> bool:
        """Open the writer of a folder on the leader; return whether it takes a snapshot now."""
        writer = self._writer(run, request.keep)
        if request.when_busy == "wait":
            writer.wait()  # Ended by the write, which the disk ends. Before the next copy is made: memory holds one.
        elif writer.busy:
            _log.warning("no checkpoint of step %d: the one before is still being written", self._replica.steps)
            return False
        return True

    def _writer(self, run: Path, keep: int) -> BackgroundWriter:
        if (writer := self._writers.get(run)) is None:
            restored = self._restored_from
            # Whether checkpoints in the folder are those of this run.
            continues = run in self._begun or (restored is not None and restored.resolve().parent == run.resolve())
            writer = self._writers[run] = BackgroundWriter(run, keep, self._part_ranks, continues)
        writer.keep = keep
        return writer

    def _submit(self, run: Path, request: Request, snapshot: EncodedSnapshot) -> None:
        """Have a snapshot written. The rank that opened the folder may have been lost since, and this one follows."""
        try:
            self._writer(run, request.keep).submit(snapshot)
        except CheckpointError as error:
            _log.error("%s Training goes on.", error)
            if self._part_ranks is not None:
                self._part_ranks.decline()  # They wait to be told where to write.

    def _end(self, run: Path, stop: int) -> None:
        """End the program when the leader has written the checkpoint, and other jobs of it theirs. Collective."""
        mistake: ConfigError | None = None
        job = self._job()
        if run in self._writers and job is not None and job.is_leader:
            try:
                folder = self._writers[run].flush()
                _log.warning("stopped after step %d. Continue from %s", self._replica.steps, folder)
            except CheckpointError as error:
                mistake = ConfigError(str(error))
        others = signals.others_save(self)  # The state of another model belongs to the same step.
        # Other ranks must not end before it is written: launchers would take that for a failure, and stop the leader.
        if not self._call("job.checkpoint", mistake or others, lambda values: any(values.values())):
            raise SystemExit(128 + stop)

    def _call(self, name: str, value: Any, combine: Combine) -> Any:
        """Make a collective call while ranks that still train do not wait for this one."""
        job = self._job()
        assert job is not None
        with self._world.waiting():
            # The job's exchange is another one after a change of the ranks.
            return self._world.call(name, value, combine, elastic=job._exchange.tolerates_loss)

    def _watch(self) -> None:
        """Take signals for requests to stop, from the first call on. Not in a simulation, whose ranks are threads."""
        if not self._watches and self._world.transport.cluster is None:
            self._watches = True
            signals.watch(self, self._world.checkpoints.grace_s)
            self._world.checkpoints.announce(self._world.checkpoints.grace_s)

    def close(self) -> None:
        """Wait until everything is written. Raises `CheckpointError` if the last checkpoint was not."""
        while self._writers:
            _, writer = self._writers.popitem()
            writer.close()
        self._release()  # Only now: a signal must not end the process while it writes.

    def abandon(self) -> None:
        """Wait until everything is written, after a job that failed: errors were logged. Idempotent."""
        while self._writers:
            _, writer = self._writers.popitem()
            writer.abandon()
        self._release()

    def _release(self) -> None:
        if self._part_ranks is not None:
            self._part_ranks.close()
        if self._watches:
            self._watches = False
            signals.unwatch(self)


def _agreed(answers: dict[int, Any]) -> list[Any]:
    """All take a checkpoint unless one cannot; all stop if one must."""
    return [all(taken for taken, _, _ in answers.values()), max(stop for _, stop, _ in answers.values())]


def _agreed_with_states(answers: dict[int, Any]) -> list[Any]:
    """As `_agreed`, with the random state of every rank. A lost rank has None for it."""
    return [*_agreed(answers), [answers[rank][2] if rank in answers else None for rank in range(max(answers) + 1)]]


def _load(job: "Job", world: World, run: Path, parts: tuple[Any, ...]) -> dict[str, Any] | None:
    """Load a checkpoint; return the fields of `Restored`, as values that can be sent. Collective."""
    with world.waiting():
        received = receive(world.transport, run)
    if job.is_leader:  # A mistyped folder would otherwise begin a new run without a word.
        found = f"no checkpoint in {run} yet: starts" if received is None else f"continues from {received[0]}"
        print(f"tutti: {found}", file=sys.stderr, flush=True)
    if received is None:
        return None
    folder, snapshot = received
    job._attach_for_step_after(snapshot.steps)
    job._replica.restoring = True
    try:
        load_model(snapshot, job._replica.optimizer, job.model, job._model_on_mesh)
        job.load_state_dict(snapshot.state["job"])
    finally:
        job._replica.restoring = False
    load_parts(named_parts(parts), snapshot.state["parts"], job.is_leader)
    if world.elastic is not None:  # From here on a position that others may take over.
        world.elastic.data.update(part for part in parts if isinstance(part, ShardedData))
    # A rank that the saved world did not have keeps its own: two ranks must not draw the same numbers.
    random = snapshot.state["random"]
    if world.rank < len(random) and random[world.rank] is not None:
        set_random_state(random[world.rank])
    return {**vars(Restored.of(folder, snapshot)), "folder": str(folder)}
