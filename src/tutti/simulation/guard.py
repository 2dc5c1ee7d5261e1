"""A simulation stays inside its process: whatever would reach out of it is refused."""

import socket
import sys
import threading
from functools import cache, wraps
from typing import Any

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


@cache
def watch() -> None:
    """From now on simulated ranks cannot open sockets: neither Python's nor those of torch's stores. Others can."""
    from torch.distributed import TCPStore  # Late: the launcher uses `refuse` and need not wait for torch.

    sys.addaudithook(_hear)
    before = TCPStore.__init__

    @wraps(before)
    def init(self: TCPStore, *args: Any, **kwargs: Any) -> None:
        refuse("torch.distributed.TCPStore opens real sockets")
        before(self, *args, **kwargs)

    TCPStore.__init__ = init  # type: ignore[method-assign]


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if event == "socket.__new__" and args[1] in _NETWORK:
        refuse("a real socket was opened")
