"""An optimiser's step, on a copy: the model and the optimiser itself are left alone."""

import copy
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tutti.errors import ConfigError
from tutti.plan.profile.clock import Clock
from tutti.plan.profile.layers import tensors_in
from tutti.plan.profile.memory import most_bytes, storage_bytes
from tutti.plan.profile.passes import rounds
from tutti.plan.profile.problem import Problem


@dataclass(frozen=True)
class Stepping:
    """What a step takes."""

    seconds: float = 0.0
    state_bytes: int = 0
    """That stay from step to step."""
    passing_bytes: int = 0
    """That are in use only during a step, at most."""


def step(problem: Problem, optimizer: Optimizer | None, clock: Clock, repeats: int) -> Stepping:
    """Of the optimiser, given the gradients that the model has."""
    if optimizer is None:
        return Stepping()
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    if not trained & set(problem.model.parameters()):
        raise ConfigError("the optimizer trains no parameter of the model. Make it from model.parameters().")
    double = _copied(optimizer, trained)

    def take() -> float:
        clock.settle()
        start = clock.now()
        double.step()
        end = clock.now()
        clock.settle()
        return clock.seconds(start, end)

    try:
        seconds = median(rounds(take, repeats))
    except Exception as error:
        raise ConfigError(
            f"a step of {type(optimizer).__name__} fails: {type(error).__name__}: {error}. Without an optimizer, "
            "profile leaves the step out."
        ) from error
    state = tensors_in(list(double.state.values()))
    there = [*state, *(tensor for group in double.param_groups for p in group["params"] for tensor in (p, p.grad))]
    passing = most_bytes(double.step, [tensor for tensor in there if tensor is not None], problem.device)
    return Stepping(seconds, storage_bytes(state), passing)


def _copied(optimizer: Optimizer, trained: set[nn.Parameter]) -> Optimizer:
    """An optimiser in the same state, without its hooks, of copies of the parameters with the same gradients."""
    memo: dict[int, Any] = {}
    for parameter in trained:
        memo[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        memo[id(parameter)].grad = parameter.grad
    return copy.deepcopy(optimizer, memo)
