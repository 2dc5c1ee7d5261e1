"""`Async` on one host, without a lock: parameters are in memory that all workers share.

A worker's own optimiser steps what is there, as do all others at the same time (Hogwild; Niu et al. 2011), and the
worker then takes a copy to compute with. It could compute with the shared memory itself; but others write to that all
the time, and every line of it would come from another core's cache in the middle of a product of matrices: to read it
once, in a row, costs far less. What the optimiser remembers is shared as well: the first steps, which make it, are
taken in turn, and none after.
"""

from collections import Counter
from math import isnan, sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tutti.errors import NonFiniteLoss
from tutti.events import APPLY, EXCHANGE, PULL, READ, Event
from tutti.replica import HookedReplica
from tutti.replica.buckets import Slot, like
from tutti.strategies.base import Exchange
from tutti.strategies.parameter_server.shard_optimizer import clip_factor, reject_closure
from tutti.strategies.parameter_server.shared_memory.optimizer_state import Arena
from tutti.strategies.parameter_server.shared_memory.worker_registry import Gathering, Slots

if TYPE_CHECKING:
    from tutti.strategies.parameter_server.strategy import ParameterServer
    from tutti.transports.shared_memory.transport import SharedMemoryTransport

_LINE_BYTES = 64


class HogwildWorker(Exchange):
    """One worker among those of a host."""

    tolerates_loss = True

    def __init__(self, replica: HookedReplica, transport: "SharedMemoryTransport", strategy: "ParameterServer") -> None:
        super().__init__(replica, transport)
        self._strategy, self._rule = strategy, strategy.consistency
        self._me = transport.rank
        self._staleness: Counter[int] = Counter()
        self._base = self._clock = 0
        slots = Slots()
        self._crowd = Gathering(transport, slots)
        self._version, self._lock = int(slots.take(1)[0]), int(slots.take(1)[0])
        self._clocks = slots.take(transport.size)
        self._flags = transport.flags(slots.used)
        self._crowd.open(self._flags)
        self._crowd.clock_of = lambda worker: int(self._flags.counters[self._clocks[worker]])
        self._crowd.on_loss = self._bury
        self._crowd.progress = lambda: self._flags.value(self._version)
        self._trained = [slot.tensor for slot in replica.slots]
        self._views = self._share(transport, replica.slots)
        self._own = [tensor.data for tensor in self._trained]
        self._statistics = [slot.tensor for slot in replica.statistics]
        self._shared_statistics = self._share(transport, replica.statistics)
        self._read_statistics = [tensor.data.clone() for tensor in self._statistics]
        numel = sum(slot.tensor.numel() for slot in replica.slots)
        states = self._trained
        memory = transport.shared_tensor(Arena.size_of(numel, len(states)), torch.uint8)
        self._arena = Arena(memory, len(states), lambda number: replica.optimizer.state[states[number]])
        if self._me == 0:
            self._arena.reset()
        transport.shared_tensor(1, torch.uint8)  # Nobody goes on before rank 0 has filled in what is here.
        self._locked = False
        self._num_bytes = 2 * sum(view.nbytes for view in self._views)
        self._handles = [
            replica.optimizer.register_step_pre_hook(reject_closure),
        ]
        replica.listen(self, to="samples")

    def _bury(self, worker: int) -> None:
        self._crowd.free(self._lock, worker)

    def _share(self, transport: "SharedMemoryTransport", slots: list[Slot]) -> list[Tensor]:
        """Places in shared memory for these tensors, with rank 0's values. Collective."""
        views: dict[Slot, Tensor] = {}
        by_dtype: dict[torch.dtype, list[Slot]] = {}
        for slot in slots:
            by_dtype.setdefault(slot.tensor.dtype, []).append(slot)
        for dtype, group in by_dtype.items():
            line = _LINE_BYTES // dtype.itemsize
            sizes = [-(-slot.tensor.numel() // line) * line for slot in group]
            for slot, part in zip(group, transport.shared_tensor(sum(sizes), dtype).split(sizes), strict=True):
                views[slot] = like(part[: slot.tensor.numel()], slot.tensor)
                if self._me == 0:
                    views[slot].copy_(slot.tensor.detach())
        return [views[slot] for slot in slots]

    @property
    def bytes_sent(self) -> int:
        return self._clock * self._num_bytes

    def metrics(self) -> dict[str, Any]:
        return {"staleness": dict(sorted(self._staleness.items())), "version": self._base}

    @property
    def is_leader(self) -> bool:
        return self._crowd.is_leader

    def before_step(self) -> None:
        if isnan(self.replica.take_samples()):
            self._crowd.stop()
            raise NonFiniteLoss(self._me, [self._me], self.replica.steps)
        self._crowd.check(self.replica.steps)
        self._started_s = now = self.transport.now()
        self._stepped = self._flags.advance(self._version)
        staleness = self._stepped - self._base
        self._staleness[staleness] += 1
        self.events.record(Event(READ, now, now, 0, (0, self._clock, self._base)))
        self._scale(self._rule.scale(staleness))
        for tensor, view in zip(self._trained, self._views, strict=True):
            tensor.data = view
        if not self._arena.settled:
            self._crowd.acquire(self._lock)
            self._locked = True
            self._arena.before()

    def after_step(self) -> None:
        if not self._locked and not self._arena.complete:
            self._crowd.acquire(self._lock)
            self._locked = True
            self._arena.before()  # What others have placed meanwhile keeps its place.
        if self._locked:
            self._arena.after()
            self._crowd.release(self._lock)
            self._locked = False
        self._add_statistics()
        version = self._flags.value(self._version)
        self._read()
        now = self.transport.now()
        self.events.record(Event(APPLY, now, now, 0, (0, self._stepped, self._me, self._clock)))
        self._clock += 1
        self._flags.counters[self._clocks[self._me]] = self._clock
        self._base = version
        self.events.record(Event(EXCHANGE, self._started_s, self._started_s, self._num_bytes))

    def _scale(self, factor: float) -> None:
        grads = [slot.tensor.grad for slot in self.replica.slots if slot.tensor.grad is not None]
        if self._strategy.clip is not None:
            norm = sqrt(sum(float(grad.double().square().sum()) for grad in grads))
            factor *= clip_factor(self._strategy.clip, norm)
        if factor != 1.0:
            torch._foreach_mul_(grads, factor)

    def _read(self) -> None:
        """Compute with a copy of what is there now."""
        with torch.no_grad():
            torch._foreach_copy_(self._own, self._views)
            if self._statistics:
                torch._foreach_copy_(self._statistics, self._shared_statistics)
                torch._foreach_copy_(self._read_statistics, self._statistics)
        for tensor, own in zip(self._trained, self._own, strict=True):
            tensor.data = own

    def _add_statistics(self) -> None:
        """Add to what is shared what this rank's forward passes have changed since it last read."""
        if self._statistics:
            changes = torch._foreach_sub(self._statistics, self._read_statistics)
            torch._foreach_add_(self._shared_statistics, changes)

    def consensus(self) -> None:
        start_s = self.transport.now()
        self._crowd.meet(lambda number: self._read())
        self.events.record(Event(PULL, start_s, self.transport.now()))

    def restore_local(self) -> None:
        return None

    def leave(self) -> None:
        return None  # Nobody waits for anybody but in meetings.

    def join(self) -> None:
        self._read()
        self._base = self._flags.value(self._version)

    def finish(self) -> None:
        self.consensus()
        self._crowd.leave()
        self.close()

    def close(self) -> None:
        """Let the model and its optimiser have memory of their own."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self._handles.clear()
            for tensor, own in zip(self._trained, self._own, strict=True):
                tensor.data = own
            for number in range(len(self._trained)):
                state = self._arena.state_of(number)
                state.update({key: value.clone() for key, value in state.items() if isinstance(value, Tensor)})

    def state_dict(self) -> dict[str, Any]:
        """What the optimiser remembers, by parameter."""
        states: dict[str, Any] = {}

        def copy(number: int) -> None:
            self._arena.before()
            for place, slot in enumerate(self.replica.slots):
                state = self._arena.state_of(place)
                states[slot.name] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}

        self._crowd.meet(copy)
        return {"optimizer": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = [tensor.data.clone() for tensor in self._trained]
        statistics = [tensor.data.clone() for tensor in self._statistics]

        def load() -> None:
            for view, value in zip(self._views, mine, strict=True):
                view.copy_(value)
            for view, value in zip(self._shared_statistics, statistics, strict=True):
                view.copy_(value)
            for place, slot in enumerate(self.replica.slots):
                own = self._arena.state_of(place)
                own.clear()
                own.update(state["optimizer"].get(slot.name, {}))
            self._arena.reset()

        def then(number: int) -> None:
            self._crowd.first_does(number, load)
            self._read()

        self._crowd.meet(then)
