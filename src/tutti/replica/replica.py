"""`Replica`: the user's model and optimiser as strategies see them, and the events that a strategy listens to."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

from torch import Tensor, nn, zeros_like
from torch.optim import Optimizer

from tutti.errors import ConfigError, RankLost
from tutti.replica.batchnorm import SyncedBatchNorm
from tutti.replica.buckets import Bucket, Kind, Memory, Slot, cut_buckets, kind_of
from tutti.replica.factors import FactoredLayer
from tutti.replica.gradient_marks import GradientMarks
from tutti.replica.loss_scaling import LossScaling
from tutti.transports import Transport

EventScope = Literal["steps", "samples", "gradients"]
"""The events that a strategy needs: steps of the optimiser; also counts of samples; also gradients."""


class Listener(Protocol):
    """The receiver of the events of training: an exchange. `docs/strategies.md` lists when each is called."""

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
        """Floating-point operations per second."""
        ...

    def gradient(self, name: str) -> None:
        """Advance the clock by the time that the gradient of parameter `name` takes."""
        ...

    def operations(self, number: float) -> None:
        """Advance the clock by the time of so many floating-point operations."""
        ...

    def detach(self) -> None:
        """Remove the clock's hooks from the model and its optimiser."""
        ...


class Checks(Protocol):
    """Checks that run while a replica is trained, as far as a replica calls them."""

    def pass_started(self, slot: Slot | None) -> None:
        """A backward pass that is exchanged has begun; `slot` is the parameter whose gradient came first, if known."""
        ...

    def pass_finished(self) -> None:
        """That backward pass is over on all ranks."""
        ...

    def before_step(self) -> None:
        """The optimiser is about to step."""
        ...

    def allow(self, *, any_loss: bool = False, same_batches: bool = False) -> None:
        """Do not look at the loss, or do not compare the batches of ranks."""
        ...

    def cause_of(self, error: RankLost) -> Exception:
        """Return the mistake for which a peer has ended, if it is known; else the error itself."""
        ...

    def finished(self) -> None:
        """Training is over, and the model holds what all ranks agree on. Collective."""
        ...

    def close(self) -> None:
        """Remove all hooks."""
        ...


class Replica(ABC):
    """A model and its optimiser, seen as buckets of gradients and of running statistics."""

    sizes_only = False
    """Whether buckets have sizes and no values."""
    arranged = True
    """Whether buckets have their final order."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        # A parameter that several modules share is listed once, under its first name.
        self.slots = [Slot(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.slots.reverse()  # Backward reaches the last layers first; the first pass shows the precise order.
        self.statistics = [Slot(name, buffer) for name, buffer in running_statistics(model)]
        self.buckets: list[Bucket] = []
        self.exchanged_as_factors: frozenset[str] = frozenset()
        """Names of parameters whose gradients are in no bucket: their factors are exchanged."""
        self.left_out: frozenset[str] = frozenset()
        """Names of parameters that are not exchanged for the time being, and have no gradient after backward."""
        self.in_consensus = False
        """Whether the model holds the consensus parameters of all ranks, and not those that this rank trains."""
        self.restoring = False
        """Whether `job.restore` loads the model and the optimiser, so that nobody else need notice."""
        self.steps = 0
        """Steps of the optimiser so far."""
        self.synchronous_steps = 0
        """Steps from the start of the training that are synchronous, if the strategy can (`synchronous_start`)."""
        self.compute_clock: GradientClock | None = None
        """Models the compute time in virtual time; None in real time."""
        self.loss_scaling: LossScaling | None = None
        """Handles a `GradScaler`, where `p.grad` is this rank's own gradient. A strategy that needs it sets it."""
        self.step_is_void = False
        """Whether the present step of the optimiser must change nothing, because a `GradScaler` has found an inf."""
        self.survives = False
        """Whether training goes on with other ranks when some are lost (`tutti.job.elastic`)."""
        self.lost: RankLost | None = None
        """The loss that has ended exchanges, where training survives it: steps are void until ranks are others."""
        self.waits_for_batch = False
        """Whether steps are void until the next batch: ranks have changed in the middle of this one."""
        self.on_void: Callable[[], None] | None = None
        """Called when a step becomes void because of a loss."""
        self.owed: dict[str, Tensor] = {}
        """Gradients by parameter that this rank adds to its next ones: a codec of the run before had not sent them."""
        self.marks: GradientMarks | None = None
        """Notices gradients that are changed after backward. A strategy that needs it sets it."""
        self.bucket_bytes = 0
        """About how many bytes a bucket has, from when it is next cut on."""
        self._memories: dict[Kind, Memory] = {}
        self._hidden: list[tuple[Tensor, Tensor]] = []
        """Parameters and the gradients that `hide_gradients` took from them."""

    @property
    def is_void(self) -> bool:
        """Whether backward passes and steps do not count for the time being, because a rank was lost."""
        return self.lost is not None or self.waits_for_batch

    @property
    def starts_synchronously(self) -> bool:
        """Whether the step under way is one of the synchronous start."""
        return self.steps < self.synchronous_steps

    @property
    def device_types(self) -> set[str]:
        """The types of the devices that parameters are on, such as "cpu" and "cuda"."""
        return {slot.tensor.device.type for slot in self.slots}

    def allocate(self, transport: Transport, bucket_bytes: int, exact_below: int = 0) -> None:
        """Allocate and cut buckets, in memory of the transport where it has some. Collective.

        Gradients of fewer elements than `exact_below`, and what is not a gradient, are in their exact part.
        """
        self.transport = transport
        self.bucket_bytes = bucket_bytes
        # One piece of memory per device and dtype. It is collective where the memory is shared: all ranks map it.
        kinds: dict[Kind, list[Slot]] = {}
        for slot in [*self.slots, *self.statistics]:
            kinds.setdefault(kind_of(slot.tensor), []).append(slot)
        self._memories = {kind: Memory(slots, transport, self.sizes_only, exact_below) for kind, slots in kinds.items()}
        self._cut()

    @abstractmethod
    def listen(self, listener: Listener, to: EventScope) -> None:
        """Report events to `listener` from now on; `to` selects the events."""

    def hide_gradients(self) -> None:
        """Set all gradients to None for the optimiser's next step, which then changes nothing."""
        if not self.sizes_only:
            trained = [slot.tensor for slot in self.slots]
            self._hidden += [(tensor, tensor.grad) for tensor in trained if tensor.grad is not None]
            for tensor, _ in self._hidden:
                tensor.grad = None  # torch's optimisers skip such a parameter, with its momentum and weight decay.

    def show_gradients(self) -> None:
        """Put back the gradients that were hidden, if any."""
        for tensor, gradient in self._hidden:
            tensor.grad = gradient
        self._hidden.clear()

    def add_owed(self) -> None:
        """Add what a codec of the run before had not sent to the gradients of this step, once."""
        for slot in self.slots:
            if (owed := self.owed.pop(slot.name, None)) is not None:
                owed = owed.to(slot.tensor)
                slot.tensor.grad = owed if slot.tensor.grad is None else slot.tensor.grad + owed

    @abstractmethod
    def take_samples(self) -> float:
        """Return the samples that this rank contributed since the last call; NaN if a loss was not finite.

        None count in a step that is void.
        """

    def arrange(self, names: Sequence[str]) -> None:
        """Cut buckets anew, with parameters in the order of these names. All ranks must give the same order."""
        by_name = {slot.name: slot for slot in self.slots}
        if sorted(names) != sorted(by_name):
            raise ConfigError(
                f"this state was saved for a model with {len(names)} trained parameters; this one has {len(by_name)}, "
                "or others."
            )
        self.slots = [by_name[name] for name in names]
        self._cut()

    def watch_factors(self) -> list[FactoredLayer]:
        """Count rows in the layers whose gradients could be factored, from now on; return these layers."""
        return []

    @property
    def factored(self) -> list[FactoredLayer]:
        """The layers whose factors are caught."""
        return []

    def keep_factors(self) -> None:
        """Keep the factors of gradients in addition to the gradients in buckets, where factors are smaller."""
        return None

    def exchange_as_factors(self, names: frozenset[str]) -> None:
        """Exchange these gradients as factors from the next backward pass on. All ranks call it in the same pass."""
        self.exchanged_as_factors = names

    def leave_out(self, names: frozenset[str]) -> None:
        """Exchange all but these from the next backward pass on. All ranks call it between the same two steps."""
        if names != self.left_out:
            self.left_out = names
            for slot in self.slots:
                if slot.name in names:
                    slot.tensor.grad = None
                    slot.touched = False
                    # It is in no bucket from now on, so it needs no memory there.
                    slot.view = slot.tensor
            self.arrange([slot.name for slot in self.slots])

    def _cut(self) -> None:
        """Cut buckets from the present slots. Parameters exchanged as factors get memory of their own."""
        slots = [
            slot for slot in self.slots if slot.name not in self.exchanged_as_factors and slot.name not in self.left_out
        ]
        self.buckets = cut_buckets((slots, self.statistics), self._memories, self.bucket_bytes)
        for slot in self.slots:
            if slot.name in self.exchanged_as_factors and not self.sizes_only:
                slot.view = zeros_like(slot.tensor)


def running_statistics(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the running means and variances of normalisation layers, which each rank updates from its own samples."""
    for name, module in model.named_modules():
        if isinstance(module, SyncedBatchNorm):
            continue  # Equal on all ranks by itself.
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            # `num_batches_tracked` is left out: it is a count that is equal on all ranks.
            for kind in ("running_mean", "running_var"):
                if (buffer := getattr(module, kind)) is not None:
                    yield f"{name}.{kind}".lstrip("."), buffer
