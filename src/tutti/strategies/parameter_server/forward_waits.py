"""Forward hooks that let each module wait for its own parameters only, so that pulls overlap the forward pass."""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import nn

from tutti.replica import Replica
from tutti.replica.buckets import Slot
from tutti.replica.owned_hooks import OwnedHook


class ForwardWaits:
    """Calls a worker before each forward pass of a module that holds exchanged parameters or buffers.

    Modules and their hooks outlive the worker in copies of the model, so nothing here holds a strong reference to it.
    """

    def __init__(self, replica: Replica, wait_for: Callable[[Iterable[Slot]], None]) -> None:
        """Hook every module that holds a slot of the replica.

        Args:
            replica: the model.
            wait_for: a bound method, called with the slots of a module before that computes.
        """
        # By id, because `==` on tensors compares values. A tied parameter is found in every module that holds it.
        slots = {id(slot.tensor): slot for slot in [*replica.slots, *replica.statistics]}
        self._wait_for = WeakMethod(wait_for)
        self._slots: dict[nn.Module, list[Slot]] = {}
        self._called: set[nn.Module] = set()
        """Modules whose forward pass has run since the last `take_uncalled`."""
        self._in_iteration = False
        """Whether a forward pass with gradients has begun since the last `take_uncalled`."""
        # Before the hooks of modules, of which the model may be one.
        self._handles = [replica.model.register_forward_pre_hook(_ModelPreHook(self))]
        for module in replica.model.modules():
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if module_slots := [slots[id(tensor)] for tensor in tensors if id(tensor) in slots]:
                self._slots[module] = module_slots
                self._handles.append(module.register_forward_pre_hook(_ForwardPreHook(self)))

    def before_forward(self, module: nn.Module) -> None:
        """Wait for the slots of a module that is about to compute, unless it is for an evaluation.

        An evaluation between steps loads nothing: the user may have other weights in the model for it, such as an
        average over steps, and puts back what was there before. Within an iteration, passes without gradients are part
        of it (activation checkpointing).
        """
        if not self._in_iteration and not torch.is_grad_enabled():
            return
        self._in_iteration = True
        # Also where nothing is pending: `take_uncalled` wants to know which hooks run at all.
        self._called.add(module)
        if (wait_for := self._wait_for()) is not None:
            wait_for(self._slots[module])

    def before_model(self) -> None:
        """Note that a forward pass of the whole model begins."""
        self._in_iteration = self._in_iteration or torch.is_grad_enabled()

    def take_uncalled(self) -> list[Slot]:
        """Return the slots whose modules were not called since the last call of this method.

        Such parameters are used without their module's forward pass (`F.linear(x, layer.weight)`), so no hook can wait
        for them: the worker has to wait for them before the next iteration.
        """
        self._in_iteration = False
        # The usual case, without building sets: every module was called.
        if len(self._called) == len(self._slots):
            self._called.clear()
            return []
        called = {id(slot) for module in self._called for slot in self._slots[module]}
        self._called.clear()
        all_slots = {id(slot): slot for slots in self._slots.values() for slot in slots}
        return [slot for slot_id, slot in all_slots.items() if slot_id not in called]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class _ModelPreHook(OwnedHook):
    """The hook of the whole model; copies of it do without it."""

    def __init__(self, waits: ForwardWaits) -> None:
        self._waits = ref(waits)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling() and (waits := self._waits()) is not None:
            waits.before_model()


class _ForwardPreHook(OwnedHook):
    """The hook of one module; copies of the model do without it."""

    def __init__(self, waits: ForwardWaits) -> None:
        self._waits = ref(waits)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # Compiled code has no such hook: its modules count as uncalled, so they are waited for before the next
        # iteration.
        if not torch.compiler.is_compiling() and (waits := self._waits()) is not None:
            waits.before_forward(module)
