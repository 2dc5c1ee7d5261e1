"""`WeakRegistry`: the living objects that hooks of the whole process serve.

How it works
------------
Functions of torch are hooked, or replaced, once for the whole process, and then serve all objects of a registry. Ranks
may be threads, in simulations for example, so one may add or remove an object while another goes through them: the
tuple of references is never changed, but replaced as a whole, and writers take a lock. References are weak: a job that
is dropped without `finish` is collected with its model.
"""

from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar
from weakref import ref

T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """Objects that are added, and not removed or collected since."""

    def __init__(self, install: Callable[[], None]) -> None:
        """Call `install` once, when the first object is added."""
        self._install, self._installed = install, False
        self._lock = Lock()
        self._references: tuple[ref[T], ...] = ()

    def add(self, added: T) -> None:
        """Add an object, which is not kept alive by it."""
        with self._lock:
            self._references = (*(each for each in self._references if each() is not None), ref(added))
            if not self._installed:
                self._installed = True
                self._install()

    def remove(self, removed: T) -> None:
        """Remove an object. Idempotent."""
        with self._lock:
            self._references = tuple(each for each in self._references if each() not in (removed, None))

    def living(self) -> list[T]:
        """Return the objects that are left, in the order in which they were added."""
        return [found for each in self._references if (found := each()) is not None]
