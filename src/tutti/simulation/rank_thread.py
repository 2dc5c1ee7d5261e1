"""The thread of a simulated rank: it runs user code while the engine gives it the turn.

How it works
------------
A thread starts blocked on its own `turn` lock. The engine releases that lock to let it run and waits until the thread
calls `engine.return_turn()`: in `yield_turn`, where the thread then blocks on `turn` again, or at its end.

`paused` is True while the thread is blocked on `turn`. The thread sets it just before it returns the turn; the engine
clears it before it releases `turn`. `Engine.stop` needs it to release each lock exactly once.

A rank that must go no further (it died, it is doomed, the simulation is over) is unwound by `Stopped`, raised from its
next wait. User code may catch even that (`except BaseException`, or a `finally` that waits again). After
`_MAX_UNWINDS` such attempts the thread is abandoned: it is marked as ended, the turn goes back to the engine, and the
thread sleeps until the process exits. It is a daemon, so it keeps no process alive.
"""

import threading
from collections.abc import Callable
from typing import Any, NoReturn

from tutti.errors import Deadlock
from tutti.simulation.engine import Engine

_MAX_UNWINDS = 20
"""Number of times that a function may catch `Stopped` before its thread is abandoned."""


class Stopped(BaseException):
    """Unwinds the thread of a rank that must go no further. It is not an error, and nobody should catch it."""


class RankThread:
    """The thread of one simulated rank, and how its function ended."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self.turn = threading.Lock()
        self.turn.acquire(
            blocking=False
        )  # Held from the start: the thread blocks on it until the engine first releases it.
        self.paused = True
        """Whether the thread is blocked on `turn`."""
        self.ended = False
        self.result: Any = None
        """The value that the function returned."""
        self.error: BaseException | None = None
        """The exception that the function raised; None where it returned, exited with status 0, or the rank died."""
        self.died = False
        """Whether the cluster's `failures` killed the rank."""
        self.doom: Deadlock | None = None
        """The error that ends the rank, even if its function catches it."""
        self._num_unwinds = 0
        self._abandoned = False
        self._thread: threading.Thread | None = None

    def start(self, function: Callable[[], Any]) -> None:
        """Start the thread. It calls `function` when it first gets the turn."""
        thread = threading.Thread(target=self._run, args=(function,), name=self._name, daemon=True)
        thread.start()
        self._thread = thread

    @property
    def alive(self) -> bool:
        """Whether there is a thread to end."""
        return self._thread is not None and not self.ended

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end of the thread, unless it was abandoned."""
        if self._thread is not None and not self._abandoned:
            self._thread.join(seconds)

    def yield_turn(self) -> None:
        """Let the engine continue, and block until it gives the turn back. Called in the thread itself."""
        self.paused = True
        self._engine.return_turn()
        # Ended by the engine, when it is this rank's turn or the simulation stops.
        self.turn.acquire()

    def unwind(self) -> NoReturn:
        """Raise `Stopped`, or never return if the function keeps catching it. Called in the thread itself."""
        self._num_unwinds += 1
        if self._num_unwinds > _MAX_UNWINDS:
            self._abandon()
        raise Stopped

    def _run(self, function: Callable[[], Any]) -> None:
        # Ended by the engine, when it is this rank's turn or the simulation stops.
        self.turn.acquire()
        try:
            if not self._engine.stopping:  # Not if the simulation failed before this rank's first turn.
                self.result = function()
        except Stopped:
            pass  # Raised by `unwind` in this very thread.
        except SystemExit as error:
            # Status 0 is a normal end: `distribute` leaves a dedicated server's function so.
            self.error = error if error.code else None
        except BaseException as error:
            self.error = error  # `simulate` raises it in the caller's thread.
        finally:
            # Death is planned, no error. A doom holds even if the function has caught it.
            self.error = None if self.died else self.doom or self.error
            self.ended = True
            self._engine.return_turn()  # Last: from here on the engine's thread runs.

    def _abandon(self) -> None:
        """Continue the simulation without this thread, which sleeps until the process ends."""
        self._abandoned = self.ended = True
        self.error = None if self.died else self.doom
        self._engine.return_turn()
        threading.Event().wait()  # Nobody sets it.
