"""The cost of averaging, block momentum and DiLoCo: one exchange of all parameters per block of steps."""

from math import ceil, inf
from typing import TYPE_CHECKING

from tutti.cost import CommunicationCost, Placement, Profile, all_reduce_cost, bucket_loads, compressed_sum_cost
from tutti.strategies.averaging.block_schedule import MAX_BLOCK_STEPS, block_seconds

if TYPE_CHECKING:
    from tutti.strategies.averaging.strategy import LocalSteps

# A flag and five fields, in float64.
_STATUS_BYTES = 48
"""Bytes that each rank sends to every other before an exchange (`RankStatus`)."""


def communication_cost(strategy: "LocalSteps", profile: Profile, placement: Placement) -> CommunicationCost:
    """Return the cost per step: all buckets, one after another, once per block.

    With overlap the exchange runs behind the computation of the next block.
    """
    codec = strategy.codec
    loads = bucket_loads(profile, strategy.bucket_bytes, strategy.exact_below if codec is not None else 0)
    exact_sums = [all_reduce_cost("native", load.num_bytes, placement) for load in loads]
    sums = exact_sums if codec is None else [compressed_sum_cost(load, codec, placement) for load in loads]
    if strategy.optimizer_state == "average":  # Most optimisers keep one number for each parameter.
        sums = sums + exact_sums
    coding_s = sum(cost.coding_s for cost in sums)
    exchange_s = _status_s(placement) + sum(cost.wire_s for cost in sums) + coding_s
    # Once, not per bucket: buckets are interleaved, so while one waits, another uses the link.
    exchange_s += max((cost.latency_s for cost in sums), default=0.0)
    num_steps = _steps_per_block(strategy, exchange_s, profile.seconds)
    # Hidden as far as the next block is long; without overlap ranks only wait.
    exposed_s = max(0.0, exchange_s - num_steps * profile.seconds) if strategy.overlap else exchange_s
    return CommunicationCost(
        exposed_s=exposed_s / num_steps,
        num_bytes=sum(cost.num_bytes for cost in sums) / num_steps,
        memory_bytes=_num_copies(strategy, placement) * sum(load.num_bytes for load in loads),
        coding_s=coding_s / num_steps,
        num_exchanges=1 / num_steps,
        num_buckets=len(sums) / num_steps,
        wire_s=sum(cost.wire_s for cost in sums) / num_steps,
    )


def _status_s(placement: Placement) -> float:
    """Return the seconds in which ranks exchange their status at the end of a block."""
    return placement.link.latency_s + (placement.num_ranks - 1) * _STATUS_BYTES * placement.link.seconds_per_byte


def _steps_per_block(strategy: "LocalSteps", exchange_s: float, computing_s: float) -> float:
    """Return the number of steps from one exchange to the next; infinite if there is only one, at the end."""
    if isinstance(strategy.every, int):
        return strategy.every
    if strategy.every == "end":
        return inf
    # "auto" makes blocks so long that communication stays below its share; with overlap, that it is hidden.
    times = 1.0 if strategy.overlap else (1 - strategy.share) / strategy.share
    block_s = times * exchange_s if strategy.every == "auto" else block_seconds(strategy.every)
    return max(1, min(MAX_BLOCK_STEPS, ceil(block_s / computing_s) if computing_s else MAX_BLOCK_STEPS))


def _num_copies(strategy: "LocalSteps", placement: Placement) -> int:
    """Return how many copies of the model a worker keeps: the block's start, buckets, momentum, overlap, residual."""
    return 2 + bool(strategy.outer(placement.num_ranks).momentum) + strategy.overlap + (strategy.codec is not None)
