"""The folder of a run, under `runs/`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tutti.errors import ConfigError


def new_folder(name: str | None, otherwise: str) -> Path:
    """Make a folder of that name, or one called after the time."""
    name = name or f"{otherwise}-{time.strftime('%Y%m%d-%H%M%S')}"
    if Path(name).name != name:
        raise ConfigError(f"--name is the name of a folder under runs/, not a path; got '{name}'.")
    folder = Path("runs") / name
    if folder.exists():
        raise ConfigError(f"{folder} exists already; give another --name.")
    folder.mkdir(parents=True)
    return folder


@contextmanager
def kept(folder: Path) -> Iterator[None]:
    """What ends a run before its end says where its record is."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"what there is of the run is in {folder}")
        raise
