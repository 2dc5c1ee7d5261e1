"""`quick_link`: measure the link between ranks in half a second, while a job trains."""

import statistics

import torch

from tutti.cluster import Link
from tutti.collectives import ALGORITHMS
from tutti.transports import Transport

_SMALLEST, _LARGEST = 2**10, 2**24
"""Smallest and largest message by which the rate is measured, in bytes."""

_LONG_ENOUGH_S = 0.05
"""Seconds that a message must take for the rate to be read from it."""

_MOST_TIMES = 32
"""Factor by which a message may be larger than the one before."""

_BUDGET_S = 0.25
"""Seconds for all collectives by which the latency is measured, if one of each fits."""

_MOST_ROUNDS = 8
"""Repetitions of each collective, at most."""

_TYPICAL = ("ring", "tree", "butterfly", "recursive_doubling")
"""Collectives from which the latency of a message is derived."""


def quick_link(transport: Transport) -> tuple[float, float]:
    """Return bits per second and latency in seconds, the same on every rank. Collective; needs two ranks or more.

    With latencies of a few milliseconds it takes half a second at most. With long ones it takes three or four messages,
    as many recursive doublings, and two more: about 16 latencies for 4 ranks, and 28 for 16.
    """
    rate, waited_s = _rate(transport)
    return rate, _latency(transport, rate, waited_s)


def _rate(transport: Transport) -> tuple[float, float]:
    """Return the rate of a ring's slowest link while all are in use, and the longest wait for a short message.

    Messages grow until one takes long enough.
    """
    num_bytes = _SMALLEST
    while True:
        # The slowest rank's times, on all ranks: each must take the same decision to go on.
        times_by_rank = _gathered(_shift(num_bytes, transport), transport)
        waited_s, taken_s = (max(times) for times in zip(*times_by_rank, strict=True))
        if taken_s >= _LONG_ENOUGH_S or num_bytes >= _LARGEST:
            return 8 * num_bytes / max(1e-9, taken_s), waited_s
        # Half more than needed, so that the next message is most probably the last one. The factor is limited because a
        # short message may pass in a burst, at a higher rate than the link can keep up.
        times_larger = 1.5 * _LONG_ENOUGH_S / max(1e-9, taken_s)
        num_bytes = min(_LARGEST, int(num_bytes * min(times_larger, _MOST_TIMES)))


def _shift(num_bytes: int, transport: Transport) -> tuple[float, float]:
    """Return the seconds until a short message from the left arrives, and from then until a long one does.

    Both are sent together: they have the same latency, and a sender that began late was late for both. So the time
    between their arrivals is that of the long message's bytes.
    """
    left, right = (transport.rank - 1) % transport.size, (transport.rank + 1) % transport.size
    sizes = (1, num_bytes)
    moments_s = [transport.now()]
    # All receives are posted before the first send, so that no message waits for its buffer.
    receives = [transport.irecv(torch.empty(size, dtype=torch.uint8, device="cpu"), left) for size in sizes]
    sends = [transport.isend(torch.zeros(size, dtype=torch.uint8, device="cpu"), right) for size in sizes]
    for work in receives:
        work.wait()
        moments_s.append(transport.now())
    for work in sends:  # After the last moment was taken: waiting for sends belongs to neither time.
        work.wait()
    start_s, short_s, long_s = moments_s
    return short_s - start_s, long_s - short_s


def _latency(transport: Transport, rate: float, message_s: float) -> float:
    """Return the median latency over collectives; of one collective only, where messages take too long for all.

    Single messages would show too little: in collectives ranks wait for each other, and may share cores.
    """
    size = transport.size
    # Without bytes and with a latency of one second, the formula counts the messages of the critical path.
    num_messages = {name: ALGORITHMS[name].cost(size, 0, Link("1gbit", 1.0)) for name in _TYPICAL}
    rounds = int(_BUDGET_S / max(1e-9, message_s * sum(num_messages.values())))
    # For sizes that are no powers of two, recursive doubling waits for fewer messages than its formula counts.
    shortest = "butterfly" if size & (size - 1) else "recursive_doubling"
    latencies = []
    for name in _TYPICAL if rounds > 1 else (shortest,):
        times = _sums(name, transport, max(1, min(_MOST_ROUNDS, rounds)))
        taken_s = max(_gathered((statistics.median(times),), transport))[0]
        sending_s = ALGORITHMS[name].cost(size, 4 * size, Link(rate))
        # Small messages may pass in a burst, for which their bytes cost nothing.
        waiting_s = taken_s - sending_s if taken_s > sending_s else taken_s
        latencies.append(waiting_s / num_messages[name])
    return statistics.median(latencies)


def _sums(name: str, transport: Transport, rounds: int) -> list[float]:
    """Return the seconds of each of `rounds` all-reduces of a few numbers."""
    tensor, times = torch.zeros(transport.size, device="cpu"), []  # One number in each rank's block.
    for _ in range(rounds):
        start_s = transport.now()
        transport.start(ALGORITHMS[name].steps(tensor, transport)).wait()
        times.append(transport.now() - start_s)
    return times


def _gathered(values: tuple[float, ...], transport: Transport) -> list[list[float]]:
    """Gather each rank's values on every rank, by one sum: that takes fewer messages in a row than a gather."""
    # Each rank fills one row of zeros, so the sum of all tables has every row. Float64 keeps the clock's precision.
    table = torch.zeros(transport.size, len(values), dtype=torch.float64, device="cpu")
    table[transport.rank] = torch.tensor(values, dtype=torch.float64, device="cpu")
    transport.start(ALGORITHMS["recursive_doubling"].steps(table, transport)).wait()
    return [[float(value) for value in row] for row in table]
