"""A replica that only goes through the motions of training: its buckets have sizes, and no values."""

from collections.abc import Iterator

from torch import nn
from torch.optim import Optimizer

from tutti.replica.buckets import Bucket, Slot
from tutti.replica.factors import FactoredLayer, layers_of
from tutti.replica.replica import EventScope, Listener, Replica
from tutti.simulation.compute_clock import ComputeClock


class DryRunReplica(Replica):
    """Tells a strategy what it would be told in training, as long after each other as the computing would take.

    Many may share one model on device "meta": nothing of it is changed.
    """

    sizes_only = True

    def __init__(self, model: nn.Module, optimizer: Optimizer, compute_clock: ComputeClock) -> None:
        super().__init__(model, optimizer)
        self.compute_clock = self._compute_clock = compute_clock
        self._layers: list[FactoredLayer] = []
        self._listener: Listener | None = None
        self._gradients = False
        self._num_samples = 0.0

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

    def set_apart(self, names: frozenset[str]) -> None:
        super().set_apart(names)
        for layer in self._layers:
            layer.catching = layer.slot.name in names

    def step(self, num_samples: int) -> None:
        """Forward, backward and a step of the optimiser, of so many samples."""
        listener, compute_clock = self._listener, self._compute_clock
        assert listener is not None
        compute_clock.backward(compute_clock.forward(num_samples))
        self._num_samples += num_samples
        if self._gradients:
            self._backward(listener, num_samples)
        else:
            for slot in self.slots:
                compute_clock.gradient(slot.name)
        listener.before_step()
        compute_clock.step()
        self.steps += 1
        listener.after_step()

    def _backward(self, listener: Listener, num_samples: int) -> None:
        apart, workload = self.apart, self._compute_clock.workload
        layers = {layer.slot.name: layer for layer in self._layers}
        for layer in self._layers:
            layer.rows = round(num_samples * workload.rows.get(layer.slot.name, 0.0)) if workload is not None else 0
        to_come = iter(self.buckets)
        bucket, left = _next(to_come)
        for number, slot in enumerate(self.slots):
            self._compute_clock.gradient(slot.name)
            if number == 0:
                listener.backward_started(float(num_samples))
            if slot.name in apart:
                listener.factors_ready(layers[slot.name])
                continue
            left.discard(slot)
            while bucket is not None and not left:
                listener.bucket_ready(bucket)
                bucket, left = _next(to_come)
        assert bucket is None
        listener.backward_done()
        if self.apart != apart:
            self._cut()


def _next(to_come: Iterator[Bucket]) -> tuple[Bucket | None, set[Slot]]:
    """The next bucket, and what it waits for: buffers are there."""
    bucket = next(to_come, None)
    return bucket, set(bucket.slots) if bucket is not None and bucket.of_parameters else set()
