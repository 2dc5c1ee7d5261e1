"""The file of a command's `--json` option."""

import json
import os
from pathlib import Path
from typing import Any

from tutti.errors import ConfigError


def check_writable(path: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is measured."""
    if path is not None and (path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK)):
        # Measured for minutes and then lost would be worse than a refusal now.
        raise ConfigError(f"--json: {path} cannot be written. Its folder must exist and allow it.")


def write_json(path: Path | None, value: Any) -> None:
    """Write `value` to the file, if one was given."""
    if path is not None:
        path.write_text(json.dumps(value, indent=2) + "\n")
