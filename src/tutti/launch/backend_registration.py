"""Registration of the "tutti" backend with torch.distributed, without importing torch for it.

How it works. `import tutti` must make `torch.distributed.init_process_group("tutti")` work, whichever of the two
packages is imported first, and must not import torch itself. If torch.distributed is there, the backend is registered
at once. Otherwise an import finder waits for the one module that holds torch's table of backends. When that module is
imported, the finder lets the usual ones find it, has the backend registered right after its code has run, and removes
itself.

The backend's own modules are imported when the first group is made.
"""

import atexit
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    from tutti.backend import TuttiGroup

_TABLE = "torch.distributed.distributed_c10d"
"""The module of torch that knows all backends."""


def register_backend() -> None:
    """Let torch.distributed make groups of Tutti's, now or as soon as it is imported."""
    if (table := sys.modules.get(_TABLE)) is not None:
        _register(table)
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder:  # Not of importlib.abc, whose import takes longer than the rest of `import tutti`.
    """Finds torch's table of backends as usual, and registers the backend once its code has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TABLE:
            return None
        # First: with this import its task is done, however the import ends.
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register(table: ModuleType) -> None:
    """Add the backend to torch's table. Groups that it makes are closed before Python ends."""
    # Weak, because this set lives as long as the process: groups that the user destroys are to be freed.
    groups: WeakSet[TuttiGroup] = WeakSet()

    def create(options: Any, _: Any) -> "TuttiGroup":
        from tutti.versions import check_torch

        check_torch()  # Before modules are imported that may need what this torch does not have.
        from tutti.backend import group_over
        from tutti.launch.torch_groups import open_group

        group = group_over(open_group(options))
        group.made_by_torch = True
        groups.add(group)
        return group

    def close() -> None:
        """Before Python ends: threads that are still in torch then would make it abort the process."""
        for group in list(groups):
            group.shutdown()

    atexit.register(close)
    table.Backend.register_backend("tutti", create, extended_api=True, devices=["cpu", "cuda"])
