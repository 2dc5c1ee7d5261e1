"""The cost of parameter servers: pushes of gradients and pulls of parameters, bucket by bucket."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tutti.cluster import Link
from tutti.codecs import Codec
from tutti.cost import (
    BucketLoad,
    CommunicationCost,
    Placement,
    Profile,
    bucket_loads,
    coding_seconds,
    exposed_seconds,
    message_bytes,
)

if TYPE_CHECKING:
    from tutti.strategies.parameter_server.strategy import ParameterServer


class _RoundTrip(NamedTuple):
    """The round trip of one bucket: gradients to the servers, parameters back."""

    load: BucketLoad
    push_s: float
    """Seconds in which one worker's network card sends the gradients."""
    pull_s: float
    """Seconds in which it receives the parameters."""
    coding_s: float
    copy_s: float
    """Seconds in which one server's network card sends means to copies, beyond what it would send anyway."""


def communication_cost(strategy: "ParameterServer", profile: Profile, placement: Placement) -> CommunicationCost:
    """Return the cost per step of pushing every bucket to its servers and pulling parameters back.

    Colocated servers hold a part of every bucket each: a network card sends (N-1)/N of the model as pushes, and as much
    as replies. Each of k dedicated servers receives N/k of the model, and sends as much, at the same time. Under `SSP`
    a worker continues meanwhile and pulls once in several steps; otherwise it waits for the result of its push.

    With copies, a server sends the mean of every version to another one. With colocated servers that takes the place of
    what the worker there would have pulled.
    """
    codec = strategy.codec
    loads = bucket_loads(profile, strategy.bucket_bytes, strategy.exact_below if codec is not None else 0)
    num_servers = strategy.num_dedicated_servers
    workers, model_bytes = placement.num_ranks - num_servers, sum(load.num_bytes for load in loads)
    pushed = sum(message_bytes(load, codec) for load in loads)
    pulled = model_bytes / _steps_per_pull(strategy, workers)
    link = placement.link_with_senders(num_servers) if num_servers else placement.shared_link
    to_copies = _means_to_copies(strategy, workers, pulled / model_bytes)
    trips = [_round_trip(load, codec, pulled / model_bytes, link, to_copies) for load in loads]
    exposed_s = (_dedicated_s if num_servers else _colocated_s)(strategy, profile, trips, workers)
    # A push and its reply are on the critical path, unless a staleness bound lets the worker go on meanwhile.
    num_messages = 2 if strategy.copies != 2 else 3  # The mean goes to the copy before its values are replied.
    exposed_s += 0.0 if strategy.consistency.bound else num_messages * placement.shared_link.latency_s
    coding_s = sum(trip.coding_s for trip in trips)
    remote_share = 1.0 if num_servers else (workers - 1) / workers  # A colocated server is local for one part in N.
    # Values and sums of its N-th part of the model, twice with copies.
    served_bytes = 0 if num_servers else 2 * model_bytes * (strategy.copies or 1) / workers
    return CommunicationCost(
        exposed_s=exposed_s,
        num_bytes=pushed if num_servers else remote_share * (pushed + pulled) + to_copies * model_bytes,
        # Push buffers and pulled values; a colocated server adds its part of the model.
        memory_bytes=2 * model_bytes + served_bytes,
        coding_s=coding_s,
        num_buckets=len(trips),
        wire_s=remote_share * sum(trip.push_s + trip.pull_s for trip in trips) + sum(trip.copy_s for trip in trips),
    )


def _round_trip(
    load: BucketLoad, codec: Codec | None, pulls_per_step: float, link: Link, to_copies: float
) -> _RoundTrip:
    """Return the seconds of one bucket's push and pull.

    `pulls_per_step` is 1, or less where pulls are rarer; `to_copies` is the part of it that a server sends to copies.
    """
    value_s = load.num_bytes * link.seconds_per_byte
    coding_s = 0.0 if codec is None else coding_seconds(codec.speed, load.numel, 1, 1)
    push_s = message_bytes(load, codec) * link.seconds_per_byte
    return _RoundTrip(load, push_s, pulls_per_step * value_s, coding_s, to_copies * value_s)


def _means_to_copies(strategy: "ParameterServer", workers: int, pulls_per_step: float) -> float:
    """Return how much of the model's bytes a server sends to copies in a step, beyond what it would send anyway."""
    if strategy.copies != 2:
        return 0.0
    rule = strategy.consistency
    versions_per_step = 1.0 if rule.bound is not None else max(1.0, workers / rule.quorum)
    if strategy.num_dedicated_servers:
        return versions_per_step / strategy.num_dedicated_servers
    return (versions_per_step - pulls_per_step) / workers


def _steps_per_pull(strategy: "ParameterServer", workers: int) -> float:
    """Return how many steps a worker takes between two pulls.

    Under `SSP(s)` it asks one step before it must, and receives what all workers had pushed by then; the last of the N
    workers also receives its own push.
    """
    rule = strategy.consistency
    return 1.0 if rule.bound is None or rule.eager else max(1.0, rule.bound - 1 + 1 / workers)


def _colocated_s(strategy: "ParameterServer", profile: Profile, trips: Sequence[_RoundTrip], workers: int) -> float:
    """Return the exposed seconds with a server on every rank."""
    remote_share = (workers - 1) / workers
    wires = [remote_share * (trip.push_s + trip.pull_s) + trip.copy_s for trip in trips]
    if strategy.consistency.bound:
        return _exposed_behind_step(sum(wires), profile, trips)
    seconds = [wire_s + trip.coding_s for wire_s, trip in zip(wires, trips, strict=True)]
    if not strategy.overlap:
        return sum(seconds)
    return exposed_seconds([trip.load for trip in trips], seconds, 0.0, profile.backward_s)


def _dedicated_s(strategy: "ParameterServer", profile: Profile, trips: Sequence[_RoundTrip], workers: int) -> float:
    """Return the exposed seconds with dedicated servers.

    Receiving and sending are two stages of a server: workers that are served early begin their next step while others
    still wait.
    """
    # A worker's messages are cut over all servers, so a server carries this many times one worker's load.
    workers_per_server = max(1.0, workers / strategy.num_dedicated_servers)
    busy_s = workers_per_server * max(sum(trip.push_s for trip in trips), sum(trip.pull_s for trip in trips))
    busy_s += sum(trip.copy_s for trip in trips)  # Received and sent, as pushes and pulls are.
    if strategy.consistency.bound:
        return _exposed_behind_step(busy_s, profile, trips)
    if strategy.consistency.bound is None:
        # Counting: a worker waits for the reply to its own push, but not for other workers, unless the server is busy.
        single_worker = [trip.push_s + trip.pull_s + trip.coding_s for trip in trips]
        unshared_s = exposed_seconds([trip.load for trip in trips], single_worker, 0.0, profile.backward_s)
        return max(unshared_s, _exposed_behind_step(busy_s, profile, trips))
    # BSP: a pipeline of two stages. A bucket's reply begins when all pushes of it are in and the last reply is out.
    arrived_s = begun_s = free_s = 0.0
    for trip in trips:
        ready_s = trip.load.ready_s if strategy.overlap else profile.backward_s
        arrived_s = max(arrived_s, ready_s + trip.coding_s) + workers_per_server * trip.push_s
        begun_s = max(arrived_s, free_s)
        free_s = begun_s + trip.copy_s + workers_per_server * trip.pull_s
    # The first worker that is served continues after its own part of the last reply.
    return max(0.0, begun_s + (trips[-1].pull_s if trips else 0.0) - profile.backward_s)


def _exposed_behind_step(wire_s: float, profile: Profile, trips: Sequence[_RoundTrip]) -> float:
    """Return the coding time, and the part of `wire_s` that a step's computing and coding do not hide."""
    coding_s = sum(trip.coding_s for trip in trips)
    return coding_s + max(0.0, wire_s - coding_s - profile.seconds)
