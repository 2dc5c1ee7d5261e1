"""The cost of decentralised strategies: updates sent to all peers, and gossip with neighbours."""

from math import ceil
from typing import TYPE_CHECKING

from tutti.codecs import CodecSpeed
from tutti.cost import CommunicationCost, Placement, Profile, bucket_loads, coding_seconds, message_bytes
from tutti.strategies.decentralised.graphs import Exponential, Matchings, topology_for

if TYPE_CHECKING:
    from tutti.strategies.decentralised.strategies import Gossip, PeerUpdates

_HEADER_BYTES = 48
"""Bytes of the header that is sent before every message."""

_BUCKET_BYTES = 4 * 2**20
"""Bucket size of `PeerExchange`."""

MIXING = CodecSpeed(0.95e9, 8.3e9)
"""Speed of averaging with neighbours: about six passes over this rank's values, and one over each neighbour's."""

MOST_STEPS = 4
"""Steps that a rank takes during one request of asynchronous gossip; then it waits for the reply."""

_CONTENTION = 1.25
"""Time of a request relative to that on an idle link: several ranks ask the same neighbour at times. In simulations
with 4 to 16 ranks it is between 1.2 and 1.5."""


def peer_updates_cost(strategy: "PeerUpdates", profile: Profile, placement: Placement) -> CommunicationCost:
    """Return the cost per step: every update goes to every other rank while computation continues.

    A step cannot be shorter than the time in which the host's network card sends the updates.
    """
    codec, num_peers = strategy.codec, placement.num_ranks - 1
    loads = bucket_loads(profile, _BUCKET_BYTES, strategy.exact_below if codec is not None else 0)
    model_bytes = sum(load.num_bytes for load in loads)
    update_bytes = sum(message_bytes(load, codec) for load in loads)
    numel = sum(load.numel for load in loads)
    # Each rank encodes its own update once, and decodes those of all ranks, its own included.
    coding_s = 0.0 if codec is None else coding_seconds(codec.speed, numel, 1, placement.num_ranks)
    sent_bytes = num_peers * (update_bytes + _HEADER_BYTES)
    # While a rank waits for the last acknowledgement of an inbox, its network card is idle: for half of the messages to
    # the ranks between the first and the last, once in as many steps as the inbox holds.
    wire_s = sent_bytes * placement.shared_link.seconds_per_byte
    idle_s = wire_s / num_peers * (num_peers - 1) / (2 * strategy.inbox)
    return CommunicationCost(
        # Sending overlaps the whole step: only what does not fit into it is exposed.
        exposed_s=coding_s + max(0.0, wire_s + idle_s - profile.seconds - coding_s),
        num_bytes=sent_bytes,
        memory_bytes=2 * model_bytes + num_peers * update_bytes + (0 if codec is None else model_bytes),
        coding_s=coding_s,
        num_buckets=len(loads),
        wire_s=wire_s,
    )


def gossip_cost(strategy: "Gossip", profile: Profile, placement: Placement) -> CommunicationCost:
    """Return the cost per step: all parameters go to each neighbour while the next gradient is computed."""
    loads = bucket_loads(profile, _BUCKET_BYTES)
    model_bytes = sum(load.num_bytes for load in loads)
    link = placement.shared_link
    if strategy.pairs == "async":
        # One request at a time, there and back. It takes as many steps as fit into it, up to a limit; then ranks wait.
        request_s = 2 * link.seconds(model_bytes)
        steps = max(1, min(MOST_STEPS, ceil(request_s / profile.seconds) if profile.seconds else MOST_STEPS))
        waiting_s = max(0.0, _CONTENTION * request_s / MOST_STEPS - profile.seconds)
        # In float32 elements, which `coding_seconds` counts.
        mixing_s = coding_seconds(MIXING, model_bytes / 4, 1, 1) / steps
        return CommunicationCost(
            exposed_s=mixing_s + waiting_s,
            num_bytes=2 * model_bytes / steps,
            # The values, `base`, a step's change, the request, and the reply or a neighbour's request.
            memory_bytes=5 * model_bytes,
            coding_s=mixing_s,
            num_exchanges=1 / steps,
            num_buckets=len(loads) / steps,
            wire_s=request_s / steps,
        )
    num_neighbours = _num_neighbours(strategy, placement.num_ranks)
    sent_bytes = num_neighbours * (model_bytes + _HEADER_BYTES)
    wire_s = sent_bytes * link.seconds_per_byte + link.latency_s
    mixing_s = coding_seconds(MIXING, model_bytes / 4, 1, num_neighbours)
    return CommunicationCost(
        exposed_s=mixing_s + max(0.0, wire_s - profile.seconds),
        num_bytes=sent_bytes,
        memory_bytes=(3 + num_neighbours) * model_bytes,
        coding_s=mixing_s,
        num_buckets=len(loads),
        wire_s=wire_s,
    )


def _num_neighbours(strategy: "Gossip", num_ranks: int) -> int:
    """Return the largest number of ranks that one rank sends to in a step."""
    topology = topology_for(strategy.graph, num_ranks)
    # `neighbours` lists those of all clocks; these two topologies use one of them per step.
    if isinstance(topology, Exponential | Matchings):
        return 1
    return max(len(topology.neighbours(rank)) for rank in range(num_ranks))
