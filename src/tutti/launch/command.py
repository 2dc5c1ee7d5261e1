"""What starts a worker that is any command: bind its life to the supervisor's, then become the command.

Run as a file, so it imports nothing of ours: a command that needs no torch should not wait for its import.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel end this process when its supervisor ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    parent, *command = sys.argv[1:]
    die_with(int(parent) or os.getppid())  # 0 is whoever started it.
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
