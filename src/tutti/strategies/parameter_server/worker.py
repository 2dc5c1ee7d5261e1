"""What all workers of parameter servers do: answer to the events of training by pushes and reads."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable
from math import isnan, sqrt
from typing import TYPE_CHECKING, Any

from tutti.errors import ConfigError, NonFiniteLoss
from tutti.events import EXCHANGE, Event
from tutti.replica import Bucket, Replica
from tutti.replica.buckets import Slot
from tutti.strategies.base import Exchange
from tutti.strategies.parameter_server.module_waits import Modules
from tutti.strategies.parameter_server.shard_optimizer import Options, refuse_closure
from tutti.transports import Transport

if TYPE_CHECKING:
    from tutti.strategies.parameter_server.strategy import ParameterServer


class Worker(Exchange):
    """Pushes what backward makes, keeps the optimiser of this rank from stepping, and reads what the servers made."""

    def __init__(self, replica: Replica, transport: Transport, strategy: "ParameterServer") -> None:
        super().__init__(replica, transport)
        self._strategy, self._rule = strategy, strategy.consistency
        self._me = transport.rank
        self._weight, self._backwards = 1.0, 0
        self._options = Options(replica.optimizer)
        self._now = self._options.now()
        self._waiting: list[Bucket] = []
        self._staleness: Counter[int] = Counter()
        self._sent_before = 0
        self._handles: list[Any] = []
        self._modules: Modules | None = None

    def _listen(self) -> None:
        """Answer to what happens from now on."""
        if not self.replica.sizes_only:
            self._handles.append(self.replica.optimizer.register_step_pre_hook(refuse_closure))
            self._modules = Modules(self.replica, self._need) if self._strategy.overlap else None
        self.replica.listen(self, to="gradients")

    @abstractmethod
    def _push(self, bucket: Bucket, norm: float) -> None:
        """Let servers have a bucket; `norm` is that of the whole gradient where each update is clipped."""

    @abstractmethod
    def _settle_all(self) -> None:
        """Wait until all that this rank may not go on without is here, and let the model have it."""

    def _take_early(self) -> None:
        """Let the model have what is here before it is needed; between steps, when nobody computes with it."""
        return None

    @abstractmethod
    def _need(self, slots: Iterable[Slot]) -> None:
        """The same for these slots only."""

    @abstractmethod
    def _ask_to_stop(self) -> None:
        """Have every rank stop."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The number of server steps contained in the oldest piece of this worker's parameters."""

    def metrics(self) -> dict[str, Any]:
        """`staleness[k]` counts this worker's updates that were computed from parameters k server steps old."""
        return {"staleness": dict(sorted(self._staleness.items())), "version": self.version}

    def backward_started(self, weight: float) -> None:
        if self._backwards and self._strategy.overlap:
            raise ConfigError(
                f"rank {self._me}: a second backward pass before optimizer.step(), but the gradients of the first are "
                "with the servers already. Put all but the last into job.no_sync(), or use "
                "ParameterServer(overlap=False)."
            )
        self._settle_all()  # What this pass did not use is still to be read.
        if isnan(weight):
            self._ask_to_stop()
            raise NonFiniteLoss(self._me, [self._me], self.replica.steps)
        self._weight = weight
        if self._strategy.overlap:
            self._now = self._options.now()

    def bucket_ready(self, bucket: Bucket) -> None:
        if self._strategy.overlap and not self._clips_updates:
            self._push(bucket, 0.0)
        else:
            self._waiting.append(bucket)

    def backward_done(self) -> None:
        self._backwards += 1
        if self._strategy.overlap:
            self._push_waiting()
        else:
            self._waiting.clear()

    def before_step(self) -> None:
        if not self._strategy.overlap and self._backwards:
            self._now = self._options.now()
            for bucket in self.replica.buckets:
                _refill(bucket)
            self._waiting = list(self.replica.buckets)
            self._push_waiting()
        self.replica.hide_gradients()  # Servers take the step.

    def after_step(self) -> None:
        self.replica.show_gradients()
        self._backwards = 0
        self._take_early()
        if self._modules is None:
            self._settle_all()
        else:
            self._need(self._modules.uncalled())
        sent, now = self.bytes_sent, self.transport.now()
        self.events.record(Event(EXCHANGE, now, now, sent - self._sent_before))  # Waiting is recorded where it is.
        self._sent_before = sent

    def restore_local(self) -> None:
        return None

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._modules is not None:
            self._modules.close()

    @property
    def _clips_updates(self) -> bool:
        """Whether each update is clipped by itself, so that its norm must be known before it is sent."""
        return self._strategy.clip is not None and self._rule.bound is None

    @property
    def _clips_means(self) -> bool:
        """Whether the mean over workers is clipped, so that all pieces are stepped together."""
        return self._strategy.clip is not None and self._rule.bound is not None

    def _push_waiting(self) -> None:
        norm = _norm_of(self._waiting) if self._clips_updates and not self.replica.sizes_only else 0.0
        for bucket in self._waiting:
            self._push(bucket, norm)
        self._waiting.clear()


def marks_of(bucket: Bucket) -> list[bool]:
    """Which slots have something to push: a gradient, if only an old one that was not cleared."""
    return [not bucket.of_parameters or slot.tensor.grad is not None for slot in bucket.slots]


def _norm_of(buckets: list[Bucket]) -> float:
    slots = [slot for bucket in buckets if bucket.of_parameters for slot in bucket.slots]
    return sqrt(sum(float(slot.view.double().square().sum()) for slot in slots if slot.tensor.grad is not None))


def _refill(bucket: Bucket) -> None:
    """Have gradients that were replaced or taken away since backward so in the bucket's memory too."""
    for slot in bucket.slots if bucket.of_parameters else ():
        grad = slot.tensor.grad
        if grad is None:
            slot.view.zero_()
        elif grad is not slot.view:
            slot.view.copy_(grad)
