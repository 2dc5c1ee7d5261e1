"""Counters in shared memory: the event count must lose no wake-up."""

import threading
import time

import numpy as np
import pytest

from tutti.transports.shared_memory.flags import Flags, spins_for


def flags(num_spins: int) -> Flags:
    return Flags(np.zeros(64, dtype=np.int64), num_spins)


@pytest.mark.parametrize("num_spins", [1, 10_000])
def test_wait_ends_at_once_when_reached(num_spins: int) -> None:
    it = flags(num_spins)
    it.publish(16, 5)
    assert it.wait(np.array([16]), 5, 0.0)
    assert it.reached(np.array([16]), 4)
    assert not it.reached(np.array([16, 24]), 1)


@pytest.mark.parametrize("num_spins", [1, 10_000])
def test_wait_gives_up_after_its_time(num_spins: int) -> None:
    it = flags(num_spins)
    start = time.monotonic()
    assert not it.wait(np.array([16]), 1, 0.1)
    assert 0.05 < time.monotonic() - start < 5


@pytest.mark.parametrize("num_spins", [1, 10_000])
def test_no_wake_up_is_lost(num_spins: int) -> None:
    """Two threads answer each other thousands of times; one lost wake-up would cost a whole wait."""
    it, rounds, failed = flags(num_spins), 3000, []

    def answer(mine: int, theirs: int) -> None:
        for number in range(1, rounds + 1):
            it.publish(mine, number)
            if not it.wait(np.array([theirs]), number, 20.0):
                failed.append(number)
                return

    start = time.monotonic()
    threads = [threading.Thread(target=answer, args=pair) for pair in ((16, 24), (24, 16))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert time.monotonic() - start < 15


def test_entries_that_differ_have_no_weight() -> None:
    it, entries, weights = flags(1), np.array([16, 24]), np.zeros(2)
    it.write_entry(16, (7, 1, 0), 2.0)
    it.write_entry(24, (7, 1, 0), 6.0)
    assert it.read_weights(entries, weights) == 8.0
    assert weights.tolist() == [2.0, 6.0]
    it.write_entry(24, (7, 1, 0), 2.0)
    assert it.read_weights(entries, weights) == 2.0
    assert weights.tolist() == [1.0, 1.0]
    it.write_entry(24, (7, 1, 5), 2.0)
    assert np.isnan(it.read_weights(entries, weights))


def test_ranks_that_outnumber_cores_do_not_spin() -> None:
    assert spins_for(10_000) == 1
    assert spins_for(1) > 1
