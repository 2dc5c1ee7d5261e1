"""The guard of a simulation: simulated ranks open no real sockets and start no real processes.

How it works
------------
A thread-local flag marks the threads of simulated ranks (`enter`). `refuse` raises in such a thread and does nothing in
others; `tutti.init`, `launch` and `simulate` call it.

`install` adds two things to the process, once, for good: an audit hook, which Python calls when any socket is made, and
a wrapper around `TCPStore.__init__`, whose sockets are made in C++ and not audited. Both only call `refuse`, so the
rest of the process is not affected, also while a simulation runs.
"""

import socket
import sys
import threading
from functools import cache, wraps
from typing import Any

from tutti.errors import ConfigError

_thread_local = threading.local()

_NETWORK = (socket.AF_INET, socket.AF_INET6)


def enter() -> None:
    """Mark this thread as that of a simulated rank."""
    _thread_local.simulated = True


def refuse(what: str) -> None:
    """Raise `ConfigError` if this thread is that of a simulated rank; `what` was attempted."""
    if getattr(_thread_local, "simulated", False):
        raise ConfigError(
            f"{what} inside a simulation: simulated ranks communicate through tutti.world().transport alone, and "
            "nothing leaves their process."
        )


@cache
def install() -> None:
    """Refuse Python's sockets and torch's stores in the threads of simulated ranks, from now on."""
    from torch.distributed import TCPStore  # Late: the launcher uses `refuse` and need not wait for torch.

    sys.addaudithook(_audit)  # It cannot be removed: hence `cache`, once per process.
    before = TCPStore.__init__

    @wraps(before)
    def init(self: TCPStore, *args: Any, **kwargs: Any) -> None:
        refuse("torch.distributed.TCPStore opens real sockets")
        before(self, *args, **kwargs)

    TCPStore.__init__ = init  # type: ignore[method-assign]


def _audit(event: str, args: tuple[Any, ...]) -> None:
    # The arguments are the socket, its family, type and protocol. Unix sockets are allowed.
    if event == "socket.__new__" and args[1] in _NETWORK:
        refuse("a real socket was opened")
