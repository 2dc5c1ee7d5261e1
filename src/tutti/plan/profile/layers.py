"""The layers of a model: modules that compute something themselves, with their sizes, work and gradients."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tutti.errors import ConfigError
from tutti.plan.profile.training_pass import TrainingPass
from tutti.plan.profile.work_depth import NO_WORK, WorkDepth, counter_for, layer_work
from tutti.replica.factors import factorable


@dataclass
class Layer:
    """A module that was called. Sizes and work add up over its calls."""

    name: str
    module: nn.Module
    factored: bool = False
    """Whether its gradient can be sent as factors."""
    activation_bytes: int = 0
    """Bytes of its outputs."""
    rows: int | None = None
    """Rows of its input, if its gradient can be sent as factors; else None."""
    cost: WorkDepth = NO_WORK
    gradients: dict[str, nn.Parameter] = field(default_factory=dict)
    """Its own parameters that got a gradient, by name in the model."""

    @property
    def kind(self) -> str:
        return type(self.module).__name__

    @property
    def computes(self) -> bool:
        """Whether it computes something itself, and not only through the modules inside it."""
        has_parameters = bool(self.gradients) or any(p is not None for p in self.module._parameters.values())
        # A layer whose weight is a module, as under weight_norm, is still a layer.
        return has_parameters or counter_for(self.module) is not None or not any(self.module.children())

    def __str__(self) -> str:
        return f"'{self.name}' ({self.kind})" if self.name else self.kind

    def called(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Add one call."""
        trained = any(p.requires_grad for p in self.module.parameters())
        needed = layer_work(self.module, inputs, outputs).needed(trained, any(x.requires_grad for x in inputs))
        self.cost = self.cost.followed_by(needed)
        self.activation_bytes += sum(map(num_bytes, outputs))
        # A factored layer's weight is [out, in]: elements of its output divided by `out` are the rows of its input.
        if outputs and self.factored:
            self.rows = (self.rows or 0) + outputs[0].numel() // len(self.module.weight)  # type: ignore[arg-type]


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def find_layers(training_pass: TrainingPass) -> list[Layer]:
    """Return the model's layers in the order of forward, found by one forward and one backward pass.

    A layer is a module without others in it, one that has parameters of its own, or one of a known kind.
    Parameters belong to the module that has them; if only something around that is called, as in
    nn.MultiheadAttention, to the nearest such module around it.
    """
    model = training_pass.model
    with _recorded_calls(model) as (called, inside):
        loss = _forward(training_pass, inside)
    try:
        loss.backward()
    except Exception as error:  # Any error of the user's model is a mistake in what was given to `profile`.
        raise ConfigError(f"the model fails in backward: {type(error).__name__}: {error}.") from error
    # Found by a backward pass: a parameter may need a gradient and get none, because this batch does not use it.
    owners = _owners(model, called)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            owners[parameter].gradients[name] = parameter
    return [layer for layer in called.values() if layer.computes]


@contextmanager
def _recorded_calls(model: nn.Module) -> Iterator[tuple[dict[nn.Module, Layer], list[Layer]]]:
    """Yield the modules that were called, in order, and the stack of those that are being called."""
    called: dict[nn.Module, Layer] = {}
    inside: list[Layer] = []
    names = {module: name for name, module in model.named_modules()}
    factored = set(factorable(model))

    def begins(module: nn.Module, args: Any, kwargs: Any) -> None:
        # A module that is called again keeps the place of its first call.
        inside.append(called.setdefault(module, Layer(names[module], module, module in factored)))

    def ends(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inside.pop().called(tensors_in((args, kwargs)), tensors_in(output))

    handles = [module.register_forward_pre_hook(begins, with_kwargs=True) for module in names]
    handles += [module.register_forward_hook(ends, with_kwargs=True) for module in names]
    try:
        yield called, inside
    finally:
        for handle in handles:
            handle.remove()


def _forward(training_pass: TrainingPass, inside: list[Layer]) -> Tensor:
    """Return the loss; errors name the layer in which they occurred."""
    try:
        output = training_pass.output()
    except Exception as error:
        # The stack still holds the module that raised, because its end hook did not run.
        where = f"in {inside[-1]}" if inside else "before its first layer"
        raise ConfigError(
            f"the model fails in forward, {where}: {type(error).__name__}: {error}. Give it a batch as in training."
        ) from error
    try:
        loss = training_pass.compute_loss(output)
    except ConfigError:  # `compute_loss` has said already what is wrong.
        raise
    except Exception as error:
        raise ConfigError(f"the loss fails on what the model returned: {type(error).__name__}: {error}.") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"one of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ConfigError(f"the loss must be a tensor of one number that needs a gradient, got {got}.")
    return loss


def _owners(model: nn.Module, called: dict[nn.Module, Layer]) -> dict[nn.Parameter, Layer]:
    """Return the layer that each parameter belongs to; of several that share it, the first that was called."""
    modules = dict(model.named_modules(remove_duplicate=False))
    nearest: dict[nn.Parameter, tuple[int, Layer]] = {}
    for path, module in modules.items():
        distance, at = 0, path
        while modules[at] not in called:  # Ends at the model itself, whose path is empty and which was called.
            distance, at = distance + 1, at.rpartition(".")[0]
        for parameter in module._parameters.values():
            if parameter is not None and (parameter not in nearest or distance < nearest[parameter][0]):
                nearest[parameter] = distance, called[modules[at]]
    return {parameter: layer for parameter, (_, layer) in nearest.items()}


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
