"""Guardian: a small process that ends what spawned workers have started, if their supervisor is killed.

How it works. The kernel kills a spawned worker with its supervisor, but not the worker's own children (workers of a
DataLoader, other programs). So the supervisor starts this process with its first spawned worker, and writes the process
group of each worker into its standard input. The input ends when the supervisor does: then all those groups are killed.
A supervisor that ends well has ended the groups itself, and says so first (`_DONE`). Forked workers need no guardian:
the fork server does the same for them.

The process has a session of its own, so Ctrl-C does not end it before the supervisor. It waits for its input alone,
which the kernel closes at the latest when the supervisor dies.

Run as a file, so it imports nothing of Tutti: it starts in a few milliseconds.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress

_DONE = b"done"
_CLOSE_S = 5.0


class Guardian:
    """The supervisor's end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd="/",  # It must not keep a folder in use.
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        """Have a process group ended, should this process be killed."""
        self._write(b"%d" % group)

    def close(self) -> None:
        """All groups are ended."""
        self._write(_DONE)
        assert self._process.stdin is not None
        self._process.stdin.close()
        # Ended by the line just written. If somebody has stopped it, that is not worth a wait.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # Somebody has killed it. The run itself does not need it.
            os.write(self._process.stdin.fileno(), line + b"\n")


def main() -> None:
    """Read process groups until the input ends; kill them unless the supervisor said that it is done."""
    for number in (signal.SIGTERM, signal.SIGUSR1):  # As sent to all processes of a user's job, before SIGKILL.
        signal.signal(number, signal.SIG_IGN)
    groups = []
    # Ended by the supervisor, or by the kernel when that has died.
    for line in sys.stdin.buffer:
        if line.strip() == _DONE:
            return
        groups.append(int(line))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


if __name__ == "__main__":
    main()
