"""Registries: what Tutti knows by name, and what installed packages add to it by entry points.

A registry is a read-only dict. Its built-in entries are written in one place, in the package that they belong to; a
value may be a text "module:attribute", which is imported when it is looked up. Other packages add entries of a group:

    [project.entry-points."tutti.codecs"]
    sign = "my_package.sign:Sign"

Entry points are read when a name is looked up that is not built in, or when names are listed, and only once. A package
is imported only when one of its names is looked up. A package cannot replace a built-in entry, and a name that two
packages offer is refused when it is looked up: nothing depends on the order in which packages are found.
"""

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from tutti.errors import PluginError, UnknownName

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Entries by name: built-in ones, then those of installed packages.

    Args:
        kind: what an entry is called in messages, such as "codec".
        group: the group of entry points, such as "tutti.codecs".
        built_in: entries by name, or "module:attribute" texts.
        accepts: whether an object that a package offers has the right type.
        wanted: what it should be, for messages.
        reserved: built-in names of other registries, which packages cannot use here either.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        built_in: Mapping[str, T | str],
        accepts: Callable[[Any], bool],
        wanted: str,
        reserved: Iterable[str] = (),
    ) -> None:
        self.kind, self.group, self.built_in = kind, group, dict(built_in)
        self._reserved = {*built_in, *reserved}
        self._accepts, self._wanted = accepts, wanted
        self._offered: dict[str, list[EntryPoint]] | None = None
        self._loaded: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        """Return the entry; raise `KeyError` if there is none and `PluginError` if its package is wrong."""
        if name in self._loaded:
            return self._loaded[name]
        # Built-in names come first, so an installed package can never replace a strategy that ships with Tutti. What
        # was loaded is kept: importing a package may be slow, and two lookups must give the same object.
        if name in self.built_in:
            entry = self.built_in[name]
            self._loaded[name] = load(entry) if isinstance(entry, str) else entry
        elif name in self._plugins():
            self._loaded[name] = self._load_plugin(name)
        else:
            raise KeyError(name)
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        # Does not load the entry, so a broken package is reported only when its name is used.
        return name in self.built_in or name in self._plugins()

    def __iter__(self) -> Iterator[str]:
        return iter([*self.built_in, *self._plugins()])

    def __len__(self) -> int:
        return len(self.built_in) + len(self._plugins())

    def find(self, name: str) -> T:
        """Return the entry, or raise `UnknownName` with all known names and with the packages that cannot be loaded."""
        if name not in self:
            raise self.unknown(name)
        return self[name]

    def unknown(self, name: str, kind: str | None = None, known: Mapping[str, Any] | None = None) -> UnknownName:
        """Return the error for an unknown name; it lists this registry's names, and those of `known`."""
        return UnknownName(kind or self.kind, name, [*self, *(known or ())], self.load_failures().values())

    def package_of(self, name: str) -> str | None:
        """Return the package that offers `name`; None if it is built in."""
        return None if name in self.built_in else " and ".join(map(_package, self._plugins()[name]))

    def load_failures(self) -> dict[str, str]:
        """Load everything that packages offer; return what is wrong with those that fail, by name."""
        failures = {}
        for name in self._plugins():
            try:
                # Loading it is the check; what is loaded stays loaded.
                self[name]
            except PluginError as error:
                failures[name] = str(error)
        return failures

    def forget_plugins(self) -> None:
        """Read entry points again when they are next needed: packages were installed or removed since."""
        self._offered = None
        self._loaded.clear()

    def _plugins(self) -> dict[str, list[EntryPoint]]:
        """Return the entry points of the group by name, without those that have a built-in name."""
        # Scanning the metadata of all installed packages takes milliseconds, so it is done once, and not at import.
        if self._offered is None:
            offered: dict[str, list[EntryPoint]] = {}
            for point in entry_points(group=self.group):
                offered.setdefault(point.name, []).append(point)
            for name in offered.keys() & self._reserved:
                packages = " and ".join(map(_package, offered.pop(name)))
                warnings.warn(
                    f"{packages} offers the {self.kind} '{name}', which is built in and stays what it is: that package "
                    "should use another name.",
                    stacklevel=2,
                )
            self._offered = offered
        return self._offered

    def _load_plugin(self, name: str) -> T:
        """Import the entry that a package offers. Raises `PluginError` if there are several, or it is wrong."""
        points = self._plugins()[name]
        # One package can be found twice, installed and on the path: that is no conflict.
        if len({(_package(point), point.value) for point in points}) > 1:
            packages = " and ".join(f"{_package(point)} ({point.value})" for point in points)
            raise PluginError(f"{self.kind} '{name}' is offered by {packages}. Uninstall all but one.")
        point = points[0]
        try:
            entry = point.load()
        # Anything may go wrong in another package's import: the message must name that package.
        except Exception as error:
            raise PluginError(
                f"{_package(point)} offers the {self.kind} '{name}' and failed to load ({point.value}): "
                f"{type(error).__name__}: {error}"
            ) from error
        if not self._accepts(entry):
            raise PluginError(
                f"{_package(point)} offers the {self.kind} '{name}' ({point.value}) as {describe(entry)}; wanted is "
                f"{self._wanted}."
            )
        return entry


def load(location: str) -> Any:
    """Import the object that "module:attribute" names."""
    module, _, attribute = location.partition(":")
    return getattr(importlib.import_module(module), attribute)


def checked(made: Any, kind: type[T], registry: Registry[Any], name: str) -> T:
    """Return what an entry made, or raise `PluginError` if it is not of the kind that its package should make."""
    if not isinstance(made, kind):
        package = registry.package_of(name) or "Tutti"
        raise PluginError(
            f"{package} offers the {registry.kind} '{name}', which made {describe(made)}; wanted is a "
            f"{kind.__module__}.{kind.__qualname__}."
        )
    return made


def describe(thing: Any) -> str:
    """Name a class, a function or the type of an object, for messages."""
    if isinstance(thing, type):
        return f"the class {thing.__qualname__}"
    return f"{thing!r:.80} of type {type(thing).__qualname__}"


def _package(point: EntryPoint) -> str:
    return f"package '{point.dist.name}'" if point.dist is not None else "a package without a name"
