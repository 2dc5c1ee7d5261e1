"""The cost of an optimiser's step, measured on a copy: the model and the optimiser are not changed."""

import copy
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tutti.errors import ConfigError
from tutti.plan.profile.clock import Clock
from tutti.plan.profile.layers import tensors_in
from tutti.plan.profile.memory import peak_bytes, storage_bytes
from tutti.plan.profile.passes import repeated
from tutti.plan.profile.training_pass import TrainingPass


@dataclass(frozen=True)
class OptimizerCost:
    """Time and memory of an optimiser's step."""

    seconds: float = 0.0
    state_bytes: int = 0
    """Bytes of state that stay from step to step."""
    temporary_bytes: int = 0
    """Peak bytes that are in use only during a step."""


def measure_step(training_pass: TrainingPass, optimizer: Optimizer | None, clock: Clock, repeats: int) -> OptimizerCost:
    """Measure a step of the optimiser with the gradients that the model has; nothing without an optimiser."""
    if optimizer is None:
        return OptimizerCost()
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    if not trained & set(training_pass.model.parameters()):
        raise ConfigError("the optimizer trains no parameter of the model. Make it from model.parameters().")
    # The copy may update its parameters as often as is measured. It has state after the warm-up of `repeated`.
    twin = _copied(optimizer, trained)

    def measure() -> float:
        # What a GPU still has to do from before would count as part of the step.
        clock.settle()
        start = clock.now()
        twin.step()
        end = clock.now()
        clock.settle()
        return clock.seconds(start, end)

    try:
        seconds = median(repeated(measure, repeats))
    except Exception as error:  # Any error of the user's optimiser, such as one that needs a closure.
        raise ConfigError(
            f"a step of {type(optimizer).__name__} fails: {type(error).__name__}: {error}. Without an optimizer, "
            "profile leaves the step out."
        ) from error
    state = tensors_in(list(twin.state.values()))
    resident = [*state, *(tensor for group in twin.param_groups for p in group["params"] for tensor in (p, p.grad))]
    temporary = peak_bytes(twin.step, [tensor for tensor in resident if tensor is not None], training_pass.device)
    return OptimizerCost(seconds, storage_bytes(state), temporary)


def _copied(optimizer: Optimizer, trained: set[nn.Parameter]) -> Optimizer:
    """Return a copy of the optimiser, without its hooks, for copies of the parameters with the same gradients."""
    # `deepcopy` takes what is in its memo for the copy. Gradients are shared, since a step does not change them.
    memo: dict[int, Any] = {}
    for parameter in trained:
        memo[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        memo[id(parameter)].grad = parameter.grad
    return copy.deepcopy(optimizer, memo)
