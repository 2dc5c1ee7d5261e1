"""The cost of all-reduce: buckets are summed one after another while backward still runs."""

from typing import TYPE_CHECKING

from tutti.collectives import recursive_doubling
from tutti.cost import (
    CommunicationCost,
    Placement,
    Profile,
    all_reduce_cost,
    bucket_loads,
    compressed_sum_cost,
    exposed_seconds,
)

if TYPE_CHECKING:
    from tutti.strategies.allreduce import AllReduce

_WEIGHT_BYTES = 8
"""Bytes of each rank's weight, which ranks exchange before the first bucket of a step."""


def communication_cost(strategy: "AllReduce", profile: Profile, placement: Placement) -> CommunicationCost:
    """Return the cost of a step: a bucket is sent when it is full, and some arrive only after backward."""
    codec = strategy.codec
    loads = bucket_loads(profile, strategy.bucket_bytes, strategy.exact_below if codec is not None else 0)
    if codec is None:
        sums = [all_reduce_cost(strategy.algorithm, load.num_bytes, placement) for load in loads]
    else:
        sums = [compressed_sum_cost(load, codec, placement) for load in loads]
    seconds = [cost.wire_s + cost.coding_s for cost in sums]
    if sums:  # The latencies of earlier buckets pass while later ones are sent; only the last one's is waited for.
        seconds[-1] += sums[-1].latency_s
    return CommunicationCost(
        exposed_s=exposed_seconds(loads, seconds, weights_exchanged_s(profile, placement), profile.backward_s),
        num_bytes=sum(cost.num_bytes for cost in sums),
        memory_bytes=0 if codec is None else sum(4 * load.numel for load in loads),  # Error feedback's residual.
        coding_s=sum(cost.coding_s for cost in sums),
        num_buckets=len(sums),
        wire_s=sum(cost.wire_s for cost in sums),
    )


def weights_exchanged_s(profile: Profile, placement: Placement) -> float:
    """Return the seconds after the start of backward at which every rank knows the weights of all ranks."""
    first_s = profile.gradients[0].ready_s if profile.gradients else 0.0
    return first_s + recursive_doubling.cost(placement.num_ranks, _WEIGHT_BYTES * placement.num_ranks, placement.link)
