"""Run training passes on a model and leave it as it was."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def preserved(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within it the model has no gradients; afterwards values, gradients, buffers and random state are as before.

    The garbage collector is off meanwhile: it would run in the middle of something that is timed.
    """
    # The version counter shows which parameters were changed, so that the others need not be copied back.
    values = [(p, p._version, _kept(p)) for p in model.parameters()]
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(m, name, b, _kept(b)) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    collects = gc.isenabled()
    gpus = [device] if device.type == "cuda" else []
    try:
        gc.disable()
        drop_gradients(model)
        with torch.random.fork_rng(devices=gpus), torch.enable_grad():
            yield
    finally:
        if collects:
            gc.enable()
        with torch.no_grad():
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for parameter, version, value in values:
                if parameter._version != version:  # Embedding(max_norm=...) changes its rows as it looks them up.
                    parameter.copy_(value)
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer  # A layer may have put another tensor there, as `self.count = ...` does.
                buffer.copy_(value)


def drop_gradients(model: nn.Module) -> None:
    """Set all gradients to None."""
    for parameter in model.parameters():
        parameter.grad = None


def _kept(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU: a GPU may have no room for two."""
    return tensor.detach().to("cpu", copy=True)
