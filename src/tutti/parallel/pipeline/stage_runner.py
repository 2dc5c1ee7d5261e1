"""One stage's computing, a microbatch at a time."""

from typing import Any

import torch
from torch import Tensor, nn

Tensors = tuple[Tensor, ...]


class StageRunner:
    """Keeps what a microbatch's backward pass will need from its forward pass."""

    def __init__(self, stage: nn.Module, first: bool) -> None:
        self._stage, self._first = stage, first
        self._kept: dict[int, tuple[Tensors, Tensors]] = {}
        self._later: dict[int, Any] = {}

    def forward(self, microbatch: int, values: Tensors) -> Tensors:
        """What the stage makes of `values`; call `set_loss` with what the backward pass is to start from."""
        if not self._first:
            values = tuple(value.detach().requires_grad_(value.is_floating_point()) for value in values)
        made: Tensors = self._stage(*protect_inputs(self._stage, values))
        self._kept[microbatch] = values, made
        return made

    def set_loss(self, microbatch: int, loss: Tensor) -> None:
        """Have the backward pass start from a loss."""
        self._kept[microbatch] = self._kept[microbatch][0], (loss,)

    def backward(self, microbatch: int, gradients: Tensors | None) -> Tensors:
        """Add to the parameters' gradients; returns those of what the stage took."""
        taken, made = self._kept.pop(microbatch)
        _backward(made, gradients)
        return () if self._first else tuple(_gradient(value) for value in taken)

    def backward_inputs(self, microbatch: int, gradients: Tensors | None) -> Tensors:
        """The gradients of what the stage took, and no others yet."""
        taken, made = self._kept.pop(microbatch)
        if self._first:  # Nobody wants those.
            self._later[microbatch] = made, gradients
            return ()
        from torch.distributed.pipelining._backward import stage_backward_input  # Costs seconds.

        if gradients is not None:  # Parameters may keep them as their own.
            gradients = tuple(each.clone() for each in gradients)
        outputs, wanted = _differentiable(made, gradients)
        _, self._later[microbatch] = stage_backward_input(outputs, wanted, list(taken), self._stage.parameters())
        return tuple(_gradient(value) for value in taken)

    def backward_weights(self, microbatch: int) -> None:
        """Add to the parameters' gradients what `backward_inputs` left for later."""
        left = self._later.pop(microbatch)
        if self._first:
            _backward(*left)
            return
        from torch.distributed.pipelining._backward import stage_backward_weight

        stage_backward_weight(self._stage.parameters(), left)


def protect_inputs(module: nn.Module, values: Tensors) -> Tensors:
    """What to give a module that may change what it takes in place, which is not allowed of what gradients are of."""
    first = next(iter(module.children()), module)
    if not any(getattr(each, "inplace", False) for each in first.modules()):
        return values
    return tuple(value.clone() if value.requires_grad else value for value in values)


def _backward(made: Tensors, gradients: Tensors | None) -> None:
    outputs, wanted = _differentiable(made, gradients)
    if outputs:
        torch.autograd.backward(outputs, wanted)


def _differentiable(made: Tensors, gradients: Tensors | None) -> tuple[list[Tensor], list[Tensor] | None]:
    numbers = [number for number, value in enumerate(made) if value.requires_grad]
    return [made[it] for it in numbers], None if gradients is None else [gradients[it] for it in numbers]


def _gradient(value: Tensor) -> Tensor:
    return torch.zeros_like(value) if value.grad is None else value.grad
