"""What strategies see of a replica: the user's model and optimiser, as buckets."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from torch import Tensor, nn, zeros_like
from torch.optim import Optimizer

from tutti.errors import ConfigError
from tutti.replica.batchnorm import SyncedBatchNorm
from tutti.replica.buckets import Bucket, Kind, Memory, Slot, cut, kind_of
from tutti.replica.factors import FactoredLayer
from tutti.transports import Transport

EventScope = Literal["steps", "samples", "gradients"]


class Listener(Protocol):
    """Who is told of the events of training: an exchange."""

    def backward_started(self, weight: float) -> None: ...
    def bucket_ready(self, bucket: Bucket) -> None: ...
    def factors_ready(self, layer: FactoredLayer) -> None: ...
    def backward_done(self) -> None: ...
    def before_step(self) -> None: ...
    def after_step(self) -> None: ...


class GradientClock(Protocol):
    """The modelled compute time of a replica in virtual time, as far as replicas and exchanges use it."""

    @property
    def speed(self) -> float:
        """Floating-point operations a second."""
        ...

    def gradient(self, name: str) -> None:
        """Let the time pass that the gradient of parameter `name` takes."""
        ...

    def operations(self, number: float) -> None:
        """Let the time pass that so many floating-point operations take."""
        ...


class Replica(ABC):
    """A model and its optimiser, seen as buckets of gradients and of running statistics."""

    sizes_only = False
    """Whether buckets have sizes and no values."""
    arranged = True
    """Whether buckets are in the order in which they stay."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.slots = [Slot(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.slots.reverse()  # Backward reaches the last layers first; the first pass tells precisely.
        self.statistics = [Slot(name, buffer) for name, buffer in _running_statistics(model)]
        self.buckets: list[Bucket] = []
        self.apart: frozenset[str] = frozenset()
        """Parameters whose gradients are in no bucket: their factors are exchanged."""
        self.left_out: frozenset[str] = frozenset()
        """Parameters that are not exchanged for the time being, and have no gradient after backward."""
        self.steps = 0
        self.compute_clock: GradientClock | None = None
        """Models how long it computes, in virtual time; None where time passes by itself."""
        self._memories: dict[Kind, Memory] = {}
        self._hidden: list[tuple[Tensor, Tensor]] = []

    @property
    def device_types(self) -> set[str]:
        return {slot.tensor.device.type for slot in self.slots}

    def allocate(self, transport: Transport, bucket_bytes: int, exact_below: int = 0) -> None:
        """Make buckets, in memory of the transport where it has some. Collective.

        Gradients of fewer elements than `exact_below`, and what is not a gradient, are in their exact part.
        """
        self.transport = transport
        self._bucket_bytes = bucket_bytes
        kinds: dict[Kind, list[Slot]] = {}
        for slot in [*self.slots, *self.statistics]:
            kinds.setdefault(kind_of(slot.tensor), []).append(slot)
        self._memories = {kind: Memory(slots, transport, self.sizes_only, exact_below) for kind, slots in kinds.items()}
        self._cut()

    @abstractmethod
    def listen(self, listener: Listener, to: EventScope) -> None:
        """Tell `listener` what happens from now on: steps; steps, with samples counted; or gradients too."""

    def hide_gradients(self) -> None:
        """Let the optimiser's next step find none, and change nothing."""
        if not self.sizes_only:
            trained = [slot.tensor for slot in self.slots]
            self._hidden = [(tensor, tensor.grad) for tensor in trained if tensor.grad is not None]
            for tensor, _ in self._hidden:
                tensor.grad = None

    def show_gradients(self) -> None:
        """Give back those that were hidden, if any."""
        for tensor, gradient in self._hidden:
            tensor.grad = gradient
        self._hidden.clear()

    @abstractmethod
    def take_samples(self) -> float:
        """How many this rank contributed since it was last asked; NaN if one of its losses was not finite."""

    def arrange(self, names: Sequence[str]) -> None:
        """Cut buckets anew, parameters in the order of these names, as all ranks give them."""
        by_name = {slot.name: slot for slot in self.slots}
        if sorted(names) != sorted(by_name):
            raise ConfigError(
                f"this state was saved for a model with {len(names)} trained parameters; this one has {len(by_name)}, "
                "or others."
            )
        self.slots = [by_name[name] for name in names]
        self._cut()

    def watch_factors(self) -> list[FactoredLayer]:
        """Layers whose gradients are products of few rows, perhaps: how many is seen in the first backward pass."""
        return []

    @property
    def factored(self) -> list[FactoredLayer]:
        """Layers whose factors are caught."""
        return []

    def keep_factors(self) -> None:
        """Have `factored` keep the factors of gradients, beside the gradients in buckets, where they are smaller."""
        return None

    def set_apart(self, names: frozenset[str]) -> None:
        """Have these parameters' gradients as factors from the next backward pass on, as all ranks say in this one."""
        self.apart = names

    def leave_out(self, names: frozenset[str]) -> None:
        """Exchange all but these from the next backward pass on, as all ranks say between two steps."""
        if names != self.left_out:
            self.left_out = names
            for slot in self.slots:
                if slot.name in names:
                    slot.tensor.grad = None
                    slot.touched = False
                    slot.view = slot.tensor
            self.arrange([slot.name for slot in self.slots])

    def _cut(self) -> None:
        slots = [slot for slot in self.slots if slot.name not in self.apart and slot.name not in self.left_out]
        self.buckets = cut((slots, self.statistics), self._memories, self._bucket_bytes)
        for slot in self.slots:
            if slot.name in self.apart and not self.sizes_only:
                slot.view = zeros_like(slot.tensor)


def _running_statistics(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The running means and variances of normalisation layers, which each rank updates from its own samples."""
    for name, module in model.named_modules():
        if isinstance(module, SyncedBatchNorm):
            continue  # Equal on all ranks by itself.
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            for kind in ("running_mean", "running_var"):
                if (buffer := getattr(module, kind)) is not None:
                    yield f"{name}.{kind}".lstrip("."), buffer
