"""What one worker does in a step: how long each layer takes, and when each gradient is ready."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """One parameter's gradient."""

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    ready_s: float
    """After the start of backward."""


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One module that computes by itself."""

    name: str
    kind: str
    """Its class."""
    forward_s: float
    backward_s: float
    gradient_bytes: int
    ready_s: float | None
    """After the start of backward, when all its gradients are there; None without any."""
    activation_bytes: int
    """Of its outputs."""
    rows: int | None
    """If it is a matrix product, how many rows its input has: its gradient is a product of that many columns."""
    work: float
    """Operations of forward and backward, W."""
    depth: float
    """The longest chain of them, D."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One worker's step, as measured."""

    num_samples: int
    layers: tuple[LayerProfile, ...]
    """In the order of forward."""
    gradients: tuple[Gradient, ...]
    """In the order in which they become ready."""
    forward_s: float
    backward_s: float
    step_s: float
    """Of the optimiser, and whatever else a step takes; 0 without one."""
    peak_bytes: int
    """The most memory in use at once: parameters, gradients, optimiser state, activations."""
