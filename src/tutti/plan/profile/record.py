"""What one worker does in a step: how long each layer takes, and when each gradient is ready."""

from dataclasses import dataclass

from tutti.cluster import format_size, format_time
from tutti.plan.overhead import NOTHING, Overhead
from tutti.plan.profile.work_depth import WorkDepth


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

    @property
    def parallelism(self) -> float:
        """Operations that can be done at once, on average: W / D."""
        return WorkDepth(self.work, self.depth).parallelism

    def bounds(self, num_processors: int) -> tuple[float, float]:
        """The least and the most time on so many processors, in operations."""
        return WorkDepth(self.work, self.depth).bounds(num_processors)


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
    state_bytes: int = 0
    """Of it, what the optimiser keeps from step to step."""
    overhead: Overhead = NOTHING
    """What exchanging takes of this worker besides, where that was measured."""

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.forward_s + self.backward_s + self.step_s

    @property
    def gradient_bytes(self) -> int:
        return sum(gradient.num_bytes for gradient in self.gradients)

    @property
    def work(self) -> float:
        """Operations of all layers, W."""
        return sum(layer.work for layer in self.layers)

    @property
    def depth(self) -> float:
        """The longest chain of them, D, if layers follow each other; less where there are branches."""
        return sum(layer.depth for layer in self.layers)

    @property
    def parallelism(self) -> float:
        """Operations that can be done at once, on average: W / D."""
        return WorkDepth(self.work, self.depth).parallelism

    def bounds(self, num_processors: int) -> tuple[float, float]:
        """The least and the most time on so many processors, in operations: max(W/p, D) and W/p + D (Brent 1974)."""
        return WorkDepth(self.work, self.depth).bounds(num_processors)

    def __str__(self) -> str:
        width = max((len(f"{layer.name} {layer.kind}") for layer in self.layers), default=0)
        return "\n".join(
            [
                f"{self.num_samples} samples: forward {format_time(self.forward_s)}, backward "
                f"{format_time(self.backward_s)}, step {format_time(self.step_s)}; "
                f"{format_size(self.gradient_bytes)} of gradients, {format_size(self.peak_bytes)} of memory at most; "
                f"W/D {self.parallelism:.3g}",
                *(_line(layer, width) for layer in self.layers),
            ]
        )


def _line(layer: LayerProfile, width: int) -> str:
    times = f"forward {format_time(layer.forward_s):>8}, backward {format_time(layer.backward_s):>8}"
    ready = "" if layer.ready_s is None else f", {format_size(layer.gradient_bytes)} at {format_time(layer.ready_s)}"
    return f"  {f'{layer.name} {layer.kind}':<{width}}  {times}{ready}"
