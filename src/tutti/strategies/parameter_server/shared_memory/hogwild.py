"""Hogwild: `Async` on one host, where all workers step the same parameters at once, without a lock (Niu et al. 2011).

How it works
------------
Parameters lie in shared memory. Every worker computes with a private copy of them. In `before_step` the parameters'
data is pointed at the shared memory, so that the worker's own optimiser steps what is there; in `after_step` the worker
copies the result and points the parameters back. It could compute with the shared memory itself, but other workers
write to that all the time: a matrix product would fetch lines from other cores' caches again and again. One copy is
cheaper.

Who may write: all workers write parameters at the same time. Of two writes to one element at once, one is lost; that is
Hogwild. The optimiser's state is shared as well (`SharedOptimizerState`). Steps that create state are taken in turn,
under one lock; once all state exists, as tensors, no step takes the lock. Running statistics are not averaged: each
worker adds what its forward passes have changed since it last read them.

Waits: there are none in training, except for the lock in the first steps. A lock that a lost worker holds is freed by
the workers that wait for it (`_release_lost`). Barriers are those of `WorkerRegistry`, and end when all living
workers are there.

Versions: one counter, which every worker advances by 1 before its step. The staleness of an update is the number of
steps that others began between the worker's last read and its own step.
"""

from collections import Counter
from functools import partial
from math import isnan, sqrt
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from tutti.errors import NonFiniteLoss
from tutti.events import APPLY, EXCHANGE, PULL, READ, Event
from tutti.replica import HookedReplica
from tutti.replica.buckets import Slot, like
from tutti.strategies.base import Exchange
from tutti.strategies.parameter_server.saved_state import ServedModel
from tutti.strategies.parameter_server.shard_optimizer import clip_factor, reject_closure
from tutti.strategies.parameter_server.shared_memory.counters import CounterLayout
from tutti.strategies.parameter_server.shared_memory.optimizer_state import SharedOptimizerState
from tutti.strategies.parameter_server.shared_memory.worker_registry import (
    CONSENSUS,
    FINISH,
    RegistryCounters,
    WorkerRegistry,
)
from tutti.strategies.parameter_server.support import SUPPORT
from tutti.strategies.parameter_server.worker import refuse_optimizer_load
from tutti.strategies.resumable import KnownSteps
from tutti.strategies.saved_state import PerRank, own_buffers
from tutti.strategies.user_changes import UserChanges

if TYPE_CHECKING:
    from tutti.strategies.parameter_server.strategy import ParameterServer
    from tutti.transports.shared_memory.transport import SharedMemoryTransport

_CACHE_LINE_BYTES = 64


class HogwildWorker(ServedModel, Exchange):
    """One worker among those of a host, whose optimiser steps the shared parameters."""

    tolerates_loss = True

    def __init__(self, replica: HookedReplica, transport: "SharedMemoryTransport", strategy: "ParameterServer") -> None:
        super().__init__(replica, transport)
        self._strategy, self._consistency = strategy, strategy.consistency
        self._rank = transport.rank
        self._staleness: Counter[int] = Counter()
        self._base_version = 0
        """Version that the private copy was read at."""
        self._clock = 0
        """Number of this worker's steps."""
        # Counters are allocated in the same order on all ranks, so that their indices agree.
        layout = CounterLayout()
        registry_counters = RegistryCounters(layout, transport.size)
        self._version_counter, self._lock = int(layout.allocate(1)[0]), int(layout.allocate(1)[0])
        self._clock_counters = layout.allocate(transport.size)
        self._begun_counters = layout.allocate(transport.size)
        """By worker: steps that it has begun, of which all but the last are in its clock."""
        self._flags = transport.flags(layout.num_counters)
        self._registry = WorkerRegistry(
            transport,
            registry_counters,
            self._flags,
            clock=lambda worker: int(self._flags.counters[self._clock_counters[worker]]),
            progress=lambda: self._flags.value(self._version_counter),
            on_loss=lambda worker: _release_lost(self._registry, self._lock, worker),
        )
        # Parameters and statistics, each in shared memory and in this worker's own.
        self._parameters = [slot.tensor for slot in replica.slots]
        self._shared_parameters = self._map_shared(transport, replica.slots)
        self._private_data = [tensor.data for tensor in self._parameters]
        """The model's own memory, to which the parameters point except while the optimiser steps."""
        self._statistics = [slot.tensor for slot in replica.statistics]
        self._shared_statistics = self._map_shared(transport, replica.statistics)
        self._last_statistics = [tensor.data.clone() for tensor in self._statistics]
        """Running statistics as this worker read them last."""
        # The optimiser's state, which all workers step in place.
        numel = sum(slot.tensor.numel() for slot in replica.slots)
        parameters = self._parameters
        state_bytes = SharedOptimizerState.required_bytes(numel, len(parameters))
        memory = transport.shared_tensor(state_bytes, torch.uint8)
        self._optimizer_state = SharedOptimizerState(
            memory, len(parameters), lambda index: replica.optimizer.state[parameters[index]]
        )
        if self._rank == 0:
            # Optimiser state that rank 0 brings along counts for all ranks.
            self._optimizer_state.reset()
        transport.shared_tensor(1, torch.uint8)  # Collective: no rank goes on before rank 0 has filled in its values.
        self._shared_states: list[dict[str, Any]] = []
        """State of the optimiser in shared memory, while the optimiser has a copy of it."""
        self._has_lock = False
        # A step writes all parameters and reads them back.
        self._bytes_per_step = 2 * sum(view.nbytes for view in self._shared_parameters)
        refuse = partial(refuse_optimizer_load, transport.world_rank, ref(replica))
        self._handles = [replica.optimizer.register_load_state_dict_pre_hook(refuse)]
        # A step is taken on the shared parameters: what the user has changed in the private copy would be lost.
        remedy = SUPPORT["changed parameters"].text
        self._user_changes = UserChanges(replica, transport.world_rank, remedy)
        replica.listen(self, to="samples")
        # After the replica's own hook, which evaluates closures.
        self._handles.append(replica.optimizer.register_step_pre_hook(reject_closure))

    def _slot_states(self) -> list[dict[str, Any]]:
        """Return the dictionaries that the optimiser keeps for the parameters."""
        return [self._optimizer_state.state_of(index) for index in range(len(self._parameters))]

    def _map_shared(self, transport: "SharedMemoryTransport", slots: list[Slot]) -> list[Tensor]:
        """Return shared tensors like these slots' tensors, with the values of rank 0. Collective.

        Each begins on a cache line, so that writes to one tensor do not slow down writes to the next.
        """
        views: dict[Slot, Tensor] = {}
        by_dtype: dict[torch.dtype, list[Slot]] = {}
        for slot in slots:
            by_dtype.setdefault(slot.tensor.dtype, []).append(slot)
        for dtype, group in by_dtype.items():
            line = _CACHE_LINE_BYTES // dtype.itemsize
            sizes = [-(-slot.tensor.numel() // line) * line for slot in group]
            for slot, part in zip(group, transport.shared_tensor(sum(sizes), dtype).split(sizes), strict=True):
                views[slot] = like(part[: slot.tensor.numel()], slot.tensor)
                # Other ranks may still see zeros here. They go on only after the constructor's last collective.
                if self._rank == 0:
                    views[slot].copy_(slot.tensor.detach())
        return [views[slot] for slot in slots]

    @property
    def bytes_sent(self) -> int:
        return self._clock * self._bytes_per_step

    def metrics(self) -> dict[str, Any]:
        return {"staleness": dict(sorted(self._staleness.items())), "version": self._base_version}

    @property
    def is_leader(self) -> bool:
        return self._registry.is_leader

    def steps_of(self, rank: int) -> KnownSteps:
        # A step that was begun may be half written: it counts as used.
        counters = self._flags.counters
        return KnownSteps(int(counters[self._clock_counters[rank]]), int(counters[self._begun_counters[rank]]))

    def before_step(self) -> None:
        """Point the parameters at shared memory; take the lock if the optimiser's state is not all shared yet."""
        weight = self.replica.take_samples()
        if isnan(weight):
            self._registry.request_stop()
            raise NonFiniteLoss(self.transport.world_rank, [self.transport.world_rank], self.replica.steps)
        if weight == 0:  # A void step, or a batch that does not count: the optimiser finds no gradients.
            self.replica.hide_gradients()
        self._registry.check_stop(self.replica.steps)
        self._started_s = now = self.transport.now()
        self._step_version = self._flags.advance(self._version_counter)  # Atomic: no two steps have one number.
        staleness = self._step_version - self._base_version
        self._staleness[staleness] += 1
        self.events.record(Event(READ, now, now, 0, (0, self._clock, self._base_version)))
        self._scale_gradients(self._consistency.scale(staleness, self.transport.size))
        self._flags.counters[self._begun_counters[self._rank]] = self._clock + 1
        # From here until `after_step`, the user's optimiser changes the shared parameters in place.
        for tensor, view in zip(self._parameters, self._shared_parameters, strict=True):
            tensor.data = view
        # This rank lacks shared state, or some of it is numbers: then the step is taken under the lock.
        if not self._optimizer_state.is_current:
            self._registry.acquire(self._lock)
            self._has_lock = True
            self._optimizer_state.refresh()

    def after_step(self) -> None:
        """Publish new optimiser state, copy the shared values, and point the parameters back at the copy."""
        self.replica.show_gradients()
        # If the step has made new state, that is in private memory, and other ranks do not know it.
        if not self._has_lock and not self._optimizer_state.is_complete:
            self._registry.acquire(self._lock)
            self._has_lock = True
            self._optimizer_state.refresh()  # State that others have published meanwhile takes precedence.
        if self._has_lock:
            self._optimizer_state.publish()
            self._registry.release(self._lock)
            self._has_lock = False
        self._add_statistics()
        version = self._flags.value(self._version_counter)  # Before the copy, which is then at least as new.
        self._read()
        now = self.transport.now()
        self.events.record(Event(APPLY, now, now, 0, (0, self._step_version, self._rank, self._clock)))
        self._clock += 1
        # For the log of other ranks; nothing is ordered by it, so a plain store will do.
        self._flags.counters[self._clock_counters[self._rank]] = self._clock
        self._base_version = version
        self.events.record(Event(EXCHANGE, self._started_s, self._started_s, self._bytes_per_step))
        self._user_changes.record()

    def _scale_gradients(self, factor: float) -> None:
        """Scale the gradients by `factor`, and clip them if the strategy says so."""
        grads = [slot.tensor.grad for slot in self.replica.slots if slot.tensor.grad is not None]
        if self._strategy.clip is not None:
            norm = sqrt(sum(float(grad.double().square().sum()) for grad in grads))
            factor *= clip_factor(self._strategy.clip, norm)
        if factor != 1.0 and grads:
            torch._foreach_mul_(grads, factor)

    def _read(self) -> None:
        """Copy the shared values to private memory, and let the model compute with the copy."""
        with torch.no_grad():
            torch._foreach_copy_(self._private_data, self._shared_parameters)
            if self._statistics:
                torch._foreach_copy_(self._statistics, self._shared_statistics)
                torch._foreach_copy_(self._last_statistics, self._statistics)
        for tensor, private in zip(self._parameters, self._private_data, strict=True):
            tensor.data = private

    def _add_statistics(self) -> None:
        """Add the change of this worker's running statistics since its last read to the shared ones."""
        if self._statistics:
            # The change, not the value, which would undo what other workers have added since this one's last read.
            changes = torch._foreach_sub(self._statistics, self._last_statistics)
            torch._foreach_add_(self._shared_statistics, changes)

    def consensus(self, optimizer: bool = False, call: str = CONSENSUS) -> None:
        """Wait for all living workers, which must be in the same call, and read what all of them have made."""
        self._user_changes.check()
        start_s = self.transport.now()

        # No worker steps while all are in the barrier, so all of them copy the same values.
        def copy(number: int) -> None:
            self._read()
            if optimizer:
                self._optimizer_state.refresh()
                # Copies: workers that leave the consensus before this one change the shared state again.
                for state in self._slot_states():
                    self._shared_states.append(dict(state))
                    state.update(_cloned(state))

        self._registry.barrier(copy, call)
        self._user_changes.record(keep_values=True)
        self.events.record(Event(PULL, start_s, self.transport.now()))

    def restore_local(self) -> None:
        for slot_state, shared in zip(self._slot_states(), self._shared_states, strict=False):
            slot_state.update(shared)
        self._shared_states.clear()

    def leave(self) -> None:
        # No worker waits for another, except at barriers.
        self._user_changes.check()
        self._user_changes.record(keep_values=True)

    def join(self) -> None:
        self._user_changes.check()
        self._read()
        self._user_changes.record(keep_values=True)
        self._base_version = self._flags.value(self._version_counter)

    def finish(self) -> None:
        self.consensus(optimizer=True, call=FINISH)
        self._registry.leave()
        self.close()

    def close(self) -> None:
        """Detach: the model and its optimiser keep private copies."""
        self._user_changes.close()
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self._handles.clear()
            for tensor, private in zip(self._parameters, self._private_data, strict=True):
                tensor.data = private
            for state in self._slot_states():
                # The user's optimiser goes on without the transport, so it must not point into shared memory.
                state.update(_cloned(state))

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the optimiser's state by parameter, and this worker's own buffers."""
        states: dict[str, Any] = {}

        # Run within the barrier, where no rank steps: otherwise tensors of one parameter could come from two steps.
        def copy(number: int) -> None:
            self._optimizer_state.refresh()
            for slot, state in zip(self.replica.slots, self._slot_states(), strict=True):
                states[slot.name] = _cloned(state)

        self._registry.barrier(copy)
        return {"optimizer": states, "buffers": PerRank(own_buffers(self.replica))}

    def load_state_dict(self, state: dict[str, Any]) -> set[str]:
        """Start again from the model as it is on the leader, and from this state of the optimiser."""
        self._load_buffers(state)
        state = self._with_kept(state)
        if "optimizer" not in state:
            return set(state) - {"buffers"}
        self._user_changes.changed()  # The model that the user has loaded is taken.
        # Copied before the barrier: the model of the rank that turns out to lead counts.
        parameters = [tensor.data.clone() for tensor in self._parameters]
        statistics = [tensor.data.clone() for tensor in self._statistics]

        def load() -> None:
            for view, value in zip(self._shared_parameters, parameters, strict=True):
                view.copy_(value)
            for view, value in zip(self._shared_statistics, statistics, strict=True):
                view.copy_(value)
            for slot, slot_state in zip(self.replica.slots, self._slot_states(), strict=True):
                slot_state.clear()
                slot_state.update(state["optimizer"].get(slot.name, {}))
            self._optimizer_state.reset()

        # The leader writes, all read: `run_on_leader` returns on every rank only after the leader has published its
        # end.
        def load_and_read(number: int) -> None:
            self._registry.run_on_leader(number, load)
            self._read()

        self._registry.barrier(load_and_read)
        return set(state) - {"optimizer", "buffers"}


def _release_lost(registry: WorkerRegistry, lock: int, worker: int) -> None:
    registry.release_lost(lock, worker)


def _cloned(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
