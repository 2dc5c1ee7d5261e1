"""What workers do where torch plays no part: a module without it, so that they need not import it."""

import os
import select
import subprocess
import sys
from pathlib import Path


def whereabouts() -> tuple[int, int]:
    return os.getpid(), os.getppid()


def hash_of(text: str) -> tuple[int, int]:
    return hash(text), os.getppid()


def wait_for_ever(pids: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import select; select.select([], [], [], 60)"])
    Path(pids, str(os.getpid())).touch()
    Path(pids, str(child.pid)).touch()
    select.select([], [], [], 60)
