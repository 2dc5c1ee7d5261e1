"""Measure a model's training step, and write it down as a profile."""

from collections.abc import Iterator
from statistics import median
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tutti.cost import Gradient, LayerProfile, Profile
from tutti.errors import ConfigError
from tutti.plan.profile.clock import Clock, clock_of
from tutti.plan.profile.layers import Layer, examine, num_bytes, tensors_in
from tutti.plan.profile.memory import most_bytes, storage_bytes
from tutti.plan.profile.optimizer import step
from tutti.plan.profile.passes import forward_and_backward, rounds
from tutti.plan.profile.problem import Loss, Problem
from tutti.plan.profile.timeline import Timeline
from tutti.plan.profile.trace import Shares, Trace, typical
from tutti.plan.profile.untouched import forget, untouched


def profile(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    repeats: int = 20,
    clock: Clock | None = None,
) -> Profile:
    """Measure a training step of `model` on this machine, layer by layer, in a second or two.

    `batch` is what the model is given: one input, several in a tuple, or (input, target). The target is what `loss`
    gets beside the model's output; without a loss, backward begins with the mean of every output. `optimizer` is
    measured too, if given.

    Times are medians of up to `repeats` passes, and of three at least, by the device's clock or by `clock`. The model
    is measured in the mode it is in, train or eval, on the device it is on; it and the optimiser are left as they were.
    Profile it before `distribute`, after which backward passes are exchanged.
    """
    if repeats < 1:
        raise ConfigError(f"profile needs 1 repeat or more, got {repeats}.")
    problem = Problem.of(model, batch, loss)
    clock = clock or clock_of(problem.device)
    with untouched(model, problem.device):
        layers = examine(problem)
        forward_s, backward_s, shares = _passes(problem, layers, clock, repeats)
        stepping = step(problem, optimizer, clock, repeats)
        forget(model)
        there = [*model.parameters(), *model.buffers(), *tensors_in(batch)]
        passing_bytes = most_bytes(lambda: problem.forward().backward(), there, problem.device)
    gradient_bytes = sum(num_bytes(p) for layer in layers for p in layer.gradients.values())
    standing = storage_bytes(there) + stepping.state_bytes
    return Profile(
        num_samples=problem.num_samples,
        layers=tuple(_layers(layers, shares, forward_s, backward_s)),
        gradients=tuple(_gradients(model, shares, backward_s)),
        forward_s=forward_s,
        backward_s=backward_s,
        step_s=stepping.seconds,
        peak_bytes=standing + max(passing_bytes, gradient_bytes + stepping.passing_bytes),
        state_bytes=stepping.state_bytes,
    )


def _passes(problem: Problem, layers: list[Layer], clock: Clock, repeats: int) -> tuple[float, float, Shares]:
    """Seconds of forward and backward, and who has which part of them.

    Passes that nothing disturbs say how long they take, by turns with passes that are taken apart.
    """
    timeline = Timeline(problem, layers, clock)

    def take() -> tuple[tuple[float, float], Trace]:
        forget(problem.model)
        undisturbed = forward_and_backward(problem, clock)
        forget(problem.model)
        return undisturbed, timeline.take()

    taken = rounds(take, repeats)
    forward_s, backward_s = (median(seconds[part] for seconds, _ in taken) for part in range(2))
    return forward_s, backward_s, typical([trace for _, trace in taken]).shares(len(layers))


def _layers(layers: list[Layer], shares: Shares, forward_s: float, backward_s: float) -> Iterator[LayerProfile]:
    for layer, forward, backward in zip(layers, shares.forward, shares.backward, strict=True):
        ready = [shares.ready.get(name, 1.0) for name in layer.gradients]
        yield LayerProfile(
            name=layer.name,
            kind=layer.kind,
            forward_s=forward * forward_s,
            backward_s=backward * backward_s,
            gradient_bytes=sum(map(num_bytes, layer.gradients.values())),
            ready_s=max(ready) * backward_s if ready else None,
            activation_bytes=layer.activation_bytes,
            rows=layer.rows,
            work=layer.cost.work,
            depth=layer.cost.depth,
        )


def _gradients(model: nn.Module, shares: Shares, backward_s: float) -> list[Gradient]:
    """Of all trained parameters; that one is without a gradient is known when backward ends, and it is sent then."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ready = shares.ready | {name: 1.0 for name in trained if name not in shares.ready}
    return [
        Gradient(
            name=name,
            shape=tuple(trained[name].shape),
            num_bytes=num_bytes(trained[name]),
            ready_s=ready[name] * backward_s,
        )
        for name in sorted(ready, key=ready.__getitem__)
    ]
