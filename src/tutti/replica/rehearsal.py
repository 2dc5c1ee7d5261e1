"""A replica that only goes through the motions of training: its buckets have sizes, and no values."""

from torch import nn
from torch.optim import Optimizer

from tutti.replica.pace import Pace
from tutti.replica.replica import Heard, Listener, Replica


class Rehearsal(Replica):
    """Tells a strategy what it would be told in training, as long after each other as the computing would take.

    Many may share one model on device "meta": nothing of it is changed.
    """

    sizes_only = True

    def __init__(self, model: nn.Module, optimizer: Optimizer, pace: Pace) -> None:
        super().__init__(model, optimizer)
        self._pace = pace
        self._listener: Listener | None = None
        self._gradients = False
        self._num_samples = 0.0

    def listen(self, listener: Listener, to: Heard) -> None:
        self._listener, self._gradients = listener, to == "gradients"

    def take_samples(self) -> float:
        num_samples, self._num_samples = self._num_samples, 0.0
        return num_samples

    def step(self, num_samples: int) -> None:
        """Forward, backward and a step of the optimiser, of so many samples."""
        listener, pace = self._listener, self._pace
        assert listener is not None
        pace.backward(pace.forward(num_samples))
        self._num_samples += num_samples
        if self._gradients:
            self._backward(listener, num_samples)
        else:
            for slot in self.slots:
                pace.gradient(slot.name)
        listener.before_step()
        pace.step()
        self.steps += 1
        listener.after_step()

    def _backward(self, listener: Listener, num_samples: int) -> None:
        for number, bucket in enumerate(self.buckets):
            for place, slot in enumerate(bucket.slots if bucket.of_parameters else []):
                self._pace.gradient(slot.name)
                if number == place == 0:
                    listener.backward_started(float(num_samples))
            listener.bucket_ready(bucket)
        listener.backward_done()
