"""The link between ranks, measured in a moment: for a job that trains, and would rather go on."""

import statistics

import torch

from tutti.cluster import Link
from tutti.collectives import ALGORITHMS
from tutti.transports import Transport

_SMALLEST, _LARGEST = 2**10, 2**24
"""Bytes of messages that show the rate."""

_LONG_ENOUGH_S = 0.05
"""Of a message that shows the rate."""

_MOST_TIMES = 32
"""As large as the last is the next, at most."""

_BUDGET_S = 0.25
"""Of all collectives that show the latency, if one of each can be had for it."""

_MOST_ROUNDS = 8

_TYPICAL = ("ring", "tree", "butterfly", "recursive_doubling")
"""What a message's latency is taken from."""


def quick_link(transport: Transport) -> tuple[float, float]:
    """Bits a second and latency, the same on every rank. Collective; of two ranks or more.

    With latencies of a few milliseconds it takes half a second at most. With long ones it takes three or four messages
    and as many recursive doublings, and two more: some 16 latencies of 4 ranks, and 28 of 16.
    """
    rate, waited_s = _rate(transport)
    return rate, _latency(transport, rate, waited_s)


def _rate(transport: Transport) -> tuple[float, float]:
    """Bits a second of the slowest link of a ring while all are in use; and how long ranks waited for a short message.

    Messages grow until one takes long enough.
    """
    num_bytes = _SMALLEST
    while True:
        seen = _everyones(_shift(num_bytes, transport), transport)
        waited_s, taken_s = (max(times) for times in zip(*seen, strict=True))
        if taken_s >= _LONG_ENOUGH_S or num_bytes >= _LARGEST:
            return 8 * num_bytes / max(1e-9, taken_s), waited_s
        times_larger = 1.5 * _LONG_ENOUGH_S / max(1e-9, taken_s)
        num_bytes = min(_LARGEST, int(num_bytes * min(times_larger, _MOST_TIMES)))


def _shift(num_bytes: int, transport: Transport) -> tuple[float, float]:
    """Seconds until a short message has come from the left, and from then until a long one has that was sent with it.

    Both have the same latency, and whoever began late did so for both: what lies between them is the long one's bytes.
    """
    left, right = (transport.rank - 1) % transport.size, (transport.rank + 1) % transport.size
    sizes = (1, num_bytes)
    moments = [transport.now()]
    coming = [transport.irecv(torch.empty(size, dtype=torch.uint8, device="cpu"), left) for size in sizes]
    going = [transport.isend(torch.zeros(size, dtype=torch.uint8, device="cpu"), right) for size in sizes]
    for work in coming:
        work.wait()
        moments.append(transport.now())
    for work in going:
        work.wait()
    start_s, short_s, long_s = moments
    return short_s - start_s, long_s - short_s


def _latency(transport: Transport, rate: float, message_s: float) -> float:
    """The median over algorithms; of one only, where a message takes so long that all are not to be had.

    In collectives ranks wait for each other, and may share cores: that is why no single message is asked.
    """
    size = transport.size
    messages = {name: ALGORITHMS[name].cost(size, 0, Link("1gbit", 1.0)) for name in _TYPICAL}
    rounds = int(_BUDGET_S / max(1e-9, message_s * sum(messages.values())))
    # Where sizes are no powers of two, ranks double without waiting for all that the formula counts.
    one = "butterfly" if size & (size - 1) else "recursive_doubling"
    latencies = []
    for name in _TYPICAL if rounds > 1 else (one,):
        times = _sums(name, transport, max(1, min(_MOST_ROUNDS, rounds)))
        taken_s = max(_everyones((statistics.median(times),), transport))[0]
        sending_s = ALGORITHMS[name].cost(size, 4 * size, Link(rate))
        # In a burst, bytes cost nothing.
        latencies.append((taken_s - sending_s if taken_s > sending_s else taken_s) / messages[name])
    return statistics.median(latencies)


def _sums(name: str, transport: Transport, rounds: int) -> list[float]:
    """Seconds of each of several sums of few numbers."""
    tensor, times = torch.zeros(transport.size, device="cpu"), []
    for _ in range(rounds):
        start_s = transport.now()
        transport.start(ALGORITHMS[name].steps(tensor, transport)).wait()
        times.append(transport.now() - start_s)
    return times


def _everyones(values: tuple[float, ...], transport: Transport) -> list[list[float]]:
    """Each rank's values, by rank, on every rank: a sum, which takes fewer messages in a row than to ask and answer."""
    table = torch.zeros(transport.size, len(values), dtype=torch.float64, device="cpu")
    table[transport.rank] = torch.tensor(values, dtype=torch.float64, device="cpu")
    transport.start(ALGORITHMS["recursive_doubling"].steps(table, transport)).wait()
    return [[float(value) for value in row] for row in table]
