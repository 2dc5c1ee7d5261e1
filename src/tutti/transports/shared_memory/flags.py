"""Counters in memory that processes share: written by one rank, awaited by others.

How it works
------------
Counters are 64-bit integers that only grow, except where they are used as locks. A write is a release store and a read
an acquire load. So a rank that sees a counter also sees everything the writer wrote before it.

A wait has three phases:

1. It spins, because a peer on another core answers in under a microsecond. Only where every rank has a core.
2. It yields the processor, because with more ranks than cores the peer needs this very core to answer.
3. It sleeps in the kernel (futex), until a writer wakes it or the time is over.

The sleep is an event count. Slot 0 is the event number, slot 8 the number of sleepers, a cache line each. A waiter
(a) adds itself to the sleepers, (b) reads the event number, (c) looks at the counters once more, and (d) sleeps only
while the event number is the one it read. A writer (1) stores the counter, (2) advances the event number, and (3)
reads the number of sleepers and wakes them if there are any. The read-modify-write operations are sequentially
consistent. If the waiter's (c) misses the new value, the writer's (2) comes after (b): then either (d) sees another
event number and does not sleep, or the writer's (3) sees the sleeper and wakes it. No wake-up is lost.

A writer that dies wakes no waiter. So every wait has a time limit, after which the caller checks whether the peers
live.

Where the futex call is unknown (neither x86-64 nor ARM64), sleeping is a short nap: correct, but with more delay.
"""

import ctypes
import os
import platform
import time
from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.base import BaseContext
from numba.extending import intrinsic

COUNTERS = types.Array(types.int64, 1, "C")
"""The numba type of a page of counters, and of a list of slots in it."""

# Its number in the kernel's table of system calls: the C library has no function for it.
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
# Without FUTEX_PRIVATE_FLAG: the sleepers are in other processes.
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]


class _Timespec(ctypes.Structure):
    """The C structure `timespec`: a timeout of the futex call."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _element(context: BaseContext, builder: ir.IRBuilder, array_type: types.Array, args: tuple) -> ir.Value:
    """The address of element `args[1]` of the array `args[0]`, in LLVM."""
    array = context.make_array(array_type)(context, builder, args[0])
    return builder.gep(array.data, [args[1]])


# Numba has no atomic operations on CPU arrays: these four are written in LLVM.


@intrinsic
def _load(typing_context, array, index):  # type: ignore[no-untyped-def]
    """Read an element, and see everything that was written before it was stored (acquire)."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.load_atomic(_element(context, builder, signature.args[0], args), "acquire", 8)

    return array.dtype(array, types.intp), generate


@intrinsic
def _store(typing_context, array, index, value):  # type: ignore[no-untyped-def]
    """Write an element after everything that was written before (release)."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        builder.store_atomic(args[2], _element(context, builder, signature.args[0], args), "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), generate


@intrinsic
def _add(typing_context, array, index, value):  # type: ignore[no-untyped-def]
    """Add to an element; return what it held before (sequentially consistent)."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("add", _element(context, builder, signature.args[0], args), args[2], "seq_cst")

    return array.dtype(array, types.intp, array.dtype), generate


@intrinsic
def _compare_and_swap(typing_context, array, index, old, new):  # type: ignore[no-untyped-def]
    """Put `new` into an element that holds `old`; return whether it did (sequentially consistent)."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        address = _element(context, builder, signature.args[0], args)
        result = builder.cmpxchg(address, args[2], args[3], "seq_cst", "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(array, types.intp, array.dtype, array.dtype), generate


_NUM_YIELDS = 100
"""Yields of the processor before sleeping: with more ranks than cores, this is cheaper than being woken."""

# The slots of the event count, on a cache line each.
_EVENT, _SLEEPERS = 0, 8


@njit(types.boolean(COUNTERS, types.int64, types.int64), nogil=True, cache=True)
def _publish(counters, slot, value):  # type: ignore[no-untyped-def]
    """Store a value and advance the event number; return whether there are sleepers to wake."""
    _store(counters, slot, value)
    _add(counters, _EVENT, 1)
    return _add(counters, _SLEEPERS, 0) > 0  # An addition, not a load: it may not be reordered before the others.


@njit(types.boolean(COUNTERS, types.int64, types.int64, types.int64), nogil=True, cache=True)
def _try_swap(counters, slot, old, new):  # type: ignore[no-untyped-def]
    return _compare_and_swap(counters, slot, old, new)


@njit(types.boolean(COUNTERS, COUNTERS, types.int64, types.int64), nogil=True, cache=True)
def _reached(counters, slots, value, num_spins):  # type: ignore[no-untyped-def]
    """Whether every slot holds at least `value`, looking at each at most `num_spins` times."""
    # One slot after the other: counters only grow, so one that has reached the value needs no second look.
    for slot in slots:
        spins = num_spins
        while _load(counters, slot) < value:
            spins -= 1
            if spins <= 0:
                return False
    return True


@njit(types.int64(COUNTERS, types.int64, COUNTERS, COUNTERS, COUNTERS), nogil=True, cache=True)
def _next_version(counters, version_slot, clocks, firsts, counted):  # type: ignore[no-untyped-def]
    """See `Flags.next_version`."""
    version = _load(counters, version_slot)
    lowest = np.int64(-1)
    for rank in range(len(clocks)):
        clock = _load(counters, clocks[rank])
        # This rank has not sent the version. If it is counted, all wait; otherwise the version is made without it.
        if clock <= version:
            if _load(counters, counted[rank]) == 1:
                return np.int64(-1)
        else:
            # A rank that joined late has sent nothing below its first version.
            first = max(_load(counters, firsts[rank]), version)
            if lowest < 0 or first < lowest:
                lowest = first
    return lowest


@njit(types.void(COUNTERS, types.int64, types.int64, types.int64, types.int64, types.float64), nogil=True, cache=True)
def _write_entry(counters, entry, first, second, third, weight):  # type: ignore[no-untyped-def]
    """Write an entry with plain stores: the counter that is published after it releases them."""
    counters[entry] = first
    counters[entry + 1] = second
    counters[entry + 2] = third
    counters[entry + 3 : entry + 4].view(np.float64)[0] = weight


@njit(types.float64(COUNTERS, COUNTERS, types.Array(types.float64, 1, "C")), nogil=True, cache=True)
def _read_weights(counters, entries, weights):  # type: ignore[no-untyped-def]
    """See `Flags.read_weights`."""
    total, equal = 0.0, True
    for rank in range(len(entries)):
        entry = entries[rank]
        for field in range(3):
            # Plain loads: the caller has seen the counter that each rank published after its entry.
            if counters[entry + field] != counters[entries[0] + field]:
                return np.nan
        weights[rank] = counters[entry + 3 : entry + 4].view(np.float64)[0]
        total += weights[rank]
        equal = equal and weights[rank] == weights[0]
    # NaN goes to the caller, who refuses it. Only equal weights may become ones.
    if np.isnan(total) or not equal:
        return total
    weights[:] = 1.0
    return float(len(entries))


@njit(types.int64(COUNTERS, types.int64, types.int64), nogil=True, cache=True)
def _advance(counters, slot, value):  # type: ignore[no-untyped-def]
    """Add to a slot; return what it holds then."""
    return _add(counters, slot, value) + value


class Flags:
    """Counters in memory that all ranks have mapped. Slots 0 to 15 are reserved."""

    def __init__(self, counters: np.ndarray, num_spins: int) -> None:
        """Use `counters`, zeros at first; a wait looks at each slot `num_spins` times before it yields."""
        self.counters = counters
        self.num_spins = num_spins

    def publish(self, slot: int, value: int) -> None:
        """Store `value`, release everything written before it, and wake the sleepers."""
        if _publish(self.counters, slot, value):
            # Wakes all: one futex serves all counters, and each sleeper looks whether its own was meant.
            self._futex(_FUTEX_WAKE, 2**31 - 1, None)

    def write_entry(self, entry: int, numbers: tuple[int, int, int], weight: float) -> None:
        """Describe what this rank publishes next: three numbers that must be equal on all ranks, and a weight.

        `entry` is the first of four slots. Peers may read them once they have seen a counter published after them.
        """
        _write_entry(self.counters, entry, *numbers, weight)

    def read_weights(self, entries: np.ndarray, weights: np.ndarray) -> float:
        """Read every rank's entry: fill `weights` and return their sum; NaN if entries differ or a weight is NaN.

        Equal weights are returned as ones, so that the mean is the sum divided by the number of ranks, bit for bit.
        """
        return _read_weights(self.counters, entries, weights)

    def reached(self, slots: np.ndarray, value: int) -> bool:
        """Whether all `slots` hold at least `value`."""
        return _reached(self.counters, slots, value, 1)

    def wait(self, slots: np.ndarray, value: int, seconds: float) -> bool:
        """Return True once all `slots` hold at least `value`, False after about `seconds`."""
        # Numba releases the GIL here, so other threads of this process run while it spins.
        if _reached(self.counters, slots, value, self.num_spins):
            return True
        return self._sleep_until(lambda: _reached(self.counters, slots, value, 1), seconds)

    def _sleep_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Yield the processor, then sleep, until `condition()` is true; False after about `seconds`."""
        for _ in range(_NUM_YIELDS):
            os.sched_yield()
            if condition():
                return True
        deadline = time.monotonic() + seconds
        _advance(self.counters, _SLEEPERS, 1)
        try:
            while True:
                # The order matters: a write after this line changes the number, and the futex call returns at once.
                event = _advance(self.counters, _EVENT, 0)
                if condition():
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                # A futex has 32 bits: the kernel compares the low half of the event number, which lies first.
                self._futex(_FUTEX_WAIT, ctypes.c_int32(event & 0xFFFFFFFF).value, left)
        finally:
            _advance(self.counters, _SLEEPERS, -1)

    def value(self, slot: int) -> int:
        """Read a slot, and see everything that was written before it."""
        # An addition of 0: a plain read through numpy would have no ordering.
        return _advance(self.counters, slot, 0)

    def advance(self, slot: int) -> int:
        """Add one to a slot; return what it held before. Wakes no sleepers."""
        return _advance(self.counters, slot, 1) - 1

    def swap(self, slot: int, old: int, new: int) -> bool:
        """Put `new` into a slot that holds `old`; return whether it did. Wakes no sleepers."""
        return _try_swap(self.counters, slot, old, new)

    def next_version(self, version: int, clocks: np.ndarray, firsts: np.ndarray, counted: np.ndarray) -> int:
        """The next version that a server can apply; -1 if it has to wait for a rank, or no rank has sent any.

        Args:
            version: the slot of the next version to apply.
            clocks: the slot of each rank's clock. A rank has sent the versions from its first up to below its clock.
            firsts: the slot of the first version that each rank takes part in.
            counted: the slot that is 1 for each rank that every version has to wait for.

        The result is the lowest version, not below the one in the slot, that some rank has sent.
        """
        return int(_next_version(self.counters, version, clocks, firsts, counted))

    def lock(self, slot: int, owner: int, seconds: float) -> bool:
        """Wait until a slot holds 0 and put `owner` into it; False after about `seconds`."""
        if _try_swap(self.counters, slot, 0, owner):
            return True
        return self._sleep_until(lambda: _try_swap(self.counters, slot, 0, owner), seconds)

    def _futex(self, call: int, value: int, seconds: float | None) -> None:
        """Sleep while the low half of the event number is `value`, or wake up to `value` sleepers."""
        if _FUTEX_CALL is None:  # Another processor: naps instead.
            if call == _FUTEX_WAIT:
                time.sleep(0.0002)
            return
        pause = None
        if seconds is not None:
            pause = ctypes.byref(_Timespec(int(seconds), int(seconds % 1 * 1e9)))
        # Its result does not matter: the caller checks its condition again. ctypes releases the GIL meanwhile.
        _libc.syscall(_FUTEX_CALL, self.counters.ctypes.data, call, value, pause)


def spins_for(num_ranks: int) -> int:
    """How often a wait looks before it yields: for about 200 µs if every rank has a core, otherwise once."""
    return 400_000 if num_ranks <= len(os.sched_getaffinity(0)) else 1
