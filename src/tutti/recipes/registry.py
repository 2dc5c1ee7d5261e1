"""A registry that imports an entry only when it is looked up.

`tutti --help` lists the names of recipes and models. Importing the recipes themselves would import torch, which takes
seconds.
"""

from collections.abc import Iterator, Mapping
from typing import TypeVar

from tutti.plugins import load

T = TypeVar("T")


class LazyRegistry(Mapping[str, T]):
    """A read-only dict from names to objects. Objects are given as "module:attribute", as in Python entry points."""

    def __init__(self, locations: Mapping[str, str]) -> None:
        self._locations = dict(locations)

    def __getitem__(self, name: str) -> T:
        return load(self._locations[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    def __len__(self) -> int:
        return len(self._locations)
