"""`StageRunner`: forward and backward passes of one pipeline stage, one microbatch at a time."""

from typing import Any

import torch
from torch import Tensor, nn

Tensors = tuple[Tensor, ...]


class StageRunner:
    """Runs one stage, and keeps the inputs and outputs of each microbatch until its backward pass."""

    def __init__(self, stage: nn.Module, is_first: bool) -> None:
        """Run `stage`. The first stage needs no gradients of its inputs, since nothing comes before it."""
        self._stage, self._is_first = stage, is_first
        self._live: dict[int, tuple[Tensors, Tensors]] = {}
        """Inputs and outputs, by microbatch, between forward and backward."""
        self._deferred: dict[int, Any] = {}
        """The inputs of `backward_weights`, by microbatch, after `backward_inputs`."""

    def forward(self, microbatch: int, values: Tensors) -> Tensors:
        """Return the stage's outputs. The last stage calls `set_loss` next."""
        if not self._is_first:
            # A leaf per microbatch, so that backward stops here and its gradient can be sent to the stage before.
            values = tuple(value.detach().requires_grad_(value.is_floating_point()) for value in values)
        outputs: Tensors = self._stage(*protect_inputs(self._stage, values))
        # The outputs hold the graph of this microbatch, and so its activations, until its backward pass drops them.
        self._live[microbatch] = values, outputs
        return outputs

    def set_loss(self, microbatch: int, loss: Tensor) -> None:
        """Let the backward pass of a microbatch start from its loss, not from the outputs."""
        self._live[microbatch] = self._live[microbatch][0], (loss,)

    def backward(self, microbatch: int, gradients: Tensors | None) -> Tensors:
        """Add to the parameters' gradients, and return the gradients of the stage's inputs.

        Args:
            gradients: gradients of the outputs; None if the backward pass starts from a loss.
        """
        inputs, outputs = self._live.pop(microbatch)
        _backward(outputs, gradients)
        return () if self._is_first else tuple(_gradient(value) for value in inputs)

    def backward_inputs(self, microbatch: int, gradients: Tensors | None) -> Tensors:
        """Return the gradients of the stage's inputs; those of the weights are left to `backward_weights`."""
        inputs, outputs = self._live.pop(microbatch)
        if self._is_first:  # Nothing comes before it, so its whole backward pass can wait.
            self._deferred[microbatch] = outputs, gradients
            return ()
        from torch.distributed.pipelining._backward import stage_backward_input  # Takes seconds to import.

        if gradients is not None:
            # A parameter may adopt one of these as its gradient, and received tensors lie in memory that is reused.
            gradients = tuple(gradient.clone() for gradient in gradients)
        roots, root_gradients = _differentiable(outputs, gradients)
        # torch's own split of a backward pass: it keeps the part of the graph between the inputs and the weights.
        _, self._deferred[microbatch] = stage_backward_input(
            roots, root_gradients, list(inputs), self._stage.parameters()
        )
        return tuple(_gradient(value) for value in inputs)

    def backward_weights(self, microbatch: int) -> None:
        """Add to the parameters' gradients what `backward_inputs` has deferred."""
        deferred = self._deferred.pop(microbatch)
        if self._is_first:
            _backward(*deferred)
            return
        from torch.distributed.pipelining._backward import stage_backward_weight

        stage_backward_weight(self._stage.parameters(), deferred)


def protect_inputs(module: nn.Module, values: Tensors) -> Tensors:
    """Return copies of inputs that need gradients if the first layer may change them in place.

    autograd does not allow in-place changes of leaves that require gradients.
    """
    # Only the first layer sees the inputs themselves. Later ones change, at most, what this stage has computed.
    first = next(iter(module.children()), module)
    if not any(getattr(layer, "inplace", False) for layer in first.modules()):
        return values
    return tuple(value.clone() if value.requires_grad else value for value in values)


def _backward(outputs: Tensors, gradients: Tensors | None) -> None:
    """Run a backward pass from those outputs that depend on a parameter or input; there may be none."""
    roots, root_gradients = _differentiable(outputs, gradients)
    if roots:
        torch.autograd.backward(roots, root_gradients)


def _differentiable(outputs: Tensors, gradients: Tensors | None) -> tuple[list[Tensor], list[Tensor] | None]:
    """Return the outputs that require gradients, and their gradients."""
    indices = [index for index, value in enumerate(outputs) if value.requires_grad]
    return [outputs[index] for index in indices], None if gradients is None else [gradients[index] for index in indices]


def _gradient(value: Tensor) -> Tensor:
    """Return a tensor's gradient; zeros if the loss does not depend on it, since the stage before expects a message."""
    return torch.zeros_like(value) if value.grad is None else value.grad
