"""SIGTERM and SIGUSR1 as requests to stop: the training loop writes one more checkpoint, and then ends the process.

How it works. Schedulers send SIGTERM, or SIGUSR1 some time before (Slurm's `--signal`), to every process of a job. The
handler only notes the signal; the next `job.checkpoint` asks for it (`requested`). A timer ends the process if that
takes longer than the grace period: the loop may be stuck, or the script may go on with something else after it.

Handlers belong to the process, and so does the state here. They are installed by the first job that writes
checkpoints, or that serves others which may, in the main thread, and removed with the last. A handler of the script's
own is left alone. Processes that are forked from this one inherit the handler, and end as they would without it; the
workers of a DataLoader go on (`tutti.data.worker_signals`).
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any
from weakref import WeakSet

from torch.utils.data import get_worker_info

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class _Requests:
    """The requests to this process."""

    def __init__(self) -> None:
        self.users: WeakSet[Any] = WeakSet()
        """Weak: a job may be dropped without its end."""
        self.saved: WeakSet[Any] = WeakSet()
        """Users that have saved their state since a request came."""
        self.received = 0
        """The number of the first signal that came; 0 if none."""
        self._grace_s = 0.0
        self._pid = 0
        self._installed: list[signal.Signals] = []

    def install(self, grace_s: float) -> None:
        """Handle the signals that nobody handles yet, if this is the main thread."""
        self._pid, self._grace_s = os.getpid(), grace_s
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) == signal.SIG_DFL:
                    signal.signal(number, self._handle)
                    self._installed.append(number)

    def remove(self) -> None:
        """Give the signals their default meaning again, if none has come.

        After one, the script has the rest of its time to end, and another job of it is asked to stop as well.
        """
        if self.received:
            return
        if threading.current_thread() is threading.main_thread():
            for number in self._installed:
                signal.signal(number, signal.SIG_DFL)
            self._installed = []

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # A child made by fork: the request is not for the training loop.
            if get_worker_info() is not None:
                return  # The loop needs the workers of its DataLoader until it ends, and they end with it.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.received:
            return
        self.received = number
        timer = threading.Timer(self._grace_s, self._give_up)
        timer.daemon = True
        timer.start()

    def _give_up(self) -> None:
        name = signal.Signals(self.received).name
        text = f"tutti: still not at an end {self._grace_s:g} s after {name}: ending now."
        with suppress(OSError, ValueError):  # Nobody reads it any more, or the script has closed it.
            print(text, file=sys.stderr, flush=True)
        os._exit(128 + self.received)


_requests = _Requests()


def watch(user: Any, grace_s: float) -> None:
    """Note signals from now on, for one more user; `grace_s` is how long the process may go on after one."""
    if not _requests.users:
        _requests.install(grace_s)
    _requests.users.add(user)


def unwatch(user: Any) -> None:
    """End what `watch` started."""
    _requests.users.discard(user)
    if not _requests.users:
        _requests.remove()


def others_save(user: Any) -> bool:
    """Note that a user has saved its state after a request, and return whether others have yet to do so.

    Only once: one that comes here again has waited for the others in vain.
    """
    if user in _requests.saved:
        return False
    _requests.saved.add(user)
    return any(other not in _requests.saved for other in _requests.users)


def requested() -> int:
    """Return the number of the signal that asked this process to stop; 0 if none did."""
    return _requests.received
