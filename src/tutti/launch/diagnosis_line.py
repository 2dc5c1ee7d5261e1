"""The launcher's report of ranks that hold others up: one line, updated in place on a terminal."""

import sys
from collections.abc import Callable
from typing import TextIO

from tutti.coordination.diagnosis import HeldUp


class DiagnosisLine:
    """Shows who holds the others up, and since when.

    On a terminal the line is written over itself. Elsewhere a line is printed when a cause is found, and again each
    time the wait has doubled.
    """

    def __init__(
        self, stream: TextIO | None = None, listener: Callable[[tuple[HeldUp, ...]], None] = lambda held_up: None
    ) -> None:
        """Write to `stream`, standard error by default, and call `listener` with every new finding."""
        self._listener = listener
        self._stream = stream or sys.stderr
        self._in_place = self._stream.isatty()
        self._shown = False
        self._next_s: dict[tuple[int, str], float] = {}
        """When each cause is printed next, in seconds of waiting."""
        self.last: tuple[HeldUp, ...] = ()
        """The causes that were reported last, for the error if the run fails."""

    def update(self, held_up: tuple[HeldUp, ...]) -> None:
        """Show what the coordinator has found now."""
        if held_up is self.last:
            return
        # A loss is an error of the ranks that need the lost one, and is reported as such.
        before, self.last = self.last, held_up
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

    def _write_over(self, text: str) -> None:
        # Carriage return, and "erase to the end of the line" of ECMA-48.
        self._stream.write(f"\r\x1b[K{'tutti: ' if text else ''}{text[:150]}")
        self._stream.flush()
        self._shown = bool(text)
