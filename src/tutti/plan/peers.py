"""What strategies of equals cost: updates told to everybody, and values mixed with neighbours."""

from math import ceil

from tutti.codecs import CodecSpeed
from tutti.plan.coding import coding_seconds, message_bytes
from tutti.plan.loads import loads_of
from tutti.plan.place import Place
from tutti.plan.profile.record import Profile
from tutti.plan.toll import Toll
from tutti.strategies import Gossip, PeerUpdates
from tutti.strategies.decentralised.graphs import Exponential, Matchings, sized

HEAD_BYTES = 48
"""What is said before every message."""

_BUCKET_BYTES = 4 * 2**20

MIXING = CodecSpeed(0.95e9, 8.3e9)
"""Averaging with neighbours: some six passes over this rank's own values, and one over each neighbour's."""


def peer_updates(strategy: PeerUpdates, profile: Profile, place: Place) -> Toll:
    """Every update to everybody else, while computing goes on: as fast as the card of a host can send them."""
    codec, others = strategy.codec, place.num_ranks - 1
    loads = loads_of(profile, _BUCKET_BYTES, strategy.exact_below if codec is not None else 0)
    whole = sum(load.num_bytes for load in loads)
    message = sum(message_bytes(load, codec) for load in loads)
    numel = sum(load.numel for load in loads)
    coding_s = 0.0 if codec is None else coding_seconds(codec.speed, numel, 1, place.num_ranks)
    sent = others * (message + HEAD_BYTES)
    busy_s = _computing_s(profile) + coding_s
    wire_s = sent * place.crowded.seconds_per_byte
    exposed_s = coding_s + max(0.0, wire_s - busy_s)
    memory_bytes = 2 * whole + others * message + (0 if codec is None else whole)
    return Toll(exposed_s, sent, memory_bytes, coding_s, num_buckets=len(loads), wire_s=wire_s)


def gossip(strategy: Gossip, profile: Profile, place: Place) -> Toll:
    """All values to each neighbour, while the next gradient is computed."""
    loads = loads_of(profile, _BUCKET_BYTES)
    whole = sum(load.num_bytes for load in loads)
    link, computing_s = place.crowded, _computing_s(profile)
    if strategy.pairs == "async":  # There and back, with one request under way at most, and nobody waits.
        steps = max(1, ceil(2 * link.seconds(whole) / computing_s) if computing_s else 1)
        mixing_s = coding_seconds(MIXING, whole / 4, 1, 1) / steps
        sent, wire_s = 2 * whole / steps, 2 * link.seconds(whole) / steps
        return Toll(mixing_s, sent, 5 * whole, mixing_s, 1 / steps, len(loads) / steps, wire_s)
    neighbours = _neighbours(strategy, place.num_ranks)
    sent = neighbours * (whole + HEAD_BYTES)
    arrive_s = sent * link.seconds_per_byte + link.latency_s
    mixing_s = coding_seconds(MIXING, whole / 4, 1, neighbours)
    exposed_s = mixing_s + max(0.0, arrive_s - computing_s)
    return Toll(exposed_s, sent, (3 + neighbours) * whole, mixing_s, num_buckets=len(loads), wire_s=arrive_s)


def _neighbours(strategy: Gossip, num_ranks: int) -> int:
    """To how many a rank sends in a step: the most of any."""
    topology = sized(strategy.graph, num_ranks)
    if isinstance(topology, Exponential | Matchings):
        return 1
    return max(len(topology.neighbours(rank)) for rank in range(num_ranks))


def _computing_s(profile: Profile) -> float:
    return profile.forward_s + profile.backward_s + profile.step_s
