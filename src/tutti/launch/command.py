"""Commands as workers: bind a process to its supervisor's life, then become the command.

Run as a file, so it imports nothing of Tutti: a command that needs no torch should not wait for its import.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; exit if `parent` has ended already."""
    # Kept across exec, but not across fork: children of this process are ended by their group.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It ended before the kernel was asked.
        os._exit(1)


def outlive(parent: int) -> None:
    """Undo `die_with`: the caller watches its parent by other means from now on."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Become the command in the arguments, after the number of the process not to outlive (0: its parent)."""
    parent, *command = sys.argv[1:]
    die_with(int(parent) or os.getppid())
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
