"""Parameter servers on one host: the parameters are in memory that all ranks share, and nobody has to serve.

Whoever completes a version makes it: a rank that has pushed, or that waits, looks for pieces that are due, takes the
lock of one and steps it. So no rank waits for another to serve, and what one leaves behind when it is killed is there
for the others. Under `Async(locks=True)` there is nothing to complete: each rank steps with its own gradients. Without
locks that is another matter (`hogwild`).
"""

from collections.abc import Callable, Iterable
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tutti.events import APPLY, PULL, READ, Event
from tutti.replica import Bucket, Replica
from tutti.replica.buckets import Slot
from tutti.strategies.parameter_server.ledger import Update
from tutti.strategies.parameter_server.optimizer_options import OptimizerOptions
from tutti.strategies.parameter_server.shard_optimizer import (
    ShardOptimizer,
    clip_factor,
    merge_segment_states,
    needs_whole_parameters,
    update_scales,
)
from tutti.strategies.parameter_server.shards import ParameterShard, cut_into_shards
from tutti.strategies.parameter_server.shared_memory.optimizer_state import Arena
from tutti.strategies.parameter_server.shared_memory.worker_registry import Gathering, Slots
from tutti.strategies.parameter_server.worker import ParameterServerWorker, gradient_flags
from tutti.transports.shared_memory.reduction import KERNELS

if TYPE_CHECKING:
    from tutti.strategies.parameter_server.strategy import ParameterServer
    from tutti.transports.shared_memory.transport import SharedMemoryTransport

_WORTH_SHARING_BYTES = 256 * 2**10
"""Smaller pieces are stepped sooner than a second rank would come."""


class _Piece:
    """How to step a piece."""

    def __init__(self, stepper: ShardOptimizer, arena: Arena | None) -> None:
        self.stepper = stepper
        self.arena = arena


class InMemoryWorker(ParameterServerWorker):
    """One worker among those of a host."""

    tolerates_loss = True

    def __init__(self, replica: Replica, transport: "SharedMemoryTransport", strategy: "ParameterServer") -> None:
        super().__init__(replica, transport, strategy)
        self._host = transport
        self._size = transport.size
        self._alone = (
            self._consistency.bound is None and self._consistency.quorum == 1
        )  # Every update is a step of its own.
        self._together = self._clips_means or (self._consistency.bound is None and not self._alone)
        """Whether all pieces are stepped at once: for the norm of the whole, or to be made of the same updates."""
        replica.allocate(transport.inner, strategy.bucket_bytes)
        replica.arrange([slot.name for slot in replica.slots])
        self._cut()
        self._lay_out(transport)
        self._clocks = [0] * len(replica.buckets)
        self._versions = [0] * len(replica.buckets)
        """Of what the model has of each bucket: the oldest of its pieces."""
        self._bases = [[0] * len(pieces) for pieces in self._of_bucket]
        """The same, piece by piece."""
        self._stale: set[int] = set()
        """Buckets of which there is something newer to be had."""
        self._moved_bytes = 0
        self._start_listening()

    def _cut(self) -> None:
        """Cut buckets into pieces: as many as there are ranks to step them, where that is worth it."""
        buckets, whole = self.replica.buckets, needs_whole_parameters(self.replica.optimizer)
        together = self._alone or self._together
        self._pieces: list[ParameterShard] = []
        for bucket in buckets:
            most = 1 if together else max(1, min(self._size, bucket.flat.nbytes // _WORTH_SHARING_BYTES))
            self._pieces += cut_into_shards([bucket], most, whole, False, len(self._pieces))
        self._of_bucket = [[p for p in self._pieces if p.bucket_index == bucket.index] for bucket in buckets]

    def _lay_out(self, transport: "SharedMemoryTransport") -> None:
        """Map all that is shared. Collective."""
        buckets, size, slots = self.replica.buckets, self._size, Slots()
        self._crowd = Gathering(transport, slots)
        self._clock, self._first = slots.take(len(buckets), size), slots.take(len(buckets), size)
        self._counted = slots.take(len(buckets), size)
        self._arrival, self._arrivals = slots.take(size), slots.take(1)
        self._version, self._lock = slots.take(len(self._pieces)), slots.take(len(self._pieces))
        self._stepping = slots.take(len(self._pieces))
        self._taken, self._old = slots.take(len(self._pieces), size), slots.take(len(self._pieces), size)
        self._planned, self._plans = slots.take(1), slots.take(size)
        self._flags = transport.flags(slots.used)
        self._counters = self._flags.counters
        self._crowd.open(self._flags)
        self._crowd.clock_of = lambda worker: int(self._counters[self._clock[0, worker]])
        self._crowd.on_loss = self._bury
        self._crowd.progress = lambda: int(self._counters[self._clock].sum() + self._counters[self._version].sum())
        if self._rank == 0:
            self._counters[self._counted] = 1
        depth = self._depth = (self._consistency.bound or 0) + 1
        num_options = len(OptimizerOptions(self.replica.optimizer))
        self._notes: list[np.ndarray] = []
        self._inboxes: list[list[Tensor]] = []
        self._values: list[Tensor] = []
        """The parameters, by bucket."""
        steppers: dict[int, _Piece] = {}
        for bucket in buckets:
            pieces = self._of_bucket[bucket.index]
            width = 2 + num_options + len(pieces) + len(bucket.slots)
            self._notes.append(
                transport.shared_tensor(size * depth * width, torch.float64).numpy().reshape(size, depth, width)
            )
            numel = 0 if self._alone else depth * bucket.flat.numel()
            inboxes = transport.per_rank_tensors(numel, bucket.flat.dtype)
            self._inboxes.append([inbox.view(depth, -1) for inbox in inboxes] if numel else [])
            values = transport.shared_tensor(bucket.flat.numel(), bucket.flat.dtype)
            if self._rank == 0:
                values.copy_(bucket.image())
            self._values.append(values)
            steppers |= {p.index: self._stepped(p, bucket, values, transport) for p in pieces}
        self._steps = [steppers[piece.index] for piece in self._pieces]
        self._views = [bucket.views(values) for bucket, values in zip(buckets, self._values, strict=True)]
        transport.shared_tensor(1, torch.uint8)  # Nobody goes on before rank 0 has filled in what is here.

    def _stepped(
        self, piece: ParameterShard, bucket: Bucket, values: Tensor, transport: "SharedMemoryTransport"
    ) -> _Piece:
        stepper = ShardOptimizer(piece, bucket, self.replica.optimizer, values[piece.bucket_range])
        stepper.mean_kernel = KERNELS.get(values.dtype)
        if not piece.is_trained:
            return _Piece(stepper, None)
        count = len(piece.segments)
        memory = transport.shared_tensor(Arena.size_of(piece.numel, count), torch.uint8)
        arena = Arena(memory, count, stepper.segment_state)
        if self._rank == 0:
            arena.reset()
        return _Piece(stepper, arena)

    @property
    def bytes_sent(self) -> int:
        return self._moved_bytes

    @property
    def version(self) -> int:
        return min(self._versions)

    @property
    def is_leader(self) -> bool:
        return self._crowd.is_leader

    def _request_stop(self) -> None:
        self._crowd.stop()

    def _wait_for_all(self) -> None:
        self._settle(range(len(self._versions)))

    # Coming and going

    def consensus(self) -> None:
        self._meet()

    def leave(self) -> None:
        self._wait_for_all()
        self._count(False)
        self._help(range(len(self._versions)))

    def join(self) -> None:
        every = range(len(self._versions))
        groups = [[0]] if self._together else [[piece.index for piece in self._of_bucket[b]] for b in every]
        for place, locks in enumerate(groups):
            for number in locks:
                self._acquire(number)
            if self._together:
                self._step_together()
            else:
                for number in locks:
                    self._step_all(number)
            for bucket in every if self._together else [place]:
                self._start_at(bucket, self._flags.value(int(self._version[self._of_bucket[bucket][0].index])))
                self._flags.publish(int(self._counted[bucket, self._rank]), 1)
            for number in locks:
                self._release(number)
        self._stale.update(every)
        self._wait_for_all()

    def finish(self) -> None:
        self.consensus()
        self._count(False)
        self._crowd.leave()
        self.close()

    # Pushing

    def _push(self, bucket: Bucket, norm: float) -> None:
        index, clock = bucket.index, self._clocks[bucket.index]
        now = self.transport.now()
        for piece, base in zip(self._of_bucket[index], self._bases[index], strict=True):
            self.events.record(Event(READ, now, now, 0, (piece.index, clock, base)))
        self._clocks[index] += 1
        self._moved_bytes += bucket.flat.nbytes
        if self._alone:
            self._apply_own(bucket, norm, clock)
            return
        if self._consistency.bound is not None:
            self._staleness[clock - self._versions[index]] += index == 0
        entry = clock % self._depth
        self._inboxes[index][self._rank][entry].copy_(bucket.flat)
        self._notes[index][self._rank, entry] = [
            self._weight, norm, *self._options, *self._bases[index], *gradient_flags(bucket)
        ]  # fmt: skip
        if self._consistency.bound is not None:
            self._flags.publish(int(self._clock[index, self._rank]), self._clocks[index])
            self._help([index])
        elif index + 1 == len(self._clocks):  # An update is there when all of it is.
            self._counters[self._arrival[self._rank]] = self._flags.advance(int(self._arrivals[0]))
            for each, its in reversed(list(enumerate(self._clocks))):
                self._flags.publish(int(self._clock[each, self._rank]), its)
            self._help([index])
        self._stale.add(index)  # To look whether there is something new costs nothing here.

    def _apply_own(self, bucket: Bucket, norm: float, clock: int) -> None:
        """Take a step with this rank's own gradients."""
        self._crowd.check(self.replica.steps)
        marks = np.array(gradient_flags(bucket), dtype=bool)
        for place, piece in enumerate(self._of_bucket[bucket.index]):
            base = self._bases[bucket.index][place]
            own = marks[[share.slot_index for share in piece.segments]]
            update = Update(
                self._rank, base, self._weight, norm, self._options, own, bucket.flat[piece.bucket_range], clock
            )
            self._acquire(piece.index)
            try:
                update.staleness = self._flags.value(int(self._version[piece.index])) - base
                self._make(piece.index, base + update.staleness, [update])
            finally:
                self._release(piece.index)
            if piece.index == 0:
                self._staleness[update.staleness] += 1
        self._flags.publish(int(self._clock[bucket.index, self._rank]), self._clocks[bucket.index])
        self._stale.add(bucket.index)

    # Operation

    def _help(self, buckets: Iterable[int]) -> None:
        """Step whatever is due and nobody else is at."""
        if self._together:
            self._help_together()
            return
        for bucket in buckets:
            for piece in self._of_bucket[bucket]:
                while self._due(piece.index) and self._flags.swap(int(self._lock[piece.index]), 0, self._rank + 1):
                    try:
                        self._step_all(piece.index)
                    finally:
                        self._release(piece.index)

    def _step_all(self, number: int) -> None:
        """Make all versions of a piece, whose lock is held, that are due."""
        while (due := self._due(number)) is not None:
            version, updates = due
            self._make(number, version, [self._update(number, worker, clock, version) for worker, clock in updates])

    def _due(self, number: int) -> tuple[int, list[tuple[int, int]]] | None:
        """The next version of a piece and its updates, as workers and clocks, if it is due."""
        bucket = self._pieces[number].bucket_index
        if self._alone:
            return None  # Everybody takes his own.
        if self._consistency.bound is None:
            return self._counted_due(number, bucket)
        slots = self._clock[bucket], self._first[bucket], self._counted[bucket]
        version = self._flags.next_version(int(self._version[number]), *slots)
        if version < 0:
            return None
        clocks, firsts = self._counters[slots[0]], self._counters[slots[1]]
        return version, [(int(w), version) for w in np.flatnonzero((firsts <= version) & (clocks > version))]

    def _counted_due(self, number: int, bucket: int) -> tuple[int, list[tuple[int, int]]] | None:
        counters = self._counters
        version = self._flags.value(int(self._version[number]))
        taken, arrival = counters[self._taken[number]], counters[self._arrival]
        waiting = sorted(np.flatnonzero(counters[self._clock[bucket]] > taken), key=lambda worker: arrival[worker])
        enough = min(self._consistency.quorum, int(counters[self._counted[bucket]].sum()) or len(waiting))
        if not waiting or len(waiting) < enough:
            return None
        return version, [(worker, int(taken[worker])) for worker in sorted(map(int, waiting[:enough]))]

    def _update(self, number: int, worker: int, clock: int, version: int) -> Update:
        piece = self._pieces[number]
        note = self._notes[piece.bucket_index][worker, clock % self._depth]
        pieces, num_options = self._of_bucket[piece.bucket_index], len(self._options)
        bases = note[2 + num_options :]
        base = int(bases[pieces.index(piece)])
        marks = bases[len(pieces) :][[share.slot_index for share in piece.segments]] != 0
        values = self._inboxes[piece.bucket_index][worker][clock % self._depth][piece.bucket_range]
        options = note[2 : 2 + num_options].copy()
        return Update(worker, base, float(note[0]), float(note[1]), options, marks, values, clock, version - base)

    def _make(self, number: int, version: int, updates: list[Update]) -> None:
        """Step a piece, whose lock is held."""
        self._flags.publish(int(self._stepping[number]), version + 1)
        marks = self._combine(number, version, updates)
        self._take_step(number, version, updates, marks)

    def _combine(self, number: int, version: int, updates: list[Update]) -> np.ndarray:
        now = self.transport.now()
        clip = self._strategy.clip if self._clips_updates else None
        scales = update_scales(updates, self._pieces[number], self._consistency, clip)
        for update in updates:
            self.events.record(Event(APPLY, now, now, 0, (number, version, update.worker, update.clock)))
            self._counters[self._old[number, update.worker]] = update.staleness
        return self._steps[number].stepper.combine(updates, scales)

    def _take_step(
        self, number: int, version: int, updates: list[Update], marks: np.ndarray, factor: float = 1.0
    ) -> None:
        stepped = self._steps[number]
        if stepped.arena is not None:
            stepped.arena.before()
        stepped.stepper.step(marks, updates[0].options, factor)
        if stepped.arena is not None:
            stepped.arena.after()
        self._flags.publish(int(self._version[number]), version + 1)
        for update in updates:
            self._flags.publish(int(self._taken[number, update.worker]), update.clock + 1)

    def _help_together(self) -> None:
        """The same, for all pieces at once. The lock of the first is that of all."""
        while self._all_due() and self._flags.swap(int(self._lock[0]), 0, self._rank + 1):
            try:
                self._step_together()
            finally:
                self._release(0)

    def _step_together(self) -> None:
        """Make all versions that are due, of all pieces, whose lock is held."""
        while due := self._all_due():
            self._plan(due)
            parts, square = [], 0.0
            for number, (version, updates) in due.items():
                made = [self._update(number, worker, clock, version) for worker, clock in updates]
                self._flags.publish(int(self._stepping[number]), version + 1)
                marks = self._combine(number, version, made)
                square += self._steps[number].stepper.square_norm(marks)
                parts.append((number, version, made, marks))
            factor = clip_factor(self._strategy.clip or 0.0, sqrt(square)) if self._clips_means else 1.0
            for number, version, made, marks in parts:
                self._take_step(number, version, made, marks, factor)
            self._flags.publish(int(self._planned[0]), 0)

    def _plan(self, due: dict[int, tuple[int, list[tuple[int, int]]]]) -> None:
        """Write down what is about to be stepped together, for who comes if this rank is killed meanwhile."""
        version, updates = next(iter(due.values()))
        self._counters[self._plans] = 0
        for worker, clock in updates:
            self._counters[self._plans[worker]] = clock + 1
        self._flags.publish(int(self._planned[0]), version + 1)

    def _all_due(self) -> dict[int, tuple[int, list[tuple[int, int]]]]:
        """What makes the next version of all pieces; nothing, if somebody has still to push some of it."""
        if self._consistency.bound is None:
            due = self._due(0)
            return {} if due is None else {piece.index: due for piece in self._pieces}
        found = {}
        for piece in self._pieces:
            due = self._due(piece.index)
            if due is not None:
                found[piece.index] = due
            elif self._awaited(piece.bucket_index, self._flags.value(int(self._version[piece.index]))):
                return {}
        lowest = min((version for version, _ in found.values()), default=0)
        return {number: due for number, due in found.items() if due[0] == lowest}

    def _awaited(self, bucket: int, version: int) -> bool:
        """Whether somebody who counts has still to push for that version."""
        counted = self._counters[self._counted[bucket]] == 1
        return bool((self._counters[self._clock[bucket]][counted] <= version).any())

    # Reading

    def _wait_for_slots(self, slots: Iterable[Slot]) -> None:
        """Wait for what these slots need and let the model have it."""
        self._settle({slot.bucket.index for slot in slots} & self._stale)

    def _settle(self, buckets: Iterable[int]) -> None:
        """Wait until what is there is new enough, and let the model have it."""
        wanted = [bucket for bucket in buckets if bucket in self._stale]
        if not wanted:
            return
        start_s = self.transport.now()
        for bucket in wanted:
            self._crowd.wait(partial(self._left_to_wait_for, bucket), self.replica.steps)
        self._read(wanted)
        self.events.record(Event(PULL, start_s, self.transport.now()))

    def _left_to_wait_for(self, bucket: int) -> tuple[np.ndarray, int] | None:
        """Counters, and what they have to come to, before this rank may read a bucket; None when it may."""
        pieces = [piece.index for piece in self._of_bucket[bucket]]
        clock, counters = self._clocks[bucket], self._counters
        if self._alone:
            return None
        if self._consistency.bound is None:
            slots = self._taken[pieces, self._rank]
            if self._flags.reached(slots, clock):
                return None
            self._help([bucket])
            return (slots, clock) if not self._flags.reached(slots, clock) else None
        needed = clock - self._consistency.bound
        slots = self._version[pieces]
        if self._flags.reached(slots, needed):
            return None
        counted = self._clock[bucket][counters[self._counted[bucket]] == 1]
        if not self._flags.reached(counted, needed):
            return counted, needed  # First that all have pushed; then this rank helps.
        self._help([bucket])
        return None if self._flags.reached(slots, needed) else (slots, needed)

    def _read(self, buckets: Iterable[int]) -> None:
        """Let the model have what is there now.

        Without a lock: somebody may take a further step meanwhile, and what is read may have a part of it.
        """
        with torch.no_grad():
            for index in buckets:
                bucket, pieces = self.replica.buckets[index], self._of_bucket[index]
                self._bases[index] = [self._flags.value(int(self._version[piece.index])) for piece in pieces]
                torch._foreach_copy_([slot.tensor for slot in bucket.slots], self._views[index])
                self._versions[index] = min(self._bases[index])
                self._moved_bytes += bucket.flat.nbytes
                if self._consistency.bound is None and not self._alone and index == 0 and index in self._stale:
                    self._staleness[int(self._counters[self._old[0, self._rank]])] += 1
                self._stale.discard(index)

    def _acquire(self, number: int) -> None:
        self._crowd.acquire(int(self._lock[number]))

    def _release(self, number: int) -> None:
        self._crowd.release(int(self._lock[number]))

    # Meeting

    def _bury(self, worker: int) -> None:
        """Count no more on a worker that is gone, and let go of what it held."""
        for bucket in range(len(self._versions)):
            self._flags.publish(int(self._counted[bucket, worker]), 0)
        for number in range(len(self._pieces)):
            lock = int(self._lock[number])
            if self._flags.swap(lock, worker + 1, self._rank + 1):  # From here on nobody else repairs it.
                self._repair(number)
                self._release(number)
        self._help(range(len(self._versions)))

    def _repair(self, number: int) -> None:
        """A step that one who is lost had begun is done as far as it came: to take it again would take part twice."""
        begun = self._flags.value(int(self._stepping[number]))
        if not self._together:
            if begun > self._flags.value(int(self._version[number])):
                self._flags.publish(int(self._version[number]), begun)
            return
        version = self._flags.value(int(self._planned[0]))
        for piece in self._pieces if version else ():
            if self._flags.value(int(self._version[piece.index])) < version:
                self._flags.publish(int(self._version[piece.index]), version)
            for worker, clock in enumerate(self._counters[self._plans].tolist()):
                if clock > self._flags.value(int(self._taken[piece.index, worker])):
                    self._flags.publish(int(self._taken[piece.index, worker]), clock)
        self._flags.publish(int(self._planned[0]), 0)

    def _meet(self, then: Callable[[int], None] = lambda number: None) -> None:
        """When everybody who is here has come, apply what is left, do `then`, read, and go on together."""
        self._wait_for_all()
        start_s = self.transport.now()
        self._count(False)
        self._help(range(len(self._versions)))
        self._crowd.meet(partial(self._conclude, then))
        self.events.record(Event(PULL, start_s, self.transport.now()))

    def _conclude(self, then: Callable[[int], None], number: int) -> None:
        self._crowd.wait(self._unapplied)
        then(number)
        for bucket in range(len(self._versions)):
            self._start_at(bucket, self._flags.value(int(self._version[self._of_bucket[bucket][0].index])))
        self._read(range(len(self._versions)))
        self._count(True)

    def _unapplied(self) -> tuple[np.ndarray, int] | None:
        """The version of a piece that somebody is still at."""
        self._help(range(len(self._versions)))
        for piece in self._pieces:
            slot = self._version[[piece.index]]
            version, stepping = self._flags.value(int(slot[0])), self._flags.value(int(self._stepping[piece.index]))
            if stepping > version or self._due(piece.index) is not None:
                return slot, version + 1
        return None

    def _count(self, yes: bool) -> None:
        for bucket in range(len(self._versions)):
            self._flags.publish(int(self._counted[bucket, self._rank]), int(yes))

    def _start_at(self, bucket: int, version: int) -> None:
        """Let this rank's next push be for the next version, or the one after what it has pushed already."""
        if self._consistency.bound is not None and version > self._clocks[bucket]:
            self._clocks[bucket] = version
            self._counters[self._first[bucket, self._rank]] = version
            self._flags.publish(int(self._clock[bucket, self._rank]), version)

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """What the optimiser remembers, by parameter."""
        shares: list[Any] = []

        def copy(number: int) -> None:
            for stepped in self._steps:
                if stepped.arena is not None:
                    stepped.arena.before()
                    shares.extend(stepped.stepper.copy_states())

        self._meet(copy)
        slots = {slot.name: slot for slot in self.replica.slots}
        return {"optimizer": merge_segment_states(shares, slots)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        images = [bucket.image() for bucket in self.replica.buckets]
        self._meet(lambda number: self._crowd.first_does(number, partial(self._load, state, images)))

    def _load(self, state: dict[str, Any], images: list[Tensor]) -> None:
        for values, image in zip(self._values, images, strict=True):
            values.copy_(image)
        for stepped in self._steps:
            if stepped.arena is not None:
                stepped.stepper.load_state(state["optimizer"])
                stepped.arena.reset()
