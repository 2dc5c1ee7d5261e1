"""A simulation stays inside its process: whatever would reach out of it is refused."""

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch.distributed import TCPStore

from tutti.errors import ConfigError

_here = threading.local()

_NETWORK = (socket.AF_INET, socket.AF_INET6)


def enter() -> None:
    """From now on, this thread is a simulated rank's."""
    _here.simulated = True


def refuse(what: str) -> None:
    """Raise if this is a simulated rank."""
    if getattr(_here, "simulated", False):
        raise ConfigError(
            f"{what} inside a simulation: simulated ranks talk through tutti.world().transport alone, and nothing "
            "leaves their process."
        )


@contextmanager
def only() -> Iterator[None]:
    """Within it, simulated ranks cannot open sockets: neither Python's nor those of torch's stores."""
    _watch_sockets()
    before = TCPStore.__init__

    def init(self: TCPStore, *args: Any, **kwargs: Any) -> None:
        refuse("torch.distributed.TCPStore opens real sockets")
        before(self, *args, **kwargs)

    TCPStore.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        TCPStore.__init__ = before  # type: ignore[method-assign]


@cache
def _watch_sockets() -> None:
    sys.addaudithook(_hear)


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if event == "socket.__new__" and args[1] in _NETWORK:
        refuse("a real socket was opened")
