"""`Profile`: one worker's step, with the time of each layer and the moment each gradient is ready."""

from dataclasses import dataclass

from tutti.cluster import format_size, format_time
from tutti.cost.overhead import NO_OVERHEAD, Overhead
from tutti.cost.work_depth import WorkDepth
from tutti.measurement import Spread


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """The gradient of one parameter."""

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    ready_s: float
    """Seconds after the start of backward at which the gradient is complete."""


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One module that computes something itself."""

    name: str
    kind: str
    """The name of its class."""
    forward_s: float
    backward_s: float
    gradient_bytes: int
    ready_s: float | None
    """Seconds after the start of backward at which all its gradients are complete; None if it has none."""
    activation_bytes: int
    """Bytes of its outputs."""
    rows: int | None
    """Number of rows of its input, if it is a matrix product: its gradient has at most that rank. Else None."""
    work: float
    """Operations of forward and backward, W."""
    depth: float
    """The longest chain of dependent operations, D."""

    @property
    def parallelism(self) -> float:
        """Average number of operations that can run at once: W / D."""
        return WorkDepth(self.work, self.depth).parallelism

    def bounds(self, num_processors: int) -> tuple[float, float]:
        """Return the least and the most time on `num_processors` processors, in operations."""
        return WorkDepth(self.work, self.depth).bounds(num_processors)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One worker's measured step."""

    num_samples: int
    layers: tuple[LayerProfile, ...]
    """The layers, in the order of forward."""
    gradients: tuple[Gradient, ...]
    """The gradients, in the order in which they become ready."""
    forward_s: float
    backward_s: float
    step_s: float
    """Seconds of the optimiser and of the rest of a step; 0 without an optimiser."""
    peak_bytes: int
    """Peak memory in bytes: parameters, gradients, optimiser state and activations."""
    state_bytes: int = 0
    """Bytes of it that the optimiser keeps from step to step."""
    overhead: Overhead = NO_OVERHEAD
    """Measured overhead of exchanging, if any."""
    spread: Spread | None = None
    """How far repetitions of forward and backward differed; None if the times were not measured."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.forward_s + self.backward_s + self.step_s

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(gradient.num_bytes for gradient in self.gradients)

    @property
    def work(self) -> float:
        """Operations of all layers, W."""
        return sum(layer.work for layer in self.layers)

    @property
    def depth(self) -> float:
        """The longest chain of dependent operations, D, if layers run in sequence; less where there are branches."""
        return sum(layer.depth for layer in self.layers)

    @property
    def parallelism(self) -> float:
        """Average number of operations that can run at once: W / D."""
        return WorkDepth(self.work, self.depth).parallelism

    def bounds(self, num_processors: int) -> tuple[float, float]:
        """Return the least and the most time on p processors, in operations: max(W/p, D) and W/p + D (Brent 1974)."""
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
