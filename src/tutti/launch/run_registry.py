"""Runs of this user on this machine: where each one's coordinator is, and its secret, for `tutti status`.

A file per run, that only its user may read, with the process id of its launcher as its name. The launcher removes it.
If the launcher was killed, the next one who reads the folder does.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tutti.coordination.description import start_time


@dataclass(frozen=True)
class RunningRun:
    """A run that a launcher of this machine has started."""

    pid: int
    """Process id of the launcher."""
    started: int
    """Start time of that process: process ids are reused."""
    address: str
    port: int
    secret: str = field(repr=False)
    encrypt: bool
    workers: int
    command: str
    """What runs, for people."""


def folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the files are."""
    state = environment.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "tutti" / "runs"


def announce(run: RunningRun) -> Path | None:
    """Write the file of a run; None if there is no place for it, which only `tutti status` will miss."""
    path = folder() / f"{run.pid}.json"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Not readable by others from the beginning: it holds the secret.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "w") as opened:
            json.dump(asdict(run), opened)
    except OSError:
        return None
    return path


def running() -> list[RunningRun]:
    """The runs whose launchers are alive, the oldest first. Removes the files of others."""
    found = []
    for path in sorted(folder().glob("*.json")):
        try:
            run = RunningRun(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue  # It is being written, or was removed.
        if start_time(run.pid) == run.started:
            found.append(run)
        else:
            with suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda run: run.started)
