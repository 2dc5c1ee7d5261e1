"""The `--json FILE` of every command that measures."""

import json
import os
from pathlib import Path
from typing import Any

from tutti.errors import ConfigError


def check_writable(path: Path | None) -> None:
    """Refuse a file that cannot be written, before the work whose result it should hold."""
    if path is not None and (path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK)):
        raise ConfigError(f"--json: {path} cannot be written. Its folder must exist and allow it.")


def write_json(path: Path | None, value: Any) -> None:
    """Write `value`, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(value, indent=2) + "\n")
