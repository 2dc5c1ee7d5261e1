"""What strategies cost that exchange something every so many steps: averaging, block momentum, DiLoCo."""

from math import ceil, inf

from tutti.plan.loads import loads_of
from tutti.plan.place import Place
from tutti.plan.profile.record import Profile
from tutti.plan.sums import compressed_sum, exact_sum
from tutti.plan.toll import Toll
from tutti.strategies.averaging.cadence import block_seconds
from tutti.strategies.averaging.strategy import Blocks

_ROLL_BYTES = 48
"""What each rank tells every other before an exchange."""

_MOST_STEPS = 10_000


def blocks(strategy: Blocks, profile: Profile, place: Place) -> Toll:
    """All buckets at the end of a block, one after another; behind the next block, with overlap."""
    codec = strategy.codec
    loads = loads_of(profile, strategy.bucket_bytes, strategy.exact_below if codec is not None else 0)
    sums = [
        exact_sum("native", load.num_bytes, place) if codec is None else compressed_sum(load, codec, place)
        for load in loads
    ]
    if strategy.optimizer_state == "average":  # Of each parameter one number is remembered, as a rule.
        sums += [exact_sum("native", load.num_bytes, place) for load in loads]
    coding_s = sum(each.coding_s for each in sums)
    exchange_s = _roll_s(place) + sum(each.wire_s for each in sums) + coding_s
    exchange_s += max((each.latency_s for each in sums), default=0.0)
    computing_s = profile.forward_s + profile.backward_s + profile.step_s
    length = _length(strategy, exchange_s, computing_s)
    left_s = max(0.0, exchange_s - length * computing_s) if strategy.overlap else exchange_s
    memory_bytes = _kept(strategy, place) * sum(load.num_bytes for load in loads)
    return Toll(
        exposed_s=left_s / length,
        num_bytes=sum(each.num_bytes for each in sums) / length,
        memory_bytes=memory_bytes,
        coding_s=coding_s / length,
        num_exchanges=1 / length,
        num_buckets=len(sums) / length,
        wire_s=sum(each.wire_s for each in sums) / length,
    )


def _roll_s(place: Place) -> float:
    return place.link.latency_s + (place.num_ranks - 1) * _ROLL_BYTES * place.link.seconds_per_byte


def _length(strategy: Blocks, exchange_s: float, computing_s: float) -> float:
    """Steps in a block."""
    if isinstance(strategy.every, int):
        return strategy.every
    if strategy.every == "end":
        return inf
    worth = 1.0 if strategy.overlap else (1 - strategy.share) / strategy.share
    spent_s = worth * exchange_s if strategy.every == "auto" else block_seconds(strategy.every)
    return max(1, min(_MOST_STEPS, ceil(spent_s / computing_s) if computing_s else _MOST_STEPS))


def _kept(strategy: Blocks, place: Place) -> int:
    """How many times the model's size it keeps: where the block began, the bucket, and what else it remembers."""
    return 2 + bool(strategy.outer(place.num_ranks).momentum) + strategy.overlap + (strategy.codec is not None)
