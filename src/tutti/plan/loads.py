"""What travels: a profile's gradients, cut into buckets as a replica would cut them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch

from tutti.codecs.base import TensorLayout
from tutti.codecs.scale_groups import ScaleGroups
from tutti.plan.profile.record import Gradient, LayerProfile, Profile
from tutti.replica.buckets import Bucket, Kind, Memory, Slot, cut, kind_of
from tutti.transports import SingleRankTransport

_DTYPES = {2: torch.float16, 8: torch.float64}
"""By bytes of an element: dtypes of one size travel alike. Anything else is float32."""


@dataclass(frozen=True, eq=False)
class Load:
    """A bucket: how large it is, and when it is full."""

    ready_s: float
    """After the start of backward."""
    num_bytes: int
    numel: int
    """Elements that may be said in a lossy way."""
    exact_bytes: int
    """Of the rest: small gradients, and marks."""
    layout: TensorLayout
    """Where in the lossy part each gradient begins, and its shape."""
    groups: ScaleGroups


@lru_cache(maxsize=64)
def loads_of(profile: Profile, bucket_bytes: int, exact_below: int = 0) -> tuple[Load, ...]:
    """The buckets of a step, in the order in which they are full."""
    slots = [Slot(gradient.name, stand_in(gradient)) for gradient in profile.gradients]
    kinds: dict[Kind, list[Slot]] = {}
    for slot in slots:
        kinds.setdefault(kind_of(slot.tensor), []).append(slot)
    alone = SingleRankTransport()
    memories = {kind: Memory(alike, alone, True, exact_below) for kind, alike in kinds.items()}
    ready = {gradient.name: gradient.ready_s for gradient in profile.gradients}
    return tuple(_load(bucket, ready) for bucket in cut((slots, []), memories, bucket_bytes))


def exposed(loads: Sequence[Load], seconds: Sequence[float], begin_s: float, backward_s: float) -> float:
    """How long after backward the last bucket has arrived, if they travel one after another for `seconds` each.

    `begin_s` is when the first may leave, after the start of backward.
    """
    end_s = begin_s
    for load, takes_s in zip(loads, seconds, strict=True):
        end_s = max(end_s, load.ready_s) + takes_s
    return max(0.0, end_s - backward_s)


def slowed(profile: Profile, factor: float) -> Profile:
    """The same step of a worker that takes so many times as long."""
    overhead = profile.overhead.slowed(factor)
    return _stretched(replace(profile, step_s=profile.step_s * factor, overhead=overhead), factor)


def with_batch(profile: Profile, num_samples: int) -> Profile:
    """The same step with another batch: each sample takes as long to compute, and the optimiser what it took."""
    factor = num_samples / profile.num_samples
    activations = sum(layer.activation_bytes for layer in profile.layers)
    peak_bytes = max(0, profile.peak_bytes + round(activations * (factor - 1)))
    layers = tuple(_with_more(layer, factor) for layer in profile.layers)
    return _stretched(replace(profile, num_samples=num_samples, peak_bytes=peak_bytes, layers=layers), factor)


def _with_more(layer: LayerProfile, factor: float) -> LayerProfile:
    """So many times as many samples go through a layer."""
    rows = None if layer.rows is None else max(1, round(layer.rows * factor))
    activation_bytes = round(layer.activation_bytes * factor)
    return replace(layer, rows=rows, work=layer.work * factor, activation_bytes=activation_bytes)


def _stretched(profile: Profile, factor: float) -> Profile:
    """Forward and backward take so many times as long."""
    gradients = tuple(replace(each, ready_s=each.ready_s * factor) for each in profile.gradients)
    layers = tuple(
        replace(
            layer,
            forward_s=layer.forward_s * factor,
            backward_s=layer.backward_s * factor,
            ready_s=None if layer.ready_s is None else layer.ready_s * factor,
        )
        for layer in profile.layers
    )
    forward_s, backward_s = profile.forward_s * factor, profile.backward_s * factor
    return replace(profile, layers=layers, gradients=gradients, forward_s=forward_s, backward_s=backward_s)


def stand_in(gradient: Gradient) -> torch.Tensor:
    """A tensor as large, without values."""
    itemsize = gradient.num_bytes // max(1, prod(gradient.shape))
    return torch.empty(gradient.shape, dtype=_DTYPES.get(itemsize, torch.float32), device="meta")


def _load(bucket: Bucket, ready: dict[str, float]) -> Load:
    numel = bucket.values.numel()
    layout = tuple(
        (start, tuple(slot.tensor.shape))
        for start, slot in zip(bucket.starts, bucket.slots, strict=True)
        if start < numel
    )
    return Load(
        ready_s=max(ready[slot.name] for slot in bucket.slots),
        num_bytes=bucket.flat.nbytes,
        numel=numel,
        exact_bytes=bucket.exact.nbytes,
        layout=layout,
        groups=ScaleGroups.from_layout(layout, numel),
    )
