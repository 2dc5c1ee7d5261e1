"""The folder of a run, under `runs/`."""

import time
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
