"""The buckets of a step: a profile's gradients, cut into buckets as a replica cuts them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

from tutti.codecs.base import TensorLayout
from tutti.codecs.scale_groups import ScaleGroups
from tutti.cost.profile import Gradient, Profile
from tutti.replica.buckets import Bucket, Kind, Memory, Slot, cut_buckets, kind_of
from tutti.transports import SingleRankTransport

_DTYPES = {2: torch.float16, 8: torch.float64}
"""By bytes of an element: dtypes of one size cost the same. Any other size counts as float32."""


@dataclass(frozen=True, eq=False)
class BucketLoad:
    """One bucket of a step: its size, and when it is full."""

    ready_s: float
    """Seconds after the start of backward at which the bucket is full."""
    num_bytes: int
    """Bytes of the whole bucket."""
    numel: int
    """Number of elements that a codec may compress."""
    exact_bytes: int
    """Bytes that are always sent exactly: small gradients, and a `has_grad` flag per gradient."""
    layout: TensorLayout
    """Start and shape of each gradient within the compressible part."""
    groups: ScaleGroups
    """Elements of the compressible part that share a scale."""


@lru_cache(maxsize=64)
def bucket_loads(profile: Profile, bucket_bytes: int, exact_below: int = 0) -> tuple[BucketLoad, ...]:
    """Return the buckets of a step, in the order in which they are full.

    `exact_below` is the number of elements below which a gradient is never compressed. The result is cached: the
    planner asks for the same buckets for many strategies.
    """
    slots = [Slot(gradient.name, meta_tensor(gradient)) for gradient in profile.gradients]
    kinds: dict[Kind, list[Slot]] = {}
    for slot in slots:
        kinds.setdefault(kind_of(slot.tensor), []).append(slot)
    # A replica's own code cuts them, with sizes only, so that the cost model has exactly the buckets of a run.
    # One that opens nothing: with sizes only, no memory is allocated or mapped.
    transport = SingleRankTransport()
    memories = {kind: Memory(group, transport, True, exact_below) for kind, group in kinds.items()}
    ready = {gradient.name: gradient.ready_s for gradient in profile.gradients}
    return tuple(_load(bucket, ready) for bucket in cut_buckets((slots, []), memories, bucket_bytes))


def exposed_seconds(loads: Sequence[BucketLoad], seconds: Sequence[float], begin_s: float, backward_s: float) -> float:
    """Return how long after backward the last bucket arrives, if they are sent one after another.

    Args:
        seconds: how long each bucket takes.
        begin_s: when the first bucket may be sent, in seconds after the start of backward.
    """
    end_s = begin_s
    for load, bucket_s in zip(loads, seconds, strict=True):
        # A bucket begins when it is full and the one before has arrived.
        end_s = max(end_s, load.ready_s) + bucket_s
    return max(0.0, end_s - backward_s)


def meta_tensor(gradient: Gradient) -> torch.Tensor:
    """Return a tensor of the gradient's shape and element size, without values."""
    # A gradient without elements has no size per element; any dtype will do.
    itemsize = gradient.num_bytes // max(1, prod(gradient.shape))
    return torch.empty(gradient.shape, dtype=_DTYPES.get(itemsize, torch.float32), device="meta")


def _load(bucket: Bucket, ready: dict[str, float]) -> BucketLoad:
    """Return the load of a bucket; `ready` is when each gradient is complete, in seconds, by name."""
    numel = bucket.values.numel()
    layout = tuple(
        (start, tuple(slot.tensor.shape))
        for start, slot in zip(bucket.starts, bucket.slots, strict=True)
        # Slots behind the compressible part are small, and sent exactly.
        if start < numel
    )
    return BucketLoad(
        ready_s=max(ready[slot.name] for slot in bucket.slots),
        num_bytes=bucket.flat.nbytes,
        numel=numel,
        exact_bytes=bucket.exact.nbytes,
        layout=layout,
        groups=ScaleGroups.from_layout(layout, numel),
    )
