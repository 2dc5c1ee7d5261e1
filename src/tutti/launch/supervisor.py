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
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.coordination import Coordinator
from tutti.errors import StoreLost, WorkerFailed
from tutti.launch.control_service import announce_run, serve_coordinator
from tutti.launch.diagnosis_line import DiagnosisLine
from tutti.launch.fork_client import ForkedProcess, describe_status
from tutti.launch.lab import namespaces
from tutti.launch.lab.placement import ProcessPlacement
from tutti.launch.out_of_memory import oom_kills, suspected_oom
from tutti.launch.output import RankOutput
from tutti.launch.start import Process, Program, StoreProcess, WorkerStarter, common_environment
from tutti.launch.supervisor_pipe import Inbox, Watcher

_NOTICE_S = 10.0
"""How long peers of a failed worker get to notice it and to end by themselves. Those that wait for it notice at once;
one that saves a model needs the time."""

_GRACE_S = 2.0
"""How long stopped workers get to end by themselves."""

_CAUSE_S = 0.3
"""How long to look for the failure that another one followed from."""

_POLL_S = 0.05
"""How often ends of workers are looked for, beside the events that announce them."""


@dataclass(eq=False)
class _Worker:
    """A worker process as its supervisor sees it."""

    rank: int
    process: Process
    pipe: int
    """The supervisor's end of the supervisor pipe."""
    outputs: dict[int, RankOutput]
    """Its stdout and stderr, by the number of the supervisor's end."""
    inbox: Inbox = field(default_factory=Inbox)
    ended_at: float | None = None
    evicted: str | None = None
    """How it was lost, as the predicate of a sentence, if the coordinator goes on without it because it was silent."""
    oom_kills_before: int = 0
    """Processes that the kernel had killed for want of memory when it was started."""

    def reason(self) -> str | None:
        """How it failed; None if it runs, or ended well."""
        # What the worker itself reported says more than the status that it exits with afterwards. But one that was cut
        # off reports that the others are gone.
        failure = self.inbox.failure
        if failure is not None and not (self.evicted is not None and failure.knock_on):
            return failure.reason
        if self.evicted is not None:
            return self.evicted
        status = self.process.poll()
        if status is None or status == 0:
            return None
        end = self.process.describe_end() if isinstance(self.process, ForkedProcess) else describe_status(status)
        return end + (suspected_oom(self.oom_kills_before) if status == -signal.SIGKILL else "")

    @property
    def knocked_on(self) -> bool:
        """Whether it failed only because another rank did."""
        return self.evicted is None and self.inbox.failure is not None and self.inbox.failure.knock_on


class Supervisor:
    """Starts workers, passes on their output and ends when all have ended, or one has failed that was needed."""

    def __init__(
        self, program: Program, placement: ProcessPlacement, environment: dict[str, str], watch: Watcher | None = None
    ) -> None:
        self._placement = placement
        self._environment = environment
        self._watch = watch
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._first_failed: _Worker | None = None
        self._lost: list[_Worker] = []
        """Workers that failed while the others went on, the first one first."""
        self.failed_alone: WorkerFailed | None = None
        """After a run that went on without a worker whose own code failed: the error of the first such one."""
        self._coordinator: Coordinator | None = None
        self.diagnosis = DiagnosisLine()
        """Reports who holds the others up."""
        self.losses: list[tuple[int, str]] = []
        """Ranks that the others went on without, and why."""
        self._announcement: Path | None = None
        """The file by which `tutti status` finds this run."""
        self._store: Any = None
        """The store of torch's groups, where this process serves it."""
        self._store_process: StoreProcess | None = None
        """The process that serves it otherwise."""
        self._store_end: str | None = None
        """How that process ended, if it did before any worker failed."""
        self._common_environment = common_environment(environment, placement.num_workers)
        # A fork server that has to be started imports from here on, while the store is set up.
        self._starter = WorkerStarter(program, placement, self._common_environment)

    def run(self) -> list[Any]:
        """Start all, wait for all, and return their results by rank."""
        try:
            # First: their ports are among the variables of every worker.
            self._coordinator = serve_coordinator(self._placement, self._common_environment)
            self._announcement = announce_run(self._coordinator, self._placement, self._common_environment)
            self._serve_store()
            for rank in range(self._placement.num_workers):
                self._workers.append(self._start(rank))
            if self._starter.channel is not None:
                self._selector.register(self._starter.channel, selectors.EVENT_READ)
            self._watch_until_ended()
        except BaseException:  # Ctrl-C and signals: failures of workers are no exceptions here.
            self.diagnosis.clear()
            _let_save(self._workers, self._read)
            raise
        finally:
            self._stop()
        self._raise_first_failure()
        self.failed_alone = next(filter(None, map(_own_failure, self._lost)), None)
        # A worker can be lost after it sent a result, while it was ending.
        return [None if worker in self._lost else worker.inbox.result for worker in self._workers]

    def _serve_store(self) -> None:
        """Serve torch's store in this process if it has imported torch, else in one that the fork server makes."""
        # Workers get the port of a socket that listens already. Were only a free number chosen here, another process
        # could take it before the store does.
        listener = self._placement.listen()
        self._port = listener.getsockname()[1]
        with listener:
            if "torch" not in sys.modules:
                self._store_process = self._starter.start_store(listener, self._common_environment)
            if self._store_process is not None:
                return
            from tutti.launch.store import serve  # Imports torch.

            # A copy, because the store takes its file over, and the block closes `listener`.
            address, file = self._placement.address, os.dup(listener.fileno())
            if (namespace := self._placement.store_host.namespace) is None:
                self._store = serve(address, self._port, file)
            else:
                # Making a store also connects to it, and only from inside is its address reached.
                self._store = namespaces.inside(namespace, lambda: serve(address, self._port, file))

    def _start(self, rank: int) -> _Worker:
        """Start a worker with two output pipes and a supervisor pipe, and watch all three."""
        # Standard output, standard error, and messages to the supervisor.
        pipes = [os.pipe() for _ in range(3)]
        (out, _), (err, _), (pipe, _) = pipes
        try:
            process = self._starter.start(rank, self._environment_of(rank), [writer for _, writer in pipes])
        except BaseException:
            for reader, _ in pipes:
                os.close(reader)
            raise
        finally:
            # Also after success: were the supervisor to keep the writers, the readers would never see an end of file.
            for _, writer in pipes:
                os.close(writer)
        outputs = {file: RankOutput(rank, is_stderr=file == err) for file in (out, err)}
        worker = _Worker(rank, process, pipe, outputs, oom_kills_before=oom_kills())
        for file in (out, err, pipe):
            self._selector.register(file, selectors.EVENT_READ, worker)
        return worker

    def _environment_of(self, rank: int) -> dict[str, str]:
        """Variables of one worker. What the run was given comes last, and so overrules what the placement says."""
        return {
            **self._common_environment,
            **self._placement.environment(rank),
            "MASTER_PORT": str(self._port),
            **self._environment,
        }

    def _watch_until_ended(self) -> None:
        """Pass on output until all workers have ended, or the grace after the first failure is over."""
        deadline = None
        while any(worker.ended_at is None for worker in self._workers):
            # Output is read in every round, also while workers end: a full pipe would block them.
            self._read(_POLL_S)
            self._kill_evicted()
            self.diagnosis.update(self._coordinator.held_up if self._coordinator is not None else ())
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
        self._drain()

    def _kill_evicted(self) -> None:
        """End workers that the coordinator has evicted: they may be stopped, and would never end."""
        assert self._coordinator is not None
        while self._coordinator.evicted:
            description, reason = self._coordinator.evicted.popleft()
            worker = self._workers[description.rank] if 0 <= description.rank < len(self._workers) else None
            if worker is None or worker.process.pid != description.pid:
                continue
            if worker.ended_at is None:
                worker.evicted = f"was killed by the launcher: {reason}"
                _signal_group(worker.process.pid, signal.SIGKILL)
            elif worker.knocked_on and "was silent" in reason:
                # Cut off, it took the others for lost a moment before they gave it up.
                worker.evicted = f"is lost: {reason}"

    def _read(self, seconds: float) -> None:
        """Handle what has come from workers and from the fork server; wait `seconds` for it at most."""
        for key, _ in self._selector.select(seconds):
            worker: _Worker | None = key.data
            if worker is None:
                self._receive_ends()
                continue
            data = os.read(key.fd, 65536)
            # All writers are closed, those of the worker's own children included. Whether the worker has ended is seen
            # from its process, not from here.
            if not data:
                self._selector.unregister(key.fileobj)
            elif key.fd == worker.pipe:
                for values in worker.inbox.feed(data):
                    if self._watch is not None:
                        self._watch(worker.rank, values)
            else:
                self.diagnosis.clear()
                worker.outputs[key.fd].write(data)

    def _receive_ends(self) -> None:
        """Take in what the fork server reports: `poll` of a forked process then knows its status."""
        channel = self._starter.channel
        assert channel is not None
        channel.receive()
        if channel.server_ended:  # It stays readable for ever.
            self._selector.unregister(channel)

    def _note_ends(self) -> None:
        """Judge the workers that have ended: a tolerated loss, or the failure that ends the run."""
        # All that ended in this round are judged together: first the needed ones that failed by themselves, then needed
        # ones that failed because of others, then those whose loss is tolerated.
        failed = [worker for worker in self._newly_ended() if self._watched_reason(worker)]
        # Ranks learn of a loss within milliseconds, and may end before the end of the lost one is reported here.
        deadline = time.monotonic() + _CAUSE_S
        while failed and all(worker.knocked_on for worker in failed) and time.monotonic() < deadline:
            self._read(_POLL_S)
            self._kill_evicted()
            failed += [worker for worker in self._newly_ended() if self._watched_reason(worker)]
        for worker in sorted(failed, key=lambda worker: (worker.inbox.tolerates_loss, worker.knocked_on)):
            if self._first_failed is None and worker.inbox.tolerates_loss:
                self._lose(worker)
            elif self._first_failed is None or self._first_failed.knocked_on:
                self._first_failed = worker

    def _note_end_of_store(self) -> None:
        """See whether the store's process has ended while workers run. Workers that fail after that fail because of it.

        If it ended with the fork server, so did the workers of that server, and they say so. Spawned ones do not.
        """
        if self._store_process is None or self._store_end is not None:
            return
        if self._first_failed is None and all(worker.ended_at is not None for worker in self._workers):
            return
        # With the fork server die the store and all forked workers, which say so: their message names the cause.
        end = self._store_process.reason()
        if self._first_failed is None or not self._store_process.lost_server:
            self._store_end = end

    def _newly_ended(self) -> list[_Worker]:
        """Workers that have ended since the last call.

        Looks again until there are no more: a worker that failed because of another must not be judged before it.
        """
        ended: list[_Worker] = []
        while more := [one for one in self._workers if one.ended_at is None and one.process.poll() is not None]:
            for worker in more:
                worker.ended_at = time.monotonic()
            ended += more
        return ended

    def _lose(self, worker: _Worker) -> None:
        """Go on without a worker, and end what it started now: until the run ends may take long."""
        self._lost.append(worker)
        _signal_group(worker.process.pid, signal.SIGKILL)
        outlook = ": the others go on without it" if len(self._lost) < len(self._workers) else ""
        reason = " ".join((worker.reason() or "failed").split()).rstrip(".")
        self.losses.append((worker.rank, reason))
        self.diagnosis.clear()
        # The traceback is printed nowhere else: the run may end well.
        trace = worker.inbox.failure.traceback if worker.inbox.failure and not worker.knocked_on else ""
        print(f"{trace}[rank {worker.rank}] {reason}{outlook}", file=sys.stderr, flush=True)

    def _watched_reason(self, worker: _Worker) -> str | None:
        """How a worker that has ended failed, after all that it reported has been read; None if it ended well."""
        # The pipe still holds what was written before the process ended. Judged without it, a worker that failed
        # because of another would look like a cause.
        while any(key.fd == worker.pipe for key, _ in self._selector.select(0)):
            self._read(0)
        return worker.reason()

    def _drain(self) -> None:
        """Read what is left. A worker's own children may hold its pipes open: wait for them no longer than a moment."""
        deadline = time.monotonic() + _GRACE_S
        # The fork server's connection, which has no data, stays open: only the pipes of workers count.
        while any(key.data is not None for key in self._selector.get_map().values()) and time.monotonic() < deadline:
            self._read(_POLL_S)

    def _stop(self) -> None:
        """End all that still runs, children of workers included, and close everything."""
        try:
            self._signal_all(signal.SIGTERM)
        finally:  # Also when the user presses Ctrl-C again because ending takes too long.
            try:
                self._signal_all(signal.SIGKILL)
                self._close()
            finally:
                self._starter.close()  # The fork server then kills what it forked, if that has not been done.

    def _signal_all(self, sign: signal.Signals) -> None:
        """Send a signal to workers (the last one to all that they started, too) and give them a moment to end."""
        running = [worker for worker in self._workers if worker.process.poll() is None]
        # SIGKILL also goes to the groups of workers that have ended: children that they left behind are in them.
        for worker in self._workers if sign == signal.SIGKILL else running:
            if worker not in self._lost:  # Those were lost perhaps long ago, and the number may be another's now.
                _signal_group(worker.process.pid, sign)
        deadline = time.monotonic() + _GRACE_S
        for worker in running:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))

    def _close(self) -> None:
        """Read what workers have still written, and close their pipes and the store. No worker runs any more."""
        # Before the pipes are closed: workers' last lines, which often hold the error, may still lie in them.
        self._drain()
        for worker in self._workers:
            for file, output in worker.outputs.items():
                output.finish()
                os.close(file)
            os.close(worker.pipe)
        self._selector.close()
        if self._announcement is not None:
            self._announcement.unlink(missing_ok=True)
        if self._coordinator is not None:
            self._coordinator.close()
        self._store = None
        if self._store_process is not None:
            self._store_process.close()

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
                print(f"[rank {worker.rank}] {message}", file=sys.stderr)
        # As a shell has it: 128 plus the number of the signal that killed the worker.
        status = first.process.poll() or 0
        trace = first.inbox.failure.traceback if first.inbox.failure else ""
        raise WorkerFailed(first.rank, first.reason() or "failed", trace, 128 - status if status < 0 else status)

    def _failure(self) -> _Worker | None:
        """Whose failure is the whole run's."""
        first = self._first_failed
        # A run that lost every worker whose loss it tolerated has trained nothing. The needed ones (servers) then fail
        # only because nobody is left.
        all_lost = all(worker in self._lost for worker in self._workers if worker.inbox.ever_tolerated_loss)
        if self._lost and all_lost and (first is None or first.knocked_on):
            return next((worker for worker in self._lost if not worker.knocked_on), self._lost[0])
        return first


def _let_save(workers: list[_Worker], read: Callable[[float], None]) -> None:
    """Ask workers that save their state to do so and to end, and `read` their output meanwhile."""
    saving = [worker for worker in workers if worker.inbox.grace_s and worker.process.poll() is None]
    if not saving:
        return
    grace_s = max(worker.inbox.grace_s for worker in saving)
    note = f"tutti: stopping after a last checkpoint, within {grace_s:g} s (Ctrl-C again: at once)"
    print(note, file=sys.stderr, flush=True)
    for worker in saving:
        # To itself alone: without the workers of its DataLoader it could not go on to its next checkpoint.
        with suppress(ProcessLookupError):
            os.kill(worker.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(worker.process.poll() is None for worker in saving):
        read(_POLL_S)


def _signal_group(group: int, sign: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, sign)


def _own_failure(worker: _Worker) -> WorkerFailed | None:
    """The error of a lost worker whose own code failed; None if it was killed, or failed because of others."""
    if worker.inbox.failure is None or worker.knocked_on:
        return None
    return WorkerFailed(worker.rank, f"{worker.inbox.failure.reason}; the others have finished without it")
