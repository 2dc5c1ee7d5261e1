"""torch.distributed inside a simulation: every simulated rank is a process to it."""

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
"""What torch remembers of its groups, beside which is the default and how many there are."""

_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)
"""Whether there is a mode, in any thread; not every version of torch has each."""

_here = threading.local()

_rendezvous: Any = import_module("torch.distributed.rendezvous")  # torch.distributed has a function of that name.


class _Record:
    """What torch remembers of one rank's groups."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.group_count = 0
        self.comms: list[Any] = []
        for name in _NAMES:
            setattr(self, name, {})


def _of_rank(name: str, settable: bool = False) -> property:
    """An attribute of torch's record, which for a simulated rank is that of its own."""
    usual: Any = getattr(c10d._World, name)

    def get(self: Any) -> Any:
        record = getattr(_here, "record", None)
        return usual.fget(self) if record is None else getattr(record, name)

    def set_(self: Any, value: Any) -> None:
        record = getattr(_here, "record", None)
        if record is None:
            usual.fset(self, value)
        else:
            setattr(record, name, value)

    return property(get, set_ if settable else None)


def _record_of_ranks() -> type:
    settable = ("default_pg", "group_count")
    known = [name for name in (*_NAMES, *settable, "comms") if hasattr(c10d._World, name)]
    return type("_WorldOfRanks", (c10d._World,), {name: _of_rank(name, name in settable) for name in known})


@contextmanager
def torch_worlds() -> Iterator[None]:
    """While this lasts, threads that `enter` have torch.distributed to themselves; others keep what they have."""
    world: Any = c10d._world
    usual, handlers = type(world), dict(_rendezvous._rendezvous_handlers)
    store = HashStore()
    hook, excepthook = register_optimizer_step_pre_hook(operator_clock.stepping), sys.excepthook
    flags = {name: getattr(_python_dispatch, name) for name in _FLAGS if hasattr(_python_dispatch, name)}
    isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    world.__class__ = _record_of_ranks()
    _rendezvous._rendezvous_handlers.update({name: _meeting(handlers[name], store) for name in handlers})
    isolate(True)
    try:
        yield
    finally:
        isolate(False)
        _rendezvous._rendezvous_handlers.update(handlers)
        world.__class__ = usual
        hook.remove()
        sys.excepthook = excepthook  # torch has every rank add its number to what is printed there.
        _restore(flags)


def _restore(flags: dict[str, bool]) -> None:
    """Have torch forget that a mode was on, or it would compile no more: it remembers that for all threads at once."""
    for name, value in flags.items():
        setattr(_python_dispatch, name, value)
    with _python_dispatch.TorchDispatchMode():
        pass  # What it knows in C++ follows.


def enter() -> None:
    """From now on, this thread is a rank of its own to torch.distributed."""
    _here.record = _Record()


def _meeting(usual: Any, store: HashStore) -> Any:
    """How ranks meet: simulated ones know each other already, whatever URL they name."""

    def handler(url: str, *args: Any, **kwargs: Any) -> Any:
        world = current_world() if getattr(_here, "record", None) is not None else None
        if world is None:
            yield from usual(url, *args, **kwargs)
        else:
            yield store, world.rank, world.size

    return handler
