"""`TrainingPass`: a model, a batch and a loss, to run forward and backward."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from tutti.errors import ConfigError
from tutti.replica.owned_hooks import OwnedHook
from tutti.replica.samples import num_rows

Loss = Callable[[Any, Any], Tensor]
"""A function from the model's output and the target to a scalar tensor."""


@dataclass(frozen=True)
class TrainingPass:
    """A model with a batch and a loss."""

    model: nn.Module
    args: tuple[Any, ...]
    target: Any
    loss: Loss | None
    device: torch.device

    @classmethod
    def from_batch(cls, model: nn.Module, batch: Any, loss: Loss | None) -> "TrainingPass":
        """Split the batch into arguments and target; raise `ConfigError` for what cannot be trained or profiled."""
        if not isinstance(model, nn.Module):
            raise ConfigError(f"profile takes a model, which is an nn.Module, got {type(model).__name__}.")
        args, target = _split(model, batch, loss)
        return cls(model, args, target, loss, _check(model, args))

    @property
    def num_samples(self) -> int:
        """Samples of the batch."""
        return num_rows(self.args)

    def output(self) -> Any:
        """Run the model on the batch and return its output."""
        return self.model(*self.args)

    def compute_loss(self, output: Any) -> Tensor:
        """Return the loss of an output; without a loss function, the mean of every output."""
        return _mean(output) if self.loss is None else self.loss(output, self.target)

    def forward(self) -> Tensor:
        """Run the model and return the loss."""
        return self.compute_loss(self.output())


def _split(model: nn.Module, batch: Any, loss: Loss | None) -> tuple[tuple[Any, ...], Any]:
    """Return the model's arguments, and the target or None.

    The last of several is the target if there is a loss, or if the model does not require it as an argument.
    """
    # Exactly these types: a named tuple or another container is one argument of the model.
    parts = tuple(batch) if type(batch) in (tuple, list) else (batch,)
    if not parts:
        raise ConfigError("profile takes a batch: an input, (input, target) or several inputs, got an empty one.")
    if len(parts) == 1 or (loss is None and len(parts) - _num_needed(model, len(parts)) != 1):
        return parts, None
    return parts[:-1], parts[-1]


def _num_needed(model: nn.Module, given: int) -> int:
    """Return how many of `given` arguments the model requires."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):  # *args may take all of them.
        return given
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is p.empty]
    # A model needs an input, even if all parameters of its `forward` have defaults.
    return max(1, len(required))


def _check(model: nn.Module, args: tuple[Any, ...]) -> torch.device:
    """Return the model's device; raise `ConfigError` if the model or the batch cannot be profiled."""
    # `_orig_mod` is how torch.compile's wrapper holds the model.
    if hasattr(model, "_orig_mod") or any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ConfigError("layers of a compiled model cannot be told apart. Profile it before torch.compile or script.")
    if any(isinstance(hook, OwnedHook) for hook in model._forward_pre_hooks.values()):
        raise ConfigError("backward passes of a distributed model are exchanged. Profile it before distribute.")
    parameters = list(model.parameters())
    if any(map(is_lazy, parameters)):
        raise ConfigError("the model's lazy layers have no sizes yet. Give it a batch once, then profile it.")
    if not any(p.requires_grad for p in parameters):
        raise ConfigError("no parameter of the model is trained: one at least must have requires_grad.")
    devices = sorted({str(p.device) for p in parameters})
    if len(devices) > 1 or parameters[0].device.type not in ("cpu", "cuda"):
        raise ConfigError(f"profile takes a model on one device, cpu or cuda; this one is on {', '.join(devices)}.")
    if num_rows(args) == 0:
        raise ConfigError("profile takes a batch of one sample or more, got one without any.")
    return parameters[0].device


def _mean(output: Any) -> Tensor:
    """Return the sum of the means of all outputs that need a gradient."""
    tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if not tensors:
        raise ConfigError(
            f"the model returned a {type(output).__name__} in which nothing needs a gradient. Give profile a loss."
        )
    # Means, not sums, which could overflow in float16. A loss is real, so the parts of complex outputs are averaged.
    means = [t.mean() if t.is_floating_point() else torch.view_as_real(t).mean() for t in tensors]
    # In float32, because outputs may have different dtypes.
    return torch.stack([mean.float() for mean in means]).sum()
