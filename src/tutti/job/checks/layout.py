"""`LayoutCheck`: trained parameters stay the tensors, of the dtype, shape and device, that were distributed."""

from typing import Any

from torch import Tensor, nn

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
        self._addresses = self._addresses_now()

    def member_added(self, module: nn.Module) -> None:
        """Look at all parameters in the next step, if the module is one of the model."""
        self._changed = self._changed or id(module) in self._modules

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
