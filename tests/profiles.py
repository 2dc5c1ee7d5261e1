"""Profiles as a measurement would make them, for tests that need no measurement."""

from itertools import pairwise

from tutti.plan import Gradient, LayerProfile, Profile


def perceptron(*sizes: int, computing_s: float, num_samples: int = 64, step_s: float = 0.0) -> Profile:
    """Linear layers of these sizes; a third of the computing is forward, and layers share it by their operations."""
    layers = [(f"{number}", inputs, outputs) for number, (inputs, outputs) in enumerate(pairwise(sizes))]
    total = sum(inputs * outputs for _, inputs, outputs in layers)
    forward_s, backward_s = computing_s / 3, 2 * computing_s / 3
    gradients: list[Gradient] = []
    profiles: list[LayerProfile] = []
    ready_s = 0.0
    for name, inputs, outputs in reversed(layers):
        share = inputs * outputs / total
        ready_s += share * backward_s
        for kind, shape in (("bias", (outputs,)), ("weight", (outputs, inputs))):
            num_bytes = 4 * outputs * (inputs if kind == "weight" else 1)
            gradients.append(Gradient(name=f"{name}.{kind}", shape=shape, num_bytes=num_bytes, ready_s=ready_s))
        profiles.append(
            LayerProfile(
                name=name,
                kind="Linear",
                forward_s=share * forward_s,
                backward_s=share * backward_s,
                gradient_bytes=4 * outputs * (inputs + 1),
                ready_s=ready_s,
                activation_bytes=4 * outputs * num_samples,
                rows=num_samples,
                work=3.0 * num_samples * inputs * outputs,
                depth=1.0,
            )
        )
    return Profile(
        num_samples=num_samples,
        layers=tuple(reversed(profiles)),
        gradients=tuple(gradients),
        forward_s=forward_s,
        backward_s=backward_s,
        step_s=step_s,
        peak_bytes=3 * sum(gradient.num_bytes for gradient in gradients),
    )


def lab_perceptron(computing_s: float) -> Profile:
    """784-1024-1024-10, as docs/benchmarks.md has it."""
    return perceptron(784, 1024, 1024, 10, computing_s=computing_s)
