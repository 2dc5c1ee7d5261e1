"""Lets a module's forward pass wait for what that module needs, and for no more."""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import nn

from tutti.replica import Replica
from tutti.replica.buckets import Slot
from tutti.replica.owned_hooks import OwnedHook


class Modules:
    """The modules of a model that hold something that is exchanged."""

    def __init__(self, replica: Replica, need: Callable[[Iterable[Slot]], None]) -> None:
        """`need`, a method, is called with what a module holds before it computes."""
        slots = {id(slot.tensor): slot for slot in [*replica.slots, *replica.statistics]}
        self._need = WeakMethod(need)
        self._slots: dict[nn.Module, list[Slot]] = {}
        self._called: set[nn.Module] = set()
        self._handles = []
        for module in replica.model.modules():
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if mine := [slots[id(tensor)] for tensor in own if id(tensor) in slots]:
                self._slots[module] = mine
                self._handles.append(module.register_forward_pre_hook(_Before(self)))

    def before(self, module: nn.Module) -> None:
        """A module is about to compute."""
        self._called.add(module)
        if (need := self._need()) is not None:
            need(self._slots[module])

    def uncalled(self) -> list[Slot]:
        """What no module asked for since this was last called: it is used in a way that is not seen here."""
        if len(self._called) == len(self._slots):
            self._called.clear()
            return []
        seen = {id(slot) for module in self._called for slot in self._slots[module]}
        self._called.clear()
        every = {id(slot): slot for slots in self._slots.values() for slot in slots}
        return [slot for number, slot in every.items() if number not in seen]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Before(OwnedHook):
    """A module's forward pass begins."""

    def __init__(self, modules: Modules) -> None:
        self._modules = ref(modules)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling() and (modules := self._modules()) is not None:
            modules.before(module)
