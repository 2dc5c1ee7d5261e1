"""Profiles derived from a measured one: of a slower worker, or with another batch size."""

from dataclasses import replace

from tutti.cost.profile import LayerProfile, Profile


def slowed(profile: Profile, factor: float) -> Profile:
    """Return the step of a worker that takes `factor` times as long."""
    overhead = profile.overhead.slowed(factor)
    return _stretched(replace(profile, step_s=profile.step_s * factor, overhead=overhead), factor)


def with_batch(profile: Profile, num_samples: int) -> Profile:
    """Return the same step with another batch size.

    Computing time and activations grow in proportion; the optimiser takes as long as before.
    """
    factor = num_samples / profile.num_samples
    activations = sum(layer.activation_bytes for layer in profile.layers)
    # Only activations depend on the batch; parameters, gradients and optimiser state stay.
    peak_bytes = max(0, profile.peak_bytes + round(activations * (factor - 1)))
    layers = tuple(_with_larger_batch(layer, factor) for layer in profile.layers)
    return _stretched(replace(profile, num_samples=num_samples, peak_bytes=peak_bytes, layers=layers), factor)


def _with_larger_batch(layer: LayerProfile, factor: float) -> LayerProfile:
    """Return the layer's profile for a batch `factor` times as large, but for its times."""
    rows = None if layer.rows is None else max(1, round(layer.rows * factor))
    activation_bytes = round(layer.activation_bytes * factor)
    return replace(layer, rows=rows, work=layer.work * factor, activation_bytes=activation_bytes)


def _stretched(profile: Profile, factor: float) -> Profile:
    """Return the profile with forward and backward `factor` times as long."""
    # Times inside of backward stretch with it, so that gradients keep their places relative to its end.
    gradients = tuple(replace(gradient, ready_s=gradient.ready_s * factor) for gradient in profile.gradients)
    layers = tuple(
        replace(
            layer,
            forward_s=layer.forward_s * factor,
            backward_s=layer.backward_s * factor,
            ready_s=None if layer.ready_s is None else layer.ready_s * factor,
        )
        for layer in profile.layers
    )
    forward_s, backward_s = profile.forward_s * factor, profile.backward_s * factor
    return replace(profile, layers=layers, gradients=gradients, forward_s=forward_s, backward_s=backward_s)
