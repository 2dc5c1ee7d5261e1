"""Signals in the worker processes of a DataLoader: those that ask a whole job to stop leave a worker running.

How it works. Schedulers send SIGTERM or SIGUSR1 to all processes of a job that is to save its state and to end. A
training loop whose workers have ended does not come to its next checkpoint. But torch and Python themselves end workers
by SIGTERM, also one that hangs in code of the user's. So the handler looks at the sender: upon SIGTERM from its parent
a worker ends at once, with status 0, and from anybody else it goes on. It ends with its parent, as torch sees to.

The handler is machine code. Python does not say who sent a signal, and a handler in Python would not run while the
worker hangs in a library. A thread that waits for the signal would need it blocked, also in programs that a dataset
starts; these keep the signal's default meaning here.

Both signals are blocked in the process that starts workers, which inherit that, until a worker has its handlers
(`held_back`, `keep_running`): so none of them comes too early.
"""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

from numba import cfunc, types

_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1})
_SENDER = 4
"""Place of the sender's number in `siginfo_t`, in 32-bit words, on 64-bit Linux."""
_SA_SIGINFO, _SA_RESTART = 0x4, 0x10000000

_exit = types.ExternalFunction("_exit", types.void(types.int32))
_getppid = types.ExternalFunction("getppid", types.int32())
_HANDLER = types.void(types.int32, types.CPointer(types.int32), types.voidptr)


def _end_for_parent(number, info, context):  # type: ignore[no-untyped-def]
    """End this process if its parent has sent the signal. Both functions that it calls may be called in handlers."""
    if info[_SENDER] == _getppid():
        _exit(0)


def _compiled() -> Any:
    try:
        return cfunc(_HANDLER, cache=True)(_end_for_parent)
    except RuntimeError:  # There is no folder to write the cache to.
        return cfunc(_HANDLER)(_end_for_parent)


_handler = _compiled()  # With the module, which workers inherit when they are forked.


class _Action(ctypes.Structure):
    """`struct sigaction`."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


@contextmanager
def held_back(start_method: str) -> Iterator[None]:
    """Start workers in this context: the signals come to one when it has called `keep_running`."""
    if start_method == "forkserver":  # The server, which may be started here, would block them in all that it forks.
        yield
        return
    if start_method == "spawn":
        resource_tracker.ensure_running()  # It would unblock SIGTERM when it is started later.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def keep_running() -> None:
    """Have this worker go on after SIGTERM and SIGUSR1, unless its parent sends SIGTERM."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # A handler that was inherited is meant for the training process.
    main = multiprocessing.parent_process()
    # A fork server would be the parent, and not the process that ends the worker. It does not outlive the signal.
    if main is not None and main.pid == os.getppid():
        action = _Action(handler=_handler.address, flags=_SA_SIGINFO | _SA_RESTART)
        if ctypes.CDLL(None, use_errno=True).sigaction(signal.SIGTERM, ctypes.byref(action), None):
            raise OSError(ctypes.get_errno(), "sigaction")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
