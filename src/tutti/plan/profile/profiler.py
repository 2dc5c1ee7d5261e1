"""`profile`: measure a model's training step, layer by layer."""

from collections.abc import Iterator
from statistics import median
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tutti.cost import Gradient, LayerProfile, Profile
from tutti.errors import ConfigError
from tutti.measurement import Spread, steadiest
from tutti.plan.profile.clock import Clock, clock_of
from tutti.plan.profile.layer_timer import LayerTimer
from tutti.plan.profile.layers import Layer, find_layers, num_bytes, tensors_in
from tutti.plan.profile.memory import peak_bytes, storage_bytes
from tutti.plan.profile.optimizer import measure_step
from tutti.plan.profile.passes import forward_and_backward, repeated
from tutti.plan.profile.preserved import drop_gradients, preserved
from tutti.plan.profile.trace import PassTrace, TimeShares, median_trace
from tutti.plan.profile.training_pass import Loss, TrainingPass


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

    `batch` is the model's input: one tensor, several in a tuple, or (input, target). The target is what `loss`
    gets beside the model's output; without a loss, backward begins with the mean of every output. `optimizer` is
    measured too, if given.

    Times are medians of up to `repeats` passes, and of three at least, by the device's clock or by `clock`. Passes that
    differ much are measured once more; `Profile.spread` says how far they differed in the end. The model
    is measured in the mode it is in, train or eval, on the device it is on; it and the optimiser are left as they were.
    Profile it before `distribute`, after which backward passes are exchanged.
    """
    if repeats < 1:
        raise ConfigError(f"profile needs 1 repeat or more, got {repeats}.")
    training_pass = TrainingPass.from_batch(model, batch, loss)
    clock = clock or clock_of(training_pass.device)
    with preserved(model, training_pass.device):
        layers = find_layers(training_pass)
        forward_s, backward_s, shares, spread = _passes(training_pass, layers, clock, repeats)
        optimizer_cost = measure_step(training_pass, optimizer, clock, repeats)
        drop_gradients(model)  # So that backward allocates gradients, and the peak counts them.
        resident = [*model.parameters(), *model.buffers(), *tensors_in(batch)]
        pass_bytes = peak_bytes(lambda: training_pass.forward().backward(), resident, training_pass.device)
    # The peak is in backward, or in the optimiser's step: activations are gone by then, and gradients are not.
    gradient_bytes = sum(num_bytes(p) for layer in layers for p in layer.gradients.values())
    permanent_bytes = storage_bytes(resident) + optimizer_cost.state_bytes
    return Profile(
        num_samples=training_pass.num_samples,
        layers=tuple(_layers(layers, shares, forward_s, backward_s)),
        gradients=tuple(_gradients(model, shares, backward_s)),
        forward_s=forward_s,
        backward_s=backward_s,
        step_s=optimizer_cost.seconds,
        peak_bytes=permanent_bytes + max(pass_bytes, gradient_bytes + optimizer_cost.temporary_bytes),
        state_bytes=optimizer_cost.state_bytes,
        spread=spread,
    )


def _passes(
    training_pass: TrainingPass, layers: list[Layer], clock: Clock, repeats: int
) -> tuple[float, float, TimeShares, Spread]:
    """Return the seconds of forward and of backward, each layer's shares of them, and how far repetitions differed.

    Passes without hooks give the seconds; they alternate with passes with hooks, which give the shares.
    """
    timer = LayerTimer(training_pass, layers, clock)

    def measure() -> tuple[tuple[float, float], PassTrace]:
        # Both passes start without gradients, because adding to existing ones takes longer than storing the first.
        drop_gradients(training_pass.model)
        undisturbed = forward_and_backward(training_pass, clock)
        drop_gradients(training_pass.model)
        return undisturbed, timer.measure()

    # Steady by the undisturbed times (`result[0]`): passes with hooks are slower, and only their proportions are
    # used.
    measured, spread = steadiest(lambda: repeated(measure, repeats), lambda result: sum(result[0]))
    forward_s, backward_s = (median(seconds[part] for seconds, _ in measured) for part in range(2))
    return forward_s, backward_s, median_trace([trace for _, trace in measured]).shares(len(layers)), spread


def _layers(layers: list[Layer], shares: TimeShares, forward_s: float, backward_s: float) -> Iterator[LayerProfile]:
    """Yield each layer with its share of the seconds that passes without hooks have taken."""
    for layer, forward, backward in zip(layers, shares.forward, shares.backward, strict=True):
        # Its last gradient counts; one that was not seen to arrive is ready at the end of backward.
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


def _gradients(model: nn.Module, shares: TimeShares, backward_s: float) -> list[Gradient]:
    """Return the gradients of all trained parameters. One without a gradient counts as ready at the end of backward."""
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
