"""torch.distributed inside a simulation: every simulated rank has process groups of its own, as a process has.

How it works
------------
torch keeps its process groups in one object of the process, `distributed_c10d._world`. While a simulation runs, the
class of that object is replaced by a subclass whose attributes are looked up per thread: threads that called `enter`
have a `_GroupRecords` of their own, all others see the usual attributes. So no code of torch has to be changed.

What torch keeps in C++ is separated by its thread isolation mode, made for torch's own multi-threaded tests.

`init_process_group` of simulated ranks connects to no rendezvous: handlers of all URL schemes are wrapped, and give
simulated ranks one shared `HashStore` with their rank and size.

On leaving the context all of it is undone, whether the simulation failed or not: the class, the handlers, the isolation
mode, the hook that times optimiser steps, `sys.excepthook`, and flags in which torch remembers that a dispatch mode was
once active in any thread.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch.distributed import HashStore
from torch.distributed import distributed_c10d as c10d
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _python_dispatch

from tutti.simulation import operator_clock
from tutti.world import current_world

_NAMES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag", "pg_coalesce_state")
"""Dictionaries of torch's world that belong to one rank, besides the default group and the number of groups."""

_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)
"""Flags of torch for whether a dispatch mode is active in any thread; not every version has all of them."""

_thread_local = threading.local()

_rendezvous: Any = import_module("torch.distributed.rendezvous")  # torch.distributed has a function of that name.


class _GroupRecords:
    """The records that torch keeps of one rank's process groups."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.group_count = 0
        self.comms: list[Any] = []
        for name in _NAMES:
            setattr(self, name, {})


def _per_rank(name: str, settable: bool = False) -> property:
    """Return a property that reads an attribute of torch's world, or that of the simulated rank whose thread asks."""
    original: Any = getattr(c10d._World, name)

    def get(self: Any) -> Any:
        # Threads that belong to no rank, of the simulation's own machinery or of the user, keep torch's usual groups.
        record = getattr(_thread_local, "record", None)
        return original.fget(self) if record is None else getattr(record, name)

    def set_(self: Any, value: Any) -> None:
        record = getattr(_thread_local, "record", None)
        if record is None:
            original.fset(self, value)
        else:
            setattr(record, name, value)

    return property(get, set_ if settable else None)


def _per_rank_world_class() -> type:
    """Return the class that replaces that of torch's world."""
    settable = ("default_pg", "group_count")
    known = [name for name in (*_NAMES, *settable, "comms") if hasattr(c10d._World, name)]
    return type("_WorldOfRanks", (c10d._World,), {name: _per_rank(name, name in settable) for name in known})


@contextmanager
def torch_worlds() -> Iterator[None]:
    """Give threads that `enter` process groups of their own while this context lasts; others keep theirs."""
    world: Any = c10d._world
    original_class, handlers = type(world), dict(_rendezvous._rendezvous_handlers)
    store = HashStore()
    hook, excepthook = register_optimizer_step_pre_hook(operator_clock.on_optimizer_step), sys.excepthook
    flags = {name: getattr(_python_dispatch, name) for name in _FLAGS if hasattr(_python_dispatch, name)}
    isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    # Its class is changed, since other modules may hold references to the object itself.
    world.__class__ = _per_rank_world_class()
    # Threads outside the simulation still get the usual handlers, through the wrappers.
    _rendezvous._rendezvous_handlers.update({name: _rendezvous_handler(handlers[name], store) for name in handlers})
    isolate(True)
    try:
        yield
    finally:
        isolate(False)  # In reverse order of the lines above.
        _rendezvous._rendezvous_handlers.update(handlers)
        world.__class__ = original_class
        hook.remove()
        sys.excepthook = excepthook  # Each init_process_group of torch wraps it, to print its rank.
        _restore(flags)


def _restore(flags: dict[str, bool]) -> None:
    """Reset torch's flags for dispatch modes, which are shared by all threads: it would refuse to compile otherwise."""
    for name, value in flags.items():
        setattr(_python_dispatch, name, value)
    with _python_dispatch.TorchDispatchMode():
        pass  # Entering and leaving a mode updates what C++ knows as well.


def enter() -> None:
    """Give this thread, which is that of a simulated rank, process groups of its own."""
    _thread_local.record = _GroupRecords()


def _rendezvous_handler(original: Any, store: HashStore) -> Any:
    """Return a rendezvous handler that gives simulated ranks the shared store, whatever URL they name."""

    def handler(url: str, *args: Any, **kwargs: Any) -> Any:
        world = current_world() if getattr(_thread_local, "record", None) is not None else None
        if world is None:
            yield from original(url, *args, **kwargs)
        else:
            # torch prefixes the keys of each group, so one store serves all of them.
            yield store, world.rank, world.size

    return handler
