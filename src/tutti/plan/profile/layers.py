"""What a model is made of: which modules compute by themselves, what they are given, and whose gradients are theirs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tutti.errors import ConfigError
from tutti.plan.profile.problem import Problem
from tutti.plan.profile.work_depth import NOTHING, WorkDepth, known, operator
from tutti.replica.factors import factorable


@dataclass
class Layer:
    """A module that was called: once or several times, over which sizes and costs add up."""

    name: str
    module: nn.Module
    factored: bool = False
    """Whether its gradient can travel as factors, if ranks exchange them."""
    activation_bytes: int = 0
    rows: int | None = None
    cost: WorkDepth = NOTHING
    gradients: dict[str, nn.Parameter] = field(default_factory=dict)
    """The parameters that are its own, as far as they got a gradient, by name in the model."""

    @property
    def kind(self) -> str:
        return type(self.module).__name__

    @property
    def computes(self) -> bool:
        """By itself, and not only by what is in it."""
        own = self.gradients or any(p is not None for p in self.module._parameters.values())
        # What has a module for its weight, as under weight_norm, is still what it was.
        return bool(own) or known(self.module) is not None or not any(self.module.children())

    def __str__(self) -> str:
        return f"'{self.name}' ({self.kind})" if self.name else self.kind

    def called(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        trained = any(p.requires_grad for p in self.module.parameters())
        needed = operator(self.module, inputs, outputs).needed(trained, any(x.requires_grad for x in inputs))
        self.cost = self.cost.after(needed)
        self.activation_bytes += sum(map(num_bytes, outputs))
        if outputs and self.factored:
            self.rows = (self.rows or 0) + outputs[0].numel() // len(self.module.weight)  # type: ignore[arg-type]


def num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def examine(problem: Problem) -> list[Layer]:
    """The model's layers in the order of forward, found by going forward and backward once.

    A layer is a module without others in it, one that has parameters of its own, or one of a known kind.
    Parameters belong to the module that has them; if only something around that is called, as in
    nn.MultiheadAttention, to the nearest such module.
    """
    model = problem.model
    with _watched(model) as (called, inside):
        loss = _forward(problem, inside)
    try:
        loss.backward()
    except Exception as error:
        raise ConfigError(f"the model fails in backward: {type(error).__name__}: {error}.") from error
    homes = _homes(model, called)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            homes[parameter].gradients[name] = parameter
    return [layer for layer in called.values() if layer.computes]


@contextmanager
def _watched(model: nn.Module) -> Iterator[tuple[dict[nn.Module, Layer], list[Layer]]]:
    """What was called, in order, and what is being called, from outside in."""
    called: dict[nn.Module, Layer] = {}
    inside: list[Layer] = []
    names = {module: name for name, module in model.named_modules()}
    factored = set(factorable(model))

    def begins(module: nn.Module, args: Any, kwargs: Any) -> None:
        inside.append(called.setdefault(module, Layer(names[module], module, module in factored)))

    def ends(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inside.pop().called(tensors_in((args, kwargs)), tensors_in(output))

    handles = [each.register_forward_pre_hook(begins, with_kwargs=True) for each in names]
    handles += [each.register_forward_hook(ends, with_kwargs=True) for each in names]
    try:
        yield called, inside
    finally:
        for handle in handles:
            handle.remove()


def _forward(problem: Problem, inside: list[Layer]) -> Tensor:
    """The loss; what goes wrong is said with where it did."""
    try:
        output = problem.output()
    except Exception as error:
        where = f"in {inside[-1]}" if inside else "before its first layer"
        raise ConfigError(
            f"the model fails in forward, {where}: {type(error).__name__}: {error}. Give it a batch as in training."
        ) from error
    try:
        loss = problem.judge(output)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"the loss fails on what the model returned: {type(error).__name__}: {error}.") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"one of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ConfigError(f"the loss must be a tensor of one number that needs a gradient, got {got}.")
    return loss


def _homes(model: nn.Module, called: dict[nn.Module, Layer]) -> dict[nn.Parameter, Layer]:
    """The layer each parameter belongs to; of several that share it, the first that is called itself."""
    modules = dict(model.named_modules(remove_duplicate=False))
    nearest: dict[nn.Parameter, tuple[int, Layer]] = {}
    for path, module in modules.items():
        distance, at = 0, path
        while modules[at] not in called:  # The model itself was.
            distance, at = distance + 1, at.rpartition(".")[0]
        for parameter in module._parameters.values():
            if parameter is not None and (parameter not in nearest or distance < nearest[parameter][0]):
                nearest[parameter] = distance, called[modules[at]]
    return {parameter: layer for parameter, (_, layer) in nearest.items()}


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a nest of containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
