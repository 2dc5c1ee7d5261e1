"""What all-reduce of gradients costs: buckets leave while backward still runs."""

from collections.abc import Sequence

from tutti.collectives import recursive_doubling
from tutti.plan.loads import Load, exposed, loads_of
from tutti.plan.place import Place
from tutti.plan.profile.record import Profile
from tutti.plan.sums import Sum, compressed_sum, exact_sum
from tutti.plan.toll import Toll
from tutti.strategies import AllReduce

_WEIGHT_BYTES = 8
"""Of each rank, told before the first bucket of a step."""


def all_reduce(strategy: AllReduce, profile: Profile, place: Place) -> Toll:
    """Buckets leave when they are full, one after another, and some arrive after backward."""
    codec = strategy.codec
    loads = loads_of(profile, strategy.bucket_bytes, strategy.exact_below if codec is not None else 0)
    sums = [
        exact_sum(strategy.algorithm, load.num_bytes, place) if codec is None else compressed_sum(load, codec, place)
        for load in loads
    ]
    kept = 0 if codec is None else sum(4 * load.numel for load in loads)
    return _in_turn(loads, sums, profile, place)._replace(memory_bytes=kept)


def _in_turn(loads: Sequence[Load], sums: Sequence[Sum], profile: Profile, place: Place) -> Toll:
    seconds = [each.wire_s + each.coding_s for each in sums]
    if sums:  # The latencies of those before it pass while others are sent.
        seconds[-1] += sums[-1].latency_s
    exposed_s = exposed(loads, seconds, weights_known(profile, place), profile.backward_s)
    coding_s = sum(each.coding_s for each in sums)
    num_bytes, wire_s = sum(each.num_bytes for each in sums), sum(each.wire_s for each in sums)
    return Toll(exposed_s, num_bytes, 0.0, coding_s, num_buckets=len(sums), wire_s=wire_s)


def weights_known(profile: Profile, place: Place) -> float:
    """When ranks have told each other how much they count, after the start of backward."""
    first_s = profile.gradients[0].ready_s if profile.gradients else 0.0
    return first_s + recursive_doubling.cost(place.num_ranks, _WEIGHT_BYTES * place.num_ranks, place.link)
