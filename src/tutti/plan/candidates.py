"""What there is to choose from."""

from collections.abc import Iterator

from tutti.codecs import Cast, Codec, ErrorFeedback, LowRank, OneBit, Quantize, TopK
from tutti.plan.profile.record import Profile
from tutti.strategies import (
    BSP,
    SSP,
    AllReduce,
    Async,
    Averaging,
    BlockMomentum,
    DiLoCo,
    Gossip,
    ParameterServer,
    PeerUpdates,
    Poseidon,
    Strategy,
)
from tutti.strategies.allreduce import Algorithm

ALGORITHMS: tuple[Algorithm, ...] = ("native", "ring", "butterfly", "tree", "recursive_doubling")
"""Not "hierarchical", which "native" is where it can be, nor "cheapest", which chooses among them as this does."""

LARGE_BUCKET_BYTES = 64 * 2**20
"""Beside the default: fewer buckets wait for fewer latencies."""

CODECS: tuple[Codec, ...] = tuple(
    ErrorFeedback(codec)
    for codec in (Cast("bf16"), Cast("fp8"), Quantize(4), OneBit(), TopK(0.01), TopK(0.001), LowRank())
)

_ONE_BIT = ErrorFeedback(OneBit())
_STEPS, _MANY_STEPS = 16, 100


def exact(profile: Profile) -> Iterator[Strategy]:
    """Strategies under which workers do what one would."""
    small = sum(gradient.num_bytes for gradient in profile.gradients) <= AllReduce.bucket_bytes
    for bucket_bytes in (AllReduce.bucket_bytes,) if small else (AllReduce.bucket_bytes, LARGE_BUCKET_BYTES):
        yield from (AllReduce(algorithm, bucket_bytes) for algorithm in ALGORITHMS)
    yield Poseidon()
    yield ParameterServer(BSP())
    yield ParameterServer(BSP(), servers=1)


def lossy() -> Iterator[Strategy]:
    """Strategies under which they do something near: with less said, less often, or to fewer."""
    yield from (AllReduce(codec=codec) for codec in CODECS)
    for rule in (SSP(3), Async()):
        yield from (ParameterServer(rule, codec=codec) for codec in (None, _ONE_BIT))
    for overlap in (False, True):
        yield Averaging(_STEPS, overlap=overlap)
        for codec in (None, _ONE_BIT):
            yield BlockMomentum(_STEPS, overlap=overlap, codec=codec)
            yield DiLoCo(_MANY_STEPS, overlap=overlap, codec=codec)
    yield Gossip()
    yield Gossip("ring")
    yield Gossip(pairs="async")
    yield PeerUpdates()
    yield PeerUpdates(None)
