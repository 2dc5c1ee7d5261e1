"""Supervisor: starts the workers of a run, passes on what they print, and leaves nothing behind.

How it works. One thread, the caller's, does everything in a loop over a selector. In it are, for each worker, its two
outputs and its supervisor pipe, and the connection to the fork server if there is one. Every wait in the loop is
short, or ends with an event of a worker, so no worker can hold the supervisor up.

A worker is in one of these states:
- running: its process has not ended;
- ended well: status 0 and no failure reported over its pipe;
- lost: it failed after it had said that the others go on without it (`SupervisorPipe.tolerate_loss`). The rest of its
  process group is killed at once, its result is None;
- failed: any other end. The run is over: the other workers get `_NOTICE_S` to notice and to report, then all are
  stopped.

In an elastic run (`ElasticRun`), a lost worker is replaced (`WorkerChanges`). What is started later joins the others,
who do not need it before. So it counts as lost, too, if it fails before it has joined. The run has ended well when a
worker has come to the end of the training.

A failure that only follows from another rank's (`Failure.knock_on`) is never reported as the cause while another is
known. So all workers that have ended are looked at together, and before one is judged its pipe is read to the end.

Ranks meet at the run's coordinator (`tutti.coordination`), which this process serves in a thread. A worker that it has
evicted, because it was silent for too long, is killed: it may be stopped, and would never end by itself.

Programs that call `torch.distributed.init_process_group` need a store of torch's. It is served by this process if it
has imported torch, else by one that the fork server makes. If that one ends before the workers, the run is over as
after a failure: ranks would wait for their whole timeout.

When the user or a scheduler ends the run (Ctrl-C, SIGTERM), workers that have announced that they save their state get
SIGTERM and the time for it, while their output is still passed on. A second Ctrl-C ends that.

Stopping sends SIGTERM to the process groups that run, waits `_GRACE_S`, then sends SIGKILL to every group, those of
ended workers included, so that children which a worker left behind end too. Each worker is the leader of its own
session, so its number is also that of its group. Whatever interrupts that, the connection to the fork server is
closed, upon which the server kills what it forked. If the supervisor itself is killed, the kernel kills spawned
workers, a guardian (`tutti.launch.guardian`) kills what they have started, and the fork server kills forked ones."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from tutti.errors import RankLost, StoreLost, WorkerFailed
from tutti.launch.control_settings import COORDINATOR, ELASTIC, SECRET
from tutti.launch.diagnosis_line import DiagnosisLine
from tutti.launch.elastic_run import ElasticRun
from tutti.launch.joined_run import JoinedRun
from tutti.launch.launcher import Launcher
from tutti.launch.output import RankOutput
from tutti.launch.run_control import RunControl
from tutti.launch.run_store import RunStore
from tutti.launch.start import Program
from tutti.launch.supervised_worker import POLL_S, SupervisedWorker, let_save
from tutti.launch.supervisor_pipe import Watcher
from tutti.launch.worker_changes import WorkerChanges
from tutti.launch.worker_reader import WorkerReader

_NOTICE_S = 10.0
"""How long peers of a failed worker get to notice it and to end by themselves. Those that wait for it notice at once;
one that saves a model needs the time."""

_GRACE_S = 2.0
"""How long stopped workers get to end by themselves."""

_CAUSE_S = 0.3
"""How long to look for the failure that another one followed from."""


class Supervisor:
    """Starts workers, passes on their output and ends when all have ended, or one has failed that was needed."""

    def __init__(
        self,
        program: Program,
        launcher: Launcher,
        variables: dict[str, str],
        watch: Watcher | None = None,
        *,
        elastic: ElasticRun | None = None,
        joins: JoinedRun | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            launcher: starts the workers of `program`; it is opened and closed here.
            variables: those of the run for its workers.
            watch: called with what workers report.
            elastic: how workers may come and go; None if their number is fixed.
            joins: the run of another launcher, to which the workers are added.
        """
        self._program, self._launcher, self._variables = program, launcher, dict(variables)
        self._elastic, self._joins = elastic, joins
        self._workers: list[SupervisedWorker] = []
        self._first_failed: SupervisedWorker | None = None
        self._lost: list[SupervisedWorker] = []
        """Workers that failed while the others went on, the first one first."""
        self.failed_alone: WorkerFailed | None = None
        """After a run that went on without a worker whose own code failed: the error of the first such one."""
        self._control: RunControl | None = None
        self.diagnosis = DiagnosisLine()
        """Reports who holds the others up."""
        self.losses: list[tuple[int, str]] = []
        """Ranks that the others went on without, and why."""
        self._store: RunStore | None = None
        self._store_end: str | None = None
        """How the process that serves the store ended, if it did before any worker failed."""
        if elastic is not None:
            self._variables[ELASTIC] = f"{elastic.minimum}:{elastic.maximum}"
        self._reader = WorkerReader(launcher, watch, self.diagnosis.clear)
        self._changes = None
        if elastic is not None:
            self._changes = WorkerChanges(elastic, launcher, self._workers, self._start, self._show)

    def run(self) -> list[Any]:
        """Start all, wait for all, and return their results by rank."""
        try:
            self._launcher.open(self._program, self._variables)
            # First: their ports are among the variables of every worker.
            first = self._serve() if self._joins is None else self._connect(self._joins)
            assert self._control is not None
            if self._changes is not None:
                self._changes.begin(self._control)
            for slot in range(self._launcher.num_workers):
                self._start(slot, first + slot, is_new=self._joins is not None)
            self._watch_until_ended()
        except BaseException:  # Ctrl-C and signals: failures of workers are no exceptions here.
            self.diagnosis.clear()
            let_save(self._workers, self._reader.read)
            raise
        finally:
            self._stop()
        self._raise_first_failure()
        self.failed_alone = next(filter(None, (worker.own_failure() for worker in self._missed())), None)
        # A worker can be lost after it sent a result, while it was ending.
        results = {worker.number: worker.inbox.result for worker in self._workers if worker not in self._lost}
        return [results.get(number) for number in range(max(worker.number for worker in self._workers) + 1)]

    def _serve(self) -> int:
        """Serve what workers need to find each other; return the number of the first one."""
        self._control = self._launcher.place_coordinator(self._variables, self._elastic)
        self._store = self._launcher.place_store(self._variables)
        if self._elastic is not None and self._elastic.listen is not None:
            where = self._variables[COORDINATOR]
            self._show(f"tutti: workers on other hosts join this run with: tutti join {where} SCRIPT")
        return 0

    def _connect(self, joins: JoinedRun) -> int:
        """Use what the launcher of another run serves; return the number of the first worker."""
        self._control = joins
        self._variables[SECRET] = joins.secret.text
        self._variables[COORDINATOR] = str(joins.endpoint)
        # There is no store of torch's for these workers, as its groups have a fixed number of members: torch says at
        # once that it finds no MASTER_PORT.
        self._variables.pop("MASTER_PORT", None)
        return joins.first_number

    def _start(self, slot: int, number: int, *, is_new: bool) -> SupervisedWorker:
        """Start a worker with two output pipes and a supervisor pipe, and watch all three."""
        # Standard output, standard error, and messages to the supervisor.
        pipes = [os.pipe() for _ in range(3)]
        (out, _), (err, _), (pipe, _) = pipes
        try:
            process = self._launcher.start(slot, number, self._variables, [writer for _, writer in pipes])
        except BaseException:
            for reader, _ in pipes:
                os.close(reader)
            raise
        finally:
            # Also after success: were the supervisor to keep the writers, the readers would never see an end of file.
            for _, writer in pipes:
                os.close(writer)
        outputs = {file: RankOutput(number, is_stderr=file == err) for file in (out, err)}
        worker = SupervisedWorker(number, slot, process, pipe, outputs, is_new, self._changes is not None)
        self._workers.append(worker)
        self._reader.add(worker)
        return worker

    def _watch_until_ended(self) -> None:
        """Pass on output until all workers have ended, or the grace after the first failure is over."""
        assert self._control is not None
        deadline = None
        while self._goes_on():
            # Output is read in every round, also while workers end: a full pipe would block them.
            self._reader.read(POLL_S)
            self._kill_evicted()
            self.diagnosis.update(self._control.held_up)
            failed_before = self._first_failed is not None
            self._note_ends()
            # A store that ends after a failure of an earlier round is not its cause.
            if not failed_before:
                self._note_end_of_store()
            if (self._first_failed is not None or self._store_end is not None) and deadline is None:
                deadline = time.monotonic() + _NOTICE_S
            # The others mostly fail by themselves within the grace, and their own messages say more than a signal
            # would.
            if deadline is not None and time.monotonic() > deadline:
                return
            if self._changes is not None:
                if deadline is not None:
                    self._changes.cancel()
                self._changes.act()
            if self._control.is_gone:
                raise RankLost("the launcher of this run has ended, or cannot be reached any more.")
        self._reader.drain(_GRACE_S)

    def _goes_on(self) -> bool:
        """Whether workers run, or will be started."""
        runs = any(worker.ended_at is None for worker in self._workers)
        return runs or (self._changes is not None and self._changes.are_expected)

    def _show(self, line: str) -> None:
        self.diagnosis.clear()
        print(line, file=sys.stderr, flush=True)

    def _kill_evicted(self) -> None:
        """End workers that the coordinator has evicted: they may be stopped, and would never end."""
        assert self._control is not None
        evicted = self._control.evicted
        while evicted:
            description, reason = evicted.popleft()
            known = (each for each in self._workers if each.number == description.rank)
            worker = next((each for each in known if each.process.pid == description.pid), None)
            if worker is None:
                continue
            if worker.ended_at is None:
                worker.evicted = f"was killed by the launcher: {reason}"
                worker.process.signal_group(signal.SIGKILL)
            elif worker.knocked_on and "was silent" in reason:
                # Cut off, it took the others for lost a moment before they gave it up.
                worker.evicted = f"is lost: {reason}"

    def _note_ends(self) -> None:
        """Judge the workers that have ended: a tolerated loss, or the failure that ends the run."""
        # All that ended in this round are judged together: first the needed ones that failed by themselves, then needed
        # ones that failed because of others, then those whose loss is tolerated.
        failed = self._newly_failed()
        # Ranks learn of a loss within milliseconds, and may end before the end of the lost one is reported here.
        deadline = time.monotonic() + _CAUSE_S
        while failed and all(worker.knocked_on for worker in failed) and time.monotonic() < deadline:
            self._reader.read(POLL_S)
            self._kill_evicted()
            failed += self._newly_failed()
        for worker in sorted(failed, key=lambda worker: (not worker.is_needed, worker.knocked_on)):
            if self._first_failed is None and not worker.is_needed:
                self._lose(worker)
            elif self._first_failed is None or self._first_failed.knocked_on:
                self._first_failed = worker

    def _note_end_of_store(self) -> None:
        """See whether the store's process has ended while workers run. Workers that fail after that fail because of it.

        If it ended with the fork server, so did the workers of that server, and they say so. Spawned ones do not.
        """
        process = None if self._store is None else self._store.process
        if process is None or self._store_end is not None:
            return
        if self._first_failed is None and all(worker.ended_at is not None for worker in self._workers):
            return
        # With the fork server die the store and all forked workers, which say so: their message names the cause.
        end = process.reason()
        if self._first_failed is None or not process.lost_server:
            self._store_end = end

    def _newly_failed(self) -> list[SupervisedWorker]:
        """Workers that have ended since the last call, and not well.

        Looks again until there are no more: a worker that failed because of another must not be judged before it.
        """
        ended: list[SupervisedWorker] = []
        while more := [one for one in self._workers if one.ended_at is None and one.process.poll() is not None]:
            for worker in more:
                worker.ended_at = time.monotonic()
            ended += more
        for worker in ended:
            self._reader.read_pipe(worker)
            if worker.inbox.has_left and not worker.reason():
                self._show(f"tutti: rank {worker.number} has left the run")
        return [worker for worker in ended if worker.reason()]

    def _lose(self, worker: SupervisedWorker) -> None:
        """Go on without a worker, and end what it started now: until the run ends may take long."""
        self._lost.append(worker)
        worker.process.signal_group(signal.SIGKILL)
        outlook = "" if self._changes is None else self._changes.lost(worker)
        if any(each.ended_at is None for each in self._workers) or worker.is_starting:
            outlook = f": the others go on without it{outlook}"
        reason = " ".join((worker.reason() or "failed").split()).rstrip(".")
        self.losses.append((worker.number, reason))
        # The traceback is printed nowhere else: the run may end well.
        trace = worker.inbox.failure.traceback if worker.inbox.failure and not worker.knocked_on else ""
        self._show(f"{trace}[rank {worker.number}] {reason}{outlook}")

    def _stop(self) -> None:
        """End all that still runs, children of workers included, and close everything."""
        try:
            if self._changes is not None:
                self._changes.close()
            self._signal_all(signal.SIGTERM)
        finally:  # Also when the user presses Ctrl-C again because ending takes too long.
            try:
                self._signal_all(signal.SIGKILL)
                self._close()
            finally:
                self._launcher.close()

    def _signal_all(self, sign: signal.Signals) -> None:
        """Send a signal to workers (the last one to all that they started, too) and give them a moment to end."""
        running = [worker for worker in self._workers if worker.process.poll() is None]
        # SIGKILL also goes to the groups of workers that have ended: children that they left behind are in them.
        for worker in self._workers if sign == signal.SIGKILL else running:
            if worker not in self._lost:  # Those were lost perhaps long ago, and the number may be another's now.
                worker.process.signal_group(sign)
        deadline = time.monotonic() + _GRACE_S
        for worker in running:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))

    def _close(self) -> None:
        """Read what workers have still written, and close their pipes. No worker runs any more."""
        # Before the pipes are closed: workers' last lines, which often hold the error, may still lie in them.
        self._reader.drain(_GRACE_S)
        self._reader.close(self._workers)
        if self._control is not None:
            self._control.close()

    def _raise_first_failure(self) -> None:
        if self._store_end is not None:
            raise StoreLost(
                f"the process that serves the key-value store of this run {self._store_end}. Ranks cannot find each "
                "other without it, so the run was stopped. Start it again."
            )
        first = self._failure()
        if first is None:
            return
        self.diagnosis.report_failure()
        # Ranks that failed only because of the first one get a line each; the error to raise is that of the first
        # alone.
        for worker in self._workers:
            reported = worker is first or worker in self._lost
            if not reported and worker.knocked_on and worker.inbox.failure is not None:
                message = worker.inbox.failure.reason.removeprefix("failed: ")
                print(f"[rank {worker.number}] {message}", file=sys.stderr)
        # As a shell has it: 128 plus the number of the signal that killed the worker.
        status = first.process.poll() or 0
        trace = first.inbox.failure.traceback if first.inbox.failure else ""
        raise WorkerFailed(first.number, first.reason() or "failed", trace, 128 - status if status < 0 else status)

    def _failure(self) -> SupervisedWorker | None:
        """Whose failure is the whole run's."""
        first = self._first_failed
        # A run that lost every worker whose loss it tolerated has trained nothing. The needed ones (servers) then fail
        # only because nobody is left.
        tolerated = [worker for worker in self._workers if worker.inbox.ever_tolerated_loss]
        all_lost = all(worker in self._lost or worker.inbox.has_left for worker in tolerated)
        if self._lost and all_lost and (first is None or first.knocked_on):
            return next((worker for worker in self._lost if not worker.knocked_on), self._lost[0])
        return first

    def _missed(self) -> list[SupervisedWorker]:
        """Lost workers in whose place no other one has come to the end."""
        finished = {worker.slot for worker in self._workers if worker.has_finished}
        return [worker for worker in self._lost if worker.slot not in finished]
