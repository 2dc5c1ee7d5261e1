"""What parameter servers cost: pushes and pulls, bucket by bucket, and whose network card they wait for."""

from collections.abc import Sequence
from typing import NamedTuple

from tutti.cluster import Link
from tutti.codecs import Codec
from tutti.plan.coding import coding_seconds, message_bytes
from tutti.plan.loads import Load, exposed, loads_of
from tutti.plan.place import Place
from tutti.plan.profile.record import Profile
from tutti.plan.toll import Toll
from tutti.strategies import ParameterServer


class _Trip(NamedTuple):
    """A bucket's: to the servers, and back as parameters."""

    load: Load
    push_s: float
    """Of one worker, on its own card."""
    pull_s: float
    coding_s: float


def parameter_server(strategy: ParameterServer, profile: Profile, place: Place) -> Toll:
    """Every bucket to its servers, and parameters back.

    Of servers on every rank each has a part of all buckets: a card sends (N-1)/N of the model as pushes, and as much as
    replies. One of k servers of their own takes in N/k of the model, and gives out as much, at the same time. Under
    `SSP` a worker goes on meanwhile, and pulls once in several steps; else it waits for what it has pushed.
    """
    codec = strategy.codec
    loads = loads_of(profile, strategy.bucket_bytes, strategy.exact_below if codec is not None else 0)
    workers, whole = place.num_ranks - strategy.num_dedicated_servers, sum(load.num_bytes for load in loads)
    pushed = sum(message_bytes(load, codec) for load in loads)
    pulled = whole / _steps_a_pull(strategy, workers)
    link = place.among(strategy.num_dedicated_servers) if strategy.num_dedicated_servers else place.crowded
    trips = [_trip(load, codec, pulled / whole, link) for load in loads]
    waits_s = (_with_dedicated if strategy.num_dedicated_servers else _colocated)(strategy, profile, trips, workers)
    waits_s += 0.0 if strategy.consistency.bound else 2 * place.crowded.latency_s
    coding_s = sum(trip.coding_s for trip in trips)
    sent = pushed if strategy.num_dedicated_servers else (workers - 1) / workers * (pushed + pulled)
    memory_bytes = 2 * whole + (0 if strategy.num_dedicated_servers else 2 * whole / workers)
    away = 1.0 if strategy.num_dedicated_servers else (workers - 1) / workers
    wire_s = away * sum(trip.push_s + trip.pull_s for trip in trips)
    return Toll(waits_s, sent, memory_bytes, coding_s, num_buckets=len(trips), wire_s=wire_s)


def _trip(load: Load, codec: Codec | None, pulls: float, link: Link) -> _Trip:
    per_byte = link.seconds_per_byte
    coding_s = 0.0 if codec is None else coding_seconds(codec.speed, load.numel, 1, 1)
    return _Trip(load, message_bytes(load, codec) * per_byte, pulls * load.num_bytes * per_byte, coding_s)


def _steps_a_pull(strategy: ParameterServer, workers: int) -> float:
    """How many steps a worker takes with what it has pulled.

    Under `SSP(s)` it asks one step before it has to, and gets what all had pushed before it; where it is the last of
    the N, its own push too.
    """
    rule = strategy.consistency
    return 1.0 if rule.bound is None or rule.eager else max(1.0, rule.bound - 1 + 1 / workers)


def _colocated(strategy: ParameterServer, profile: Profile, trips: Sequence[_Trip], workers: int) -> float:
    away = (workers - 1) / workers
    wires = [away * (trip.push_s + trip.pull_s) for trip in trips]
    if strategy.consistency.bound:
        return _beside(sum(wires), profile, trips)
    seconds = [wire_s + trip.coding_s for wire_s, trip in zip(wires, trips, strict=True)]
    if not strategy.overlap:
        return sum(seconds)
    return exposed([trip.load for trip in trips], seconds, 0.0, profile.backward_s)


def _with_dedicated(strategy: ParameterServer, profile: Profile, trips: Sequence[_Trip], workers: int) -> float:
    """In and out of a server are two stages: workers served early begin their next step while others still wait."""
    crowd = max(1.0, workers / strategy.num_dedicated_servers)
    busy_s = crowd * max(sum(trip.push_s for trip in trips), sum(trip.pull_s for trip in trips))
    if strategy.consistency.bound:
        return _beside(busy_s, profile, trips)
    if strategy.consistency.bound is None:
        alone = [trip.push_s + trip.pull_s + trip.coding_s for trip in trips]
        own_s = exposed([trip.load for trip in trips], alone, 0.0, profile.backward_s)
        return max(own_s, _beside(busy_s, profile, trips))
    arrived_s = begun_s = free_s = 0.0
    for trip in trips:
        ready_s = trip.load.ready_s if strategy.overlap else profile.backward_s
        arrived_s = max(arrived_s, ready_s + trip.coding_s) + crowd * trip.push_s
        begun_s = max(arrived_s, free_s)
        free_s = begun_s + crowd * trip.pull_s
    return max(0.0, begun_s + (trips[-1].pull_s if trips else 0.0) - profile.backward_s)


def _beside(wire_s: float, profile: Profile, trips: Sequence[_Trip]) -> float:
    """What is left of `wire_s` after a step's computing and coding, and the coding itself."""
    coding_s = sum(trip.coding_s for trip in trips)
    return coding_s + max(0.0, wire_s - coding_s - profile.forward_s - profile.backward_s - profile.step_s)
