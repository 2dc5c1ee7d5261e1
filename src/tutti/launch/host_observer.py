"""`HostObserver`: a small process that tells the coordinator how the processes of its host are.

How it works. A rank whose code holds the interpreter's lock sends no heartbeats, and neither does one that is stopped.
Who looks at their processes can tell them apart. The coordinator sees those of its own host alone. So the first rank of
every other host starts this process. It is a member of the job without a rank. Whenever a member of its host is silent,
the coordinator asks it to look (`tutti.coordination.liveness`).

Its standard input is a socket of the rank that started it, which sends nothing. The kernel closes it when the rank
ends, at the latest, and the process ends then. A stopped rank keeps it open. Ranks of a host whose observer has ended
are still seen by each other.
"""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta

from tutti.coordination import MemberDescription, connect_member
from tutti.coordination.forks import close_in_children
from tutti.coordination.link import Endpoint
from tutti.errors import TuttiError
from tutti.launch.control_settings import find_patience, find_secret
from tutti.launch.host import host_id, host_name
from tutti.launch.interpreter import main_of

_CONNECT = timedelta(seconds=60)
_CLOSE_S = 5.0

TAKES_PART = b"\n"
"""What the process sends when it is a member. Nobody has to read it."""


class HostObserver:
    """The end of the rank that starts it."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Start it for the coordinator at `endpoint`. It finds the secret and the patience as this process does."""
        # A socket, because forked children of this rank, which may outlive it, close those.
        own, other = socket.socketpair()
        self.end = close_in_children(own)
        with other:
            try:
                self._process = subprocess.Popen(
                    [*main_of("tutti.launch.host_observer"), endpoint.address, str(endpoint.port)],
                    stdin=other.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except OSError:
                own.close()
                raise

    def close(self) -> None:
        """End it. Idempotent."""
        self.end.close()
        # It says bye and ends. If somebody has stopped it, that is not worth a wait.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        self._process.kill()


def main() -> None:
    """Take part as an observer until the rank that started this process ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # As sent to all processes of a user's job.
        signal.signal(number, signal.SIG_IGN)
    address, port = sys.argv[1:]
    endpoint, patience = Endpoint(address, int(port)), find_patience()
    observer = MemberDescription.this_process(-1, host_name(), host_id())
    with suppress(TuttiError):  # The rank itself reports why there is no connection.
        member = connect_member(observer, endpoint, find_secret(), timeout=_CONNECT, patience=patience)
        with suppress(OSError):  # The rank has ended already.
            os.write(sys.stdin.fileno(), TAKES_PART)
            sys.stdin.buffer.read()  # Ended by the kernel with the rank.
        member.close()
    os._exit(0)  # Quicker than the interpreter's own end, for which the rank waits.
