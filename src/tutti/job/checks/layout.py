"""`LayoutCheck`: trained parameters stay the tensors, of the dtype, shape and device, that were distributed."""

from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from tutti.errors import ConfigError
from tutti.replica import HookedReplica

_REMEDY = "Change the model before tutti.distribute, or call job.finish(), change it, and call tutti.distribute again."


_address = Tensor.data_ptr


class LayoutCheck:
    """Notices a model that was moved, cast or given other parameters after `distribute`.

    A cast, a move and an assignment to `.data` change the address of a tensor. So the addresses are compared in every
    step, and the rest only where an address has changed, or where a module of the model got a new member.
    """

    def __init__(self, replica: HookedReplica, rank: int) -> None:
        self._model, self._rank = replica.model, rank
        self._tensors = [slot.tensor for slot in replica.slots]
        self._layouts = [(slot.name, *_layout(slot.tensor)) for slot in replica.slots]
        self._modules = {id(module) for module in replica.model.modules()}
        self._changed = False
        self._handles: list[Any] = []
        self._addresses = self._addresses_now()

    def open(self) -> None:
        """Start to look at what is added to modules of the model."""
        check_ref = ref(self)

        def member_added(module: nn.Module, *_: Any) -> None:
            if (check := check_ref()) is not None and id(module) in check._modules:
                check._changed = True

        self._handles = [
            register_module_parameter_registration_hook(member_added),
            register_module_module_registration_hook(member_added),
        ]

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __call__(self) -> None:
        """Raise `ConfigError` if a trained parameter is not what it was."""
        if self._changed or list(map(_address, self._tensors)) != self._addresses:
            self._check()
            self._changed, self._addresses = False, self._addresses_now()

    def _addresses_now(self) -> list[int]:
        return list(map(_address, self._tensors))

    def _check(self) -> None:
        now = {id(parameter) for parameter in self._model.parameters()}
        for tensor, (name, *expected) in zip(self._tensors, self._layouts, strict=True):
            if id(tensor) not in now:
                raise ConfigError(
                    f"rank {self._rank}: parameter '{name}' was replaced by another after tutti.distribute (a new "
                    f"Parameter, weight_norm or the like), which no other rank gets gradients for. {_REMEDY}"
                )
            if (got := _layout(tensor)) != tuple(expected):
                raise ConfigError(
                    f"rank {self._rank}: parameter '{name}' is {_text(got)} and was {_text(tuple(expected))} when it "
                    f"was distributed. {_REMEDY}"
                )


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _text(layout: tuple[Any, ...]) -> str:
    shape, dtype, device = layout
    return f"{shape} {str(dtype).removeprefix('torch.')} on {device}"
