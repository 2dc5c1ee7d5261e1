"""`Interrupts`: Ctrl-C in a process that trains alone, which takes effect between two steps, after a last checkpoint.

Where workers were started, their launcher has them save their state (`tutti.launch.supervisor`).
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tutti.recipes.loop import RunCheckpoints


class Interrupts:
    """Notes the first Ctrl-C; the second one interrupts at once."""

    def __init__(self) -> None:
        self._checkpoints: RunCheckpoints | None = None
        self._received = False

    @contextmanager
    def handled(self, checkpoints: RunCheckpoints | None) -> Iterator[None]:
        """Handle Ctrl-C while the context lasts, unless `checkpoints` is None, or the script handles it itself."""
        is_main = threading.current_thread() is threading.main_thread()
        if checkpoints is None or not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        self._checkpoints = checkpoints
        signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def raise_any(self) -> None:
        """Between two steps: save the state and raise `KeyboardInterrupt`, if there was a Ctrl-C."""
        if self._received and self._checkpoints is not None:
            self._checkpoints.end()
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            raise KeyboardInterrupt
        self._received = True
