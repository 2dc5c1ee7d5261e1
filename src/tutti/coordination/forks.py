"""Sockets that children of this process must not inherit.

A process that forks, as a DataLoader with workers does, gives its children all its open sockets. A connection ends only
when the last of them is closed. So if the process died, its peers would not notice while a child lives on. The sockets
that are registered here are closed in every child.

Programs that are started (exec) need none of this: sockets of Python are closed then.
"""

import os
import socket
from contextlib import suppress
from weakref import WeakSet

_registered: WeakSet[socket.socket] = WeakSet()
"""Per process, as forking is."""


def close_in_children(opened: socket.socket) -> socket.socket:
    """Have a socket closed in processes that are forked from this one; return it."""
    _registered.add(opened)
    return opened


def _close() -> None:
    for opened in list(_registered):
        with suppress(OSError):
            # Only the number, in this process alone: the connection itself goes on in the parent. Detached, because the
            # child gives the number to the next file that it opens, which the socket would close when it is deleted.
            os.close(opened.detach())


os.register_at_fork(after_in_child=_close)
