"""The folder of a run, under `runs/`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tutti.errors import ConfigError


def new_folder(name: str | None, prefix: str) -> Path:
    """Make the folder runs/`name`; without a name, one of `prefix` and the time."""
    name = name or f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}"
    if Path(name).name != name:
        raise ConfigError(f"--name is the name of a folder under runs/, not a path; got '{name}'.")
    folder = Path("runs") / name
    # Never written into again: two runs in one folder could not be told apart.
    if folder.exists():
        raise ConfigError(f"{folder} exists already; give another --name.")
    folder.mkdir(parents=True)
    return folder


@contextmanager
def note_folder_on_error(folder: Path) -> Iterator[None]:
    """Add a note to any exception that says where the partial record of the run is."""
    try:
        yield
    except BaseException as error:
        saved = any(folder.glob("step-*"))
        error.add_note(
            f"the run is in {folder}: continue it with tutti train --resume {folder}"
            if saved
            else f"the partial record of the run is in {folder}"
        )
        raise
