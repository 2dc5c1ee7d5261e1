"""Base class of parameter-server workers: turns the events of training into pushes and pulls.

How it works
------------
All methods run in the training thread. One iteration of a worker, in the order of its events:

1. Forward. With `overlap`, each module first waits for its own parameters (`_wait_for_slots`).
2. `backward_started`: pulls that the consistency requires, but no forward hook waited for, are waited for now
   (`_wait_for_all`): the gradients that follow are pushed under the version that was loaded last.
3. `bucket_ready`, once per bucket: the bucket is pushed at once. It is kept until the end of backward if the norm of
   the whole gradient must be known first (clipping under a counting consistency), or until the step
   (`push_timing.py`).
4. `before_step`: the user's optimiser is about to step. What was kept is pushed. The gradients are hidden from the
   optimiser, so its step changes nothing: the servers take the step.
5. `after_step`: gradients are shown again, pulls that have arrived are loaded, and parameters that no forward hook
   covers are waited for.

If a `GradScaler` has found an inf on this rank, the worker pushes void updates: they count, so that no other worker
waits for this one, but have no values. `effective_updates` says what becomes of the version.

A subclass decides how to push and how long a pull may be outstanding, by the strategy's consistency.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable
from functools import partial
from math import isnan, sqrt
from typing import TYPE_CHECKING, Any
from weakref import ref

from tutti.errors import ConfigError, NonFiniteLoss
from tutti.events import EXCHANGE, Event
from tutti.replica import Bucket, Replica
from tutti.replica.buckets import Slot
from tutti.replica.samples import ADD_UP
from tutti.strategies.base import Exchange
from tutti.strategies.parameter_server.forward_waits import ForwardWaits
from tutti.strategies.parameter_server.optimizer_options import OptimizerOptions
from tutti.strategies.parameter_server.push_timing import PushTiming
from tutti.strategies.parameter_server.saved_state import ServedModel
from tutti.strategies.parameter_server.shard_optimizer import reject_closure
from tutti.strategies.parameter_server.support import SUPPORT
from tutti.strategies.parameter_server.user_optimizer import UserOptimizerState
from tutti.strategies.user_changes import UserChanges
from tutti.transports import Transport

if TYPE_CHECKING:
    from tutti.strategies.parameter_server.strategy import ParameterServer


class ParameterServerWorker(ServedModel, Exchange):
    """Pushes gradients, keeps this rank's optimiser from stepping, and loads what the servers made."""

    # Only servers know whose updates a step is made of: workers learn of a lost one later, and at different times.
    adds_up = True

    def __init__(self, replica: Replica, transport: Transport, strategy: "ParameterServer") -> None:
        super().__init__(replica, transport)
        self._strategy, self._consistency = strategy, strategy.consistency
        self._rank = transport.rank
        # Others may wait for as many updates as there are members: under a quorum, and in a synchronous start.
        self.leaves_without_data = strategy.consistency.bound is None
        self._weight = 1.0
        """Samples in the current batch, or `ADD_UP`."""
        self._num_backwards = 0
        """Backward passes since the last step."""
        self._options_reader = OptimizerOptions(replica.optimizer)
        self._options = self._options_reader.read()
        """Options of the optimiser, as they are pushed with this iteration's gradients."""
        self._unpushed: list[Bucket] = []
        """Buckets that are ready, but have to wait for the end of backward, or for the step."""
        self._staleness: Counter[int] = Counter()
        self._bytes_sent_before = 0
        """Bytes sent until the end of the last step."""
        self._timing = PushTiming(replica, transport.world_rank, strategy.overlap)
        self._handles: list[Any] = []
        self._user_state: UserOptimizerState | None = None
        """The user's optimiser, which has no state while servers step; None in a dry run."""
        self._forward_waits: ForwardWaits | None = None
        self._user_changes: UserChanges | None = None
        """Refuses changes by hand of what servers hold; None in a dry run."""

    def _start_listening(self) -> None:
        """Attach to the events of training: the last thing that a subclass does to construct itself."""
        if not self.replica.sizes_only:
            # Servers have copied the optimiser's state by now.
            self._user_state = UserOptimizerState(self.replica.optimizer, self.replica.slots)
            # Before the waits, whose hooks load parameters: hooks run in the order of registration.
            remedy = SUPPORT["changed parameters"].text
            self._user_changes = UserChanges(self.replica, self.transport.world_rank, remedy)
            refuse = partial(refuse_optimizer_load, self.transport.world_rank, ref(self.replica))
            self._handles.append(self.replica.optimizer.register_load_state_dict_pre_hook(refuse))
            self._forward_waits = ForwardWaits(self.replica, self._wait_for_slots) if self._strategy.overlap else None
        self.replica.listen(self, to="gradients")
        if not self.replica.sizes_only:  # After the replica's own hook, which evaluates closures.
            self._handles.append(self.replica.optimizer.register_step_pre_hook(reject_closure))

    @abstractmethod
    def _push(self, bucket: Bucket, norm: float) -> None:
        """Push a bucket; `norm` is that of the whole gradient where each update is clipped by itself."""

    @abstractmethod
    def _wait_for_all(self) -> None:
        """Wait for every pull that the next iteration needs, and load it into the model."""

    @abstractmethod
    def _wait_for_slots(self, slots: Iterable[Slot]) -> None:
        """Wait for the pulls that these slots need, and load them into the model."""

    def _load_arrived(self) -> None:
        """Load pulls that have arrived before they are needed. Called between steps, when nothing computes."""
        return None

    @abstractmethod
    def _request_stop(self) -> None:
        """Make every rank stop: the loss of this one is not finite."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The oldest version that this worker's model holds of any shard."""

    def metrics(self) -> dict[str, Any]:
        """`staleness[k]` counts this worker's updates that were computed from parameters k versions old."""
        return {"staleness": dict(sorted(self._staleness.items())), "version": self.version}

    def backward_started(self, weight: float) -> None:
        if self._num_backwards and not self._timing.waits_for_step:
            raise ConfigError(
                f"rank {self.transport.world_rank}: a second backward pass before optimizer.step(), but the gradients "
                "of the first were already pushed to the servers. Put all but the last into job.no_sync(), or use "
                "ParameterServer(overlap=False)."
            )
        self._wait_for_all()
        if isnan(weight):
            self._request_stop()
            raise NonFiniteLoss(self.transport.world_rank, [self.transport.world_rank], self.replica.steps)
        # Gradients accumulate over backward passes, and so do the samples behind them.
        self._weight = weight if weight == ADD_UP else weight + (self._weight if self._num_backwards else 0.0)
        if not self._timing.waits_for_step:
            # Pushes begin within this backward pass: options that change later count from the next iteration on.
            self._options = self._options_reader.read()

    def bucket_ready(self, bucket: Bucket) -> None:
        # An update that is clipped by itself carries the norm of the whole gradient, known after the last bucket only.
        if self._timing.waits_for_step:
            return  # The step pushes all buckets, from the gradients as they are then.
        if self._strategy.clips_updates:
            self._unpushed.append(bucket)
        else:
            self._push(bucket, 0.0)

    def backward_done(self) -> None:
        self._num_backwards += 1
        self._push_waiting()

    def before_step(self) -> None:
        if self._num_backwards:
            self._timing.before_step(self._num_backwards)
            if self._timing.waits_for_step:
                self._push_held()
        self.replica.hide_gradients()  # The user's optimiser finds no gradient: servers take the step.

    def _push_held(self) -> None:
        """Push all buckets, from the gradients as they are now."""
        self._options = self._options_reader.read()
        for bucket in self.replica.buckets if not self.replica.sizes_only else ():
            _refill(bucket)  # The user may have replaced gradients since backward.
        self._unpushed = list(self.replica.buckets)
        self._push_waiting()

    def _is_void(self, bucket: Bucket) -> bool:
        """Whether a bucket is pushed without gradients. Running statistics are those of forward passes: they count."""
        return self.replica.step_is_void and bucket.of_parameters

    def after_step(self) -> None:
        self.replica.show_gradients()
        if self._num_backwards:
            self._timing.after_step()
        self._num_backwards = 0
        # Between the step and the next forward pass nothing reads the parameters, so they may change.
        self._load_arrived()
        if self._forward_waits is None:
            self._wait_for_all()
        else:
            # No hook will wait for these before the next forward pass uses them.
            self._wait_for_slots(self._forward_waits.take_uncalled())
        bytes_sent, now = self.bytes_sent, self.transport.now()
        # Of no duration: time spent waiting is recorded as PULL, where the wait happens.
        self.events.record(Event(EXCHANGE, now, now, bytes_sent - self._bytes_sent_before))
        self._bytes_sent_before = bytes_sent
        if self._user_changes is not None:
            self._user_changes.record()

    def _expect_new_parameters(self, taken: bool = False) -> None:
        """Parameters are about to be loaded outside of a step: refuse what the user changed, unless it is `taken`."""
        if self._user_changes is not None and not (taken and self._user_changes.changed()):
            self._user_changes.check()

    def restore_local(self) -> None:
        if self._user_state is not None:
            self._user_state.clear()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._user_state is not None:
            self._user_state.close()
        if self._forward_waits is not None:
            self._forward_waits.close()
        if self._user_changes is not None:
            self._user_changes.close()

    def _push_waiting(self) -> None:
        """Push the buckets that were kept, with the norm of the whole gradient if each update is clipped by that."""
        norm = _gradient_norm(self._unpushed) if self._strategy.clips_updates and not self.replica.sizes_only else 0.0
        for bucket in self._unpushed:
            self._push(bucket, norm)
        self._unpushed.clear()


def refuse_optimizer_load(rank: int, replica: "ref[Replica]", *_: Any) -> None:
    """Raise `ConfigError`: the user loads a state into the optimiser. A hook of its `load_state_dict`."""
    if (owner := replica()) is not None and owner.restoring:
        return  # The exchange takes it over when it loads its own state.
    raise ConfigError(
        f"rank {rank}: optimizer.load_state_dict after tutti.distribute: servers hold the optimiser's state and would "
        "not see it. Load it before distribute, or use job.restore."
    )


def gradient_flags(bucket: Bucket) -> list[bool]:
    """Return for each slot whether it has a value to push: a gradient, also an old one that was not cleared."""
    return [not bucket.of_parameters or slot.tensor.grad is not None for slot in bucket.slots]


def _gradient_norm(buckets: list[Bucket]) -> float:
    """Return the norm of all gradients of the buckets, in float64; running statistics are left out."""
    slots = [slot for bucket in buckets if bucket.of_parameters for slot in bucket.slots]
    return sqrt(sum(float(slot.view.double().square().sum()) for slot in slots if slot.tensor.grad is not None))


def _refill(bucket: Bucket) -> None:
    """Copy gradients that the user replaced or removed since backward into the bucket's memory."""
    for slot in bucket.slots if bucket.of_parameters else ():
        grad = slot.tensor.grad
        if grad is None:
            slot.view.zero_()
        elif grad is not slot.view:
            slot.view.copy_(grad)
