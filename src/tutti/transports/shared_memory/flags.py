"""Counters in memory that processes share: written by one rank, awaited by the others.

A wait spins for a moment, because a peer on another core answers in under a microsecond; then it
lets others run, because where ranks outnumber cores the peer needs this very core to answer; then
it sleeps in the kernel.
The sleep is an event count: a waiter announces itself, reads the event number, looks once more and
sleeps only while that number stands; a writer advances the number after every write. Each order of
these four steps either shows the waiter the new value or wakes it.
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

_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _element(context: BaseContext, builder: ir.IRBuilder, array_type: types.Array, args: tuple) -> ir.Value:
    array = context.make_array(array_type)(context, builder, args[0])
    return builder.gep(array.data, [args[1]])


@intrinsic
def _load(typing_context, array, index):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.load_atomic(_element(context, builder, signature.args[0], args), "acquire", 8)

    return array.dtype(array, types.intp), generate


@intrinsic
def _store(typing_context, array, index, value):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        builder.store_atomic(args[2], _element(context, builder, signature.args[0], args), "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), generate


@intrinsic
def _add(typing_context, array, index, value):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("add", _element(context, builder, signature.args[0], args), args[2], "seq_cst")

    return array.dtype(array, types.intp, array.dtype), generate


@intrinsic
def _swap(typing_context, array, index, old, new):  # type: ignore[no-untyped-def]
    """Put `new` where `old` is: whether it was."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        place = _element(context, builder, signature.args[0], args)
        found = builder.cmpxchg(place, args[2], args[3], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(array, types.intp, array.dtype, array.dtype), generate


_NUM_YIELDS = 100
"""How often to let others run before sleeping: with more ranks than cores, this is cheaper than being woken."""

# Slots 0 and 8 of the counters are the event number and the number of sleepers, a cache line each.
_EVENT, _SLEEPERS = 0, 8


@njit(types.boolean(COUNTERS, types.int64, types.int64), nogil=True, cache=True)
def _publish(counters, slot, value):  # type: ignore[no-untyped-def]
    _store(counters, slot, value)
    _add(counters, _EVENT, 1)
    return _add(counters, _SLEEPERS, 0) > 0


@njit(types.boolean(COUNTERS, types.int64, types.int64, types.int64), nogil=True, cache=True)
def _exchanged(counters, slot, old, new):  # type: ignore[no-untyped-def]
    return _swap(counters, slot, old, new)


@njit(types.boolean(COUNTERS, COUNTERS, types.int64, types.int64), nogil=True, cache=True)
def _reached(counters, slots, value, num_spins):  # type: ignore[no-untyped-def]
    """Whether every slot has come to `value`, looking at each at most `num_spins` times."""
    for slot in slots:
        spins = num_spins
        while _load(counters, slot) < value:
            spins -= 1
            if spins <= 0:
                return False
    return True


@njit(types.int64(COUNTERS, types.int64, COUNTERS, COUNTERS, COUNTERS), nogil=True, cache=True)
def _next_version(counters, version_slot, clocks, firsts, counted):  # type: ignore[no-untyped-def]
    version = _load(counters, version_slot)
    lowest = np.int64(-1)
    for rank in range(len(clocks)):
        clock = _load(counters, clocks[rank])
        if clock <= version:
            if _load(counters, counted[rank]) == 1:
                return np.int64(-1)
        else:
            first = max(_load(counters, firsts[rank]), version)
            if lowest < 0 or first < lowest:
                lowest = first
    return lowest


@njit(types.void(COUNTERS, types.int64, types.int64, types.int64, types.int64, types.float64), nogil=True, cache=True)
def _announce(counters, entry, first, second, third, weight):  # type: ignore[no-untyped-def]
    counters[entry] = first
    counters[entry + 1] = second
    counters[entry + 2] = third
    counters[entry + 3 : entry + 4].view(np.float64)[0] = weight


@njit(types.float64(COUNTERS, COUNTERS, types.Array(types.float64, 1, "C")), nogil=True, cache=True)
def _weigh(counters, entries, weights):  # type: ignore[no-untyped-def]
    total, equal = 0.0, True
    for rank in range(len(entries)):
        entry = entries[rank]
        for field in range(3):
            if counters[entry + field] != counters[entries[0] + field]:
                return np.nan
        weights[rank] = counters[entry + 3 : entry + 4].view(np.float64)[0]
        total += weights[rank]
        equal = equal and weights[rank] == weights[0]
    if np.isnan(total) or not equal:
        return total
    weights[:] = 1.0
    return float(len(entries))


@njit(types.int64(COUNTERS, types.int64, types.int64), nogil=True, cache=True)
def _advance(counters, slot, value):  # type: ignore[no-untyped-def]
    return _add(counters, slot, value) + value


class Flags:
    """The counters of one conversation, in memory that all its ranks have mapped."""

    def __init__(self, counters: np.ndarray, num_spins: int) -> None:
        self.counters = counters
        self.num_spins = num_spins

    def publish(self, slot: int, value: int) -> None:
        """Let everyone see `value`, and everything written before it."""
        if _publish(self.counters, slot, value):
            self._futex(_FUTEX_WAKE, 2**31 - 1, None)

    def announce(self, entry: int, what: tuple[int, int, int], weight: float) -> None:
        """Write down what this rank publishes next: three numbers that must be equal on all ranks, and a weight."""
        _announce(self.counters, entry, *what, weight)

    def weigh(self, entries: np.ndarray, weights: np.ndarray) -> float:
        """Read every rank's entry: fill `weights`, return their sum, or NaN if entries differ or a weight is NaN.

        Equal weights come out as ones, so that the mean they make is the plain one.
        """
        return _weigh(self.counters, entries, weights)

    def reached(self, slots: np.ndarray, value: int) -> bool:
        """Whether all `slots` hold at least `value`."""
        return _reached(self.counters, slots, value, 1)

    def wait(self, slots: np.ndarray, value: int, seconds: float) -> bool:
        """Return True once all `slots` hold at least `value`, False after about `seconds`."""
        if _reached(self.counters, slots, value, self.num_spins):
            return True
        return self._until(lambda: _reached(self.counters, slots, value, 1), seconds)

    def _until(self, true: Callable[[], bool], seconds: float) -> bool:
        """Let others run, then sleep, until `true` is; False after about `seconds`."""
        for _ in range(_NUM_YIELDS):
            os.sched_yield()
            if true():
                return True
        deadline = time.monotonic() + seconds
        _advance(self.counters, _SLEEPERS, 1)
        try:
            while True:
                event = _advance(self.counters, _EVENT, 0)
                if true():
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._futex(_FUTEX_WAIT, ctypes.c_int32(event & 0xFFFFFFFF).value, left)
        finally:
            _advance(self.counters, _SLEEPERS, -1)

    def value(self, slot: int) -> int:
        """What a slot holds, and everything that was written before it."""
        return _advance(self.counters, slot, 0)

    def advance(self, slot: int) -> int:
        """Add one to what a slot holds; what it held before. Wakes nobody."""
        return _advance(self.counters, slot, 1) - 1

    def swap(self, slot: int, old: int, new: int) -> bool:
        """Put `new` into a slot that holds `old`; whether it did. Wakes nobody."""
        return _exchanged(self.counters, slot, old, new)

    def next_version(self, version: int, clocks: np.ndarray, firsts: np.ndarray, counted: np.ndarray) -> int:
        """The lowest number, from that in slot `version` on, that some rank has passed; -1 while any counts on more.

        A rank has passed the numbers from its first on and below its clock. One whose `counted` is 1 and whose clock
        has not passed the version is waited for.
        """
        return int(_next_version(self.counters, version, clocks, firsts, counted))

    def lock(self, slot: int, owner: int, seconds: float) -> bool:
        """Put `owner` into a slot that holds 0, when it does; False after about `seconds`."""
        if _exchanged(self.counters, slot, 0, owner):
            return True
        return self._until(lambda: _exchanged(self.counters, slot, 0, owner), seconds)

    def _futex(self, call: int, value: int, seconds: float | None) -> None:
        if _FUTEX_CALL is None:  # Another processor: correct all the same, only with coarser naps.
            if call == _FUTEX_WAIT:
                time.sleep(0.0002)
            return
        pause = None
        if seconds is not None:
            pause = ctypes.byref(_Timespec(int(seconds), int(seconds % 1 * 1e9)))
        _libc.syscall(_FUTEX_CALL, self.counters.ctypes.data, call, value, pause)


def spins_for(num_ranks: int) -> int:
    """How often to look before sleeping: some 200 µs where every rank has a core, not at all elsewhere."""
    return 400_000 if num_ranks <= len(os.sched_getaffinity(0)) else 1
