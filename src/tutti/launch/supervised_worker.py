"""`SupervisedWorker`: a worker process as its supervisor sees it, and what can be done to one."""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tutti.errors import WorkerFailed
from tutti.launch.launcher import WorkerProcess
from tutti.launch.output import RankOutput
from tutti.launch.supervisor_pipe import Inbox

POLL_S = 0.05
"""How often ends of workers are looked for, beside the events that announce them."""


@dataclass(eq=False)
class SupervisedWorker:
    """A worker process, its pipes, and how it has ended."""

    number: int
    """Its RANK, which no other worker of the run gets."""
    slot: int
    """Its place on the hosts of the run. Of two workers with the same slot one has replaced the other."""
    process: WorkerProcess
    pipe: int
    """The supervisor's end of the supervisor pipe."""
    outputs: dict[int, RankOutput]
    """Its stdout and stderr, by the number of the supervisor's end."""
    is_new: bool = False
    """Whether it was started after the run had begun."""
    is_elastic: bool = False
    """Whether workers of its run may come and go."""
    inbox: Inbox = field(default_factory=Inbox)
    started_at: float = field(default_factory=time.monotonic)
    ended_at: float | None = None
    evicted: str | None = None
    """How it was lost, as the predicate of a sentence, if the coordinator goes on without it because it was silent."""
    is_leaving: bool = False
    """Whether it was asked to leave, so that nobody takes its place."""
    is_removed: bool = False
    """Whether the supervisor has ended it, because it is not needed any more."""

    def reason(self) -> str | None:
        """How it failed; None if it runs, or ended well."""
        if self.is_removed:
            return None
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
        return self.process.describe_end()

    @property
    def knocked_on(self) -> bool:
        """Whether it failed only because another rank did."""
        return self.evicted is None and self.inbox.failure is not None and self.inbox.failure.knock_on

    @property
    def is_needed(self) -> bool:
        """Whether the others cannot go on without it."""
        inbox = self.inbox
        if inbox.has_left or (inbox.failure is not None and inbox.failure.ends_run):
            return True  # All others end as well.
        # Where workers come and go, one that is killed before it trains is replaced. One whose own code fails there is
        # not: it would fail again, on all of them.
        was_killed = self.is_elastic and inbox.failure is None and (self.process.poll() or 0) < 0
        return not inbox.tolerates_loss and not self.is_starting and not was_killed

    @property
    def is_starting(self) -> bool:
        """Whether it was started to join the others, and has not joined them yet."""
        return self.is_new and not self.inbox.ever_tolerated_loss

    @property
    def has_joined(self) -> bool:
        """Whether it has trained with the others."""
        return self.inbox.ever_tolerated_loss

    @property
    def has_finished(self) -> bool:
        """Whether it has come to the end of its script, and has not left on purpose before."""
        left = self.inbox.has_left or self.is_removed
        return self.ended_at is not None and not left and self.reason() is None

    def own_failure(self) -> WorkerFailed | None:
        """The error of a lost worker whose own code failed; None if it was killed, or failed because of others."""
        if self.inbox.failure is None or self.knocked_on:
            return None
        return WorkerFailed(self.number, f"{self.inbox.failure.reason}; the others have finished without it")

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the worker alone: its training loop needs the workers of its DataLoader to its end."""
        self.process.send_signal(signal.SIGTERM)

    def ask_to_leave(self) -> None:
        """Have it leave the run: at the next boundary, or at once if it has not joined the others yet."""
        self.is_leaving = True
        if self.has_joined:
            self.ask_to_stop()
        else:
            self.remove()

    def remove(self) -> None:
        """End a worker that nobody needs."""
        self.is_removed = True
        self.process.signal_group(signal.SIGKILL)


def let_save(workers: Sequence[SupervisedWorker], read: Callable[[float], None]) -> None:
    """Ask workers that save their state to do so and to end, and `read` their output meanwhile."""
    saving = [worker for worker in workers if worker.inbox.grace_s and worker.process.poll() is None]
    if not saving:
        return
    grace_s = max(worker.inbox.grace_s for worker in saving)
    note = f"tutti: stopping after a last checkpoint, within {grace_s:g} s (Ctrl-C again: at once)"
    print(note, file=sys.stderr, flush=True)
    for worker in saving:
        worker.ask_to_stop()
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(worker.process.poll() is None for worker in saving):
        read(POLL_S)
