"""`DryRunReplica`: a replica whose buckets have sizes and no values, for dry runs in virtual time."""

from collections.abc import Iterator

from torch import nn
from torch.optim import Optimizer

from tutti.replica.buckets import Bucket, Slot
from tutti.replica.factors import FactoredLayer, layers_of
from tutti.replica.replica import EventScope, Listener, Replica
from tutti.simulation.compute_clock import ComputeClock


class DryRunReplica(Replica):
    """Reports the events of training to a strategy, at the virtual times at which training would.

    Many ranks may share one model on device "meta": nothing of it is changed.
    """

    sizes_only = True

    def __init__(self, model: nn.Module, optimizer: Optimizer, compute_clock: ComputeClock) -> None:
        super().__init__(model, optimizer)
        self.compute_clock = self._compute_clock = compute_clock
        self._layers: list[FactoredLayer] = []
        self._listener: Listener | None = None
        self._gradients = False
        """Whether the listener wants gradients, not only steps."""
        self._num_samples = 0.0
        """Samples since the last `take_samples`."""

    def listen(self, listener: Listener, to: EventScope) -> None:
        self._listener, self._gradients = listener, to == "gradients"

    def take_samples(self) -> float:
        num_samples, self._num_samples = self._num_samples, 0.0
        return num_samples

    def watch_factors(self) -> list[FactoredLayer]:
        self._layers = layers_of(self.model, self.slots)
        return self._layers

    @property
    def factored(self) -> list[FactoredLayer]:
        return [layer for layer in self._layers if layer.catching]

    def exchange_as_factors(self, names: frozenset[str]) -> None:
        super().exchange_as_factors(names)
        for layer in self._layers:
            layer.catching = layer.slot.name in names

    def step(self, num_samples: int) -> None:
        """Report a forward pass, a backward pass and a step of the optimiser, for a batch of so many samples."""
        listener, compute_clock = self._listener, self._compute_clock
        assert listener is not None
        compute_clock.backward(compute_clock.forward(num_samples))
        self._num_samples += num_samples
        if self._gradients:
            self._backward(listener, num_samples)
        else:
            # The clock still goes through backward gradient by gradient; no one asked to hear of them.
            for slot in self.slots:
                compute_clock.gradient(slot.name)
        listener.before_step()
        # As in a real step: what `before_step` waits for comes before the optimiser's time, what `after_step` sends
        # after it.
        compute_clock.step()
        self.steps += 1
        listener.after_step()

    def _backward(self, listener: Listener, num_samples: int) -> None:
        """Report the events of a backward pass in the order in which `BackwardPass` would."""
        as_factors, workload = self.exchanged_as_factors, self._compute_clock.workload
        layers = {layer.slot.name: layer for layer in self._layers}
        for layer in self._layers:
            layer.rows = round(num_samples * workload.rows.get(layer.slot.name, 0.0)) if workload is not None else 0
        remaining = iter(self.buckets)
        arrived: set[Slot] = set()
        bucket, missing = _next(remaining)
        for number, slot in enumerate(self.slots):
            self._compute_clock.gradient(slot.name)
            if number == 0:  # As in a real pass, which its first gradient starts.
                listener.backward_started(float(num_samples))
            if slot.name in as_factors:
                listener.factors_ready(layers[slot.name])
                continue
            arrived.add(slot)
            missing.discard(slot)
            # Several may be ready: buckets of two dtypes fill at the same time, and buffers wait for nothing.
            while bucket is not None and not missing:
                listener.bucket_ready(bucket)
                bucket, missing = _next(remaining)
                missing -= arrived
        assert bucket is None
        listener.backward_done()
        if self.exchanged_as_factors != as_factors:  # `backward_done` has chosen factors: their slots leave buckets.
            self._cut()


def _next(remaining: Iterator[Bucket]) -> tuple[Bucket | None, set[Slot]]:
    """Return the next bucket, and the slots whose gradients it waits for: none for buffers, which are always there."""
    bucket = next(remaining, None)
    return bucket, set(bucket.slots) if bucket is not None and bucket.of_parameters else set()
