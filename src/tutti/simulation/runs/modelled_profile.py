"""`modelled_profile`: the step of one worker of a recipe on a cluster, by counted operations and not by measurement."""

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.cluster import Cluster
from tutti.cost import Profile
from tutti.cost.profile import Gradient
from tutti.recipes import Recipe
from tutti.simulation.workload import Workload


def modelled_profile(recipe: Recipe, num_samples: int, cluster: Cluster) -> Profile:
    """Return the step of a worker of speed 1 with so many samples, as a simulation of the cluster times it."""
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    inputs, _ = recipe.example(1)
    workload = Workload.from_model(model, (inputs,), {})
    backward_s = workload.backward_s(num_samples, cluster)
    gradients, ready_s = [], 0.0
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, parameter in reversed(trained):  # The last layer's come first.
        ready_s += workload.shares[name] * backward_s
        num_bytes = parameter.numel() * parameter.element_size()
        gradients.append(Gradient(name=name, shape=tuple(parameter.shape), num_bytes=num_bytes, ready_s=ready_s))
    return Profile(
        num_samples=num_samples,
        layers=(),
        gradients=tuple(gradients),
        forward_s=workload.forward_s(num_samples, cluster),
        backward_s=backward_s,
        step_s=cluster.compute.step_s,
        peak_bytes=3 * sum(gradient.num_bytes for gradient in gradients),
        state_bytes=_state_bytes(model, optimizer),
    )


def _state_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Return the bytes that the optimiser keeps, after a step without gradients to speak of."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in kept if isinstance(value, torch.Tensor))
