"""The report of ranks that hold others up: one line, updated in place on the launcher's terminal.

How it works. The coordinator finds causes in its own thread, as new tuples that any thread may read. The launcher shows
them from the loop in which it supervises the workers (`DiagnosisLine.update`). Under torchrun, mpirun and srun the
coordinator is in the process of rank 0, whose main thread trains: there, `DiagnosisThread` prints them. It is a thread
of its own because a write to a full pipe waits for its reader, and the coordinator must not.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from tutti.coordination import Coordinator
from tutti.coordination.diagnosis import HeldUp

_LOOK_S = 0.25
"""How often the thread looks for new findings: as often as the coordinator makes them."""

_RECENT_S = 3.0
"""How old a finding may be to be shown beside the error of a run."""

_CLOSE_S = 1.0
"""How long the end of the process waits for a line that is being written."""


class DiagnosisLine:
    """Shows who holds the others up, and since when.

    On a terminal the line is written over itself. Elsewhere a line is printed when a cause is found, and again each
    time the wait has doubled.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        listener: Callable[[tuple[HeldUp, ...]], None] = lambda held_up: None,
        *,
        in_place: bool = True,
    ) -> None:
        """Write to `stream`, standard error by default, and call `listener` with every new finding.

        Args:
            in_place: write over the line on a terminal. Not where other processes write to the same terminal.
        """
        self._listener = listener
        self._stream = stream or sys.stderr
        self._in_place = in_place and self._stream.isatty()
        self._shown = False
        self._next_s: dict[tuple[int, str], float] = {}
        """When each cause is printed next, in seconds of waiting."""
        self.last: tuple[HeldUp, ...] = ()
        """The causes that were reported last."""
        self._found: tuple[HeldUp, ...] = ()
        """The last causes that there were, for the error if the run fails. A loss ends the waits that showed them."""
        self._found_at = 0.0

    def update(self, held_up: tuple[HeldUp, ...]) -> None:
        """Show what the coordinator has found now."""
        if held_up is self.last:
            return
        # A loss is an error of the ranks that need the lost one, and is reported as such.
        before, self.last = self.last, held_up
        if held_up:
            self._found, self._found_at = held_up, time.monotonic()
        held_up = tuple(each for each in held_up if each.cause != "gone")
        self._listener(held_up)
        if self._in_place:
            self._write_over(str(held_up[0]) if held_up else "")
            return
        for each in held_up:
            key = each.rank, each.cause
            if each.seconds >= self._next_s.get(key, 0.0):
                self._next_s[key] = 2 * each.seconds
                print(f"tutti: {each}", file=self._stream, flush=True)
        over = {(each.rank, each.cause) for each in before} - {(each.rank, each.cause) for each in held_up}
        for key in over:
            self._next_s.pop(key, None)

    def clear(self) -> None:
        """Take the line away, before something else is printed."""
        if self._shown:
            self._write_over("")

    def report_failure(self) -> None:
        """Print what was found a moment ago, beside the error of a run that failed."""
        if time.monotonic() - self._found_at < _RECENT_S:
            for each in self._found:
                print(f"tutti: shortly before it failed: {each}", file=self._stream, flush=True)

    def _write_over(self, text: str) -> None:
        # Carriage return, and "erase to the end of the line" of ECMA-48.
        self._stream.write(f"\r\x1b[K{'tutti: ' if text else ''}{text[:150]}")
        self._stream.flush()
        self._shown = bool(text)


class DiagnosisThread:
    """Prints what a coordinator of this process finds, from its creation until `close`."""

    def __init__(self, coordinator: Coordinator, stream: TextIO | None = None) -> None:
        self._coordinator = coordinator
        self._line = DiagnosisLine(stream, in_place=False)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tutti diagnosis", daemon=True)
        self._thread.start()

    def close(self, failed: bool = False) -> None:
        """End the thread; print the last findings if this process has `failed`."""
        self._over.set()
        self._thread.join(_CLOSE_S)
        if failed:
            self._line.report_failure()

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            self._line.update(self._coordinator.held_up)
