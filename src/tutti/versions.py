"""The versions of torch and Python that Tutti supports, and the error that others get.

`make test-matrix` runs the quick tests on them. pyproject.toml and README state the same range; a test compares them.
"""

import re
from importlib.metadata import PackageNotFoundError, version

from tutti.errors import UnsupportedVersion

TORCH = ("2.9", "2.15")
"""Oldest and newest supported release of torch."""

PYTHON = ("3.11", "3.13")
"""Oldest and newest supported release of Python."""


def check_torch() -> None:
    """Raise `UnsupportedVersion` if the installed torch is outside `TORCH`. Imports no torch, which takes seconds."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        return  # Not installed, which the import of torch says best, or without metadata: then nobody knows.
    if not in_range(found, TORCH):
        raise UnsupportedVersion("torch", found, TORCH)


def in_range(found: str, supported: tuple[str, str]) -> bool:
    """Whether a version such as "2.13.0+cpu" belongs to a release from the first to the second of `supported`."""
    oldest, newest = map(_release, supported)
    return oldest <= _release(found) <= newest


def _release(text: str) -> tuple[int, int]:
    numbers = re.findall(r"\d+", text)[:2]  # Also of "2.15rc1".
    return int(numbers[0]), int(numbers[1])
