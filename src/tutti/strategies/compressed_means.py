"""Means over ranks of buckets whose gradients are said in fewer bytes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tutti.codecs import Codec
from tutti.collectives import (
    all_gather,
    broadcast_all,
    broadcast_json,
    butterfly,
    native,
    run,
)
from tutti.collectives.compressed import STAGE_BOUNDARY, CompressedSum, ReductionContext, compressed_sum_for
from tutti.collectives.hierarchical import broadcast_within, sum_within
from tutti.collectives.mean import weigh
from tutti.errors import ConfigError
from tutti.replica import Bucket, Replica
from tutti.replica.buckets import Slot
from tutti.strategies.means import start_sharing_weights, when_filled
from tutti.transports import HostsTransport, Transport, Work
from tutti.transports.base import CompletedWork, Operation


class CompressedMean:
    """Sums bucket after bucket, step by step, beside backward; between hosts only, where ranks share them.

    What is left out belongs to parameters: it moves with them when buckets are cut anew, and is taken over by other
    ranks when some are gone.
    """

    def __init__(self, replica: Replica, transport: Transport, codec: Codec) -> None:
        self._replica = replica
        self._transport = transport
        self._codec = codec
        self._within: Transport | None = None
        self._across: Transport | None = transport
        if isinstance(transport, HostsTransport):
            self._within, self._across = transport.within, transport.across
        # For buckets in which nothing is compressed. The butterfly has few rounds and few bytes.
        self._exact_sum = native if isinstance(transport, HostsTransport) else butterfly
        self._sums: dict[Bucket, CompressedSum] = {}
        self._open: list[_StagedWork] = []
        self._num_boundaries = compressed_sum_for(codec).num_boundaries

    def begin(self, weight: float) -> Work:
        self._weights = start_sharing_weights(weight, self._transport)
        return CompletedWork()

    def start(self, bucket: Bucket) -> Work:
        """Take the first steps of this bucket, and the next of those before it: links are busy while ranks wait."""
        steps = when_filled(bucket.flat, self.steps(bucket, self._weights))
        opened = _StagedWork(steps, self._num_boundaries if bucket.values.numel() else 0)
        self._open.append(opened)
        self._advance()
        return opened

    def flush(self) -> None:
        while self._open:
            self._advance()

    def _advance(self) -> None:
        for opened in reversed(self._open):
            opened.advance(self._transport)
        self._open = [opened for opened in self._open if opened.parts_left]

    def finish(self, bucket: Bucket) -> None:
        return None

    def steps(self, bucket: Bucket, weights: Tensor) -> Operation:
        """What `start` has taken, for ranks of these weights; they pause where others may be taken first."""
        self._follow_buckets()
        return self._steps(bucket, weights)

    def _steps(self, bucket: Bucket, weights: Tensor) -> Operation:
        flat, size = bucket.flat, self._transport.size
        weigh(flat, weights, self._transport.rank)
        if not bucket.values.numel():
            yield from self._exact_sum.steps(flat, self._transport)
            flat.div_(size)
            return
        if self._within is not None:
            yield from sum_within(flat, self._within)
        if self._across is not None:
            yield from self._compressed(bucket, self._across)
        else:  # Its host's leader pauses so often: what they do together stays in one order.
            yield from [STAGE_BOUNDARY] * self._num_boundaries
        if self._within is not None:
            yield from broadcast_within(flat, self._within)

    def _compressed(self, bucket: Bucket, across: Transport) -> Operation:
        values = wide = bucket.values
        if not values.is_meta:
            self._mark_what_is_owed(bucket)
            wide = values.to(torch.float32)
        yield from self._sums[bucket].steps(wide, bucket.exact, across)
        if wide is not values:
            values.copy_(wide)

    def _mark_what_is_owed(self, bucket: Bucket) -> None:
        """A parameter without a gradient has one all the same if something of earlier ones is still to be said."""
        if (bucket.marks != 0).all():
            return
        for number, (start, slot) in enumerate(_compressed_slots(bucket)):
            whole = slice(start, start + slot.tensor.numel())
            # An old gradient that nobody cleared is encoded too, and must not be lost either.
            kept = [bucket.values, *self._sums[bucket].per_element.values()]
            if not bucket.marks[number] and any(flat[whole].any() for flat in kept):
                bucket.marks[number] = 1

    def _follow_buckets(self) -> None:
        """Have a sum for every bucket; when buckets are cut anew, what was remembered goes with the parameters."""
        buckets = [bucket for bucket in self._replica.buckets if bucket.values.numel()]
        if self._across is None or all(bucket in self._sums for bucket in buckets):
            return
        kept = self._remembered()
        self._sums = {bucket: self._new_sum(bucket, self._across) for bucket in buckets}
        self._remember(kept)

    def _new_sum(self, bucket: Bucket, across: Transport) -> CompressedSum:
        layout = tuple((start, tuple(slot.tensor.shape)) for start, slot in _compressed_slots(bucket))
        device, divisor = bucket.values.device, self._transport.size
        context = ReductionContext(across.rank, across.size, divisor, device, seed=bucket.index)
        return compressed_sum_for(self._codec)(self._codec, layout, bucket.values.numel(), context)

    def state_dict(self) -> dict[str, Any]:
        """What is left out on every rank, by parameter, the same on all ranks. Collective."""
        self._follow_buckets()
        names = self._names()
        mine = self._remembered()
        elements = {}
        for key in _element_keys(self._codec):
            rows = torch.zeros(self._transport.size, sum(names.values()), dtype=torch.float32, device="cpu")
            parts = rows[self._transport.rank].split(list(names.values()))
            for name, part in zip(names, parts, strict=True):
                if key in mine.elements:
                    part.copy_(mine.elements[key][name])
            run(all_gather.steps(rows.view(-1), self._transport))
            elements[key] = rows
        common, factors = _share_state(mine.common, mine.factors, self._transport)
        order = [slot.name for slot in self._replica.slots] if self._replica.arranged else None
        return {"order": order, "names": names, "elements": elements, "common": common, "factors": factors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` said, if need be with another number of ranks."""
        names = self._names()
        if state["names"] != names:
            raise ConfigError(
                f"this state was saved for other parameters, or another exact_below: it is of {len(state['names'])} "
                f"compressed tensors with {sum(state['names'].values())} elements, this model has {len(names)} with "
                f"{sum(names.values())}."
            )
        if state["order"] is not None:
            self._replica.arrange(state["order"])
        self._follow_buckets()
        kept = _CodecMemory(common=dict(state["common"]), factors=dict(state["factors"]))
        for key, rows in state["elements"].items():
            row = self._share_of(rows)
            kept.elements[key] = dict(zip(names, row.split(list(names.values())), strict=True))
        self._remember(kept)

    def _share_of(self, rows: Tensor) -> Tensor:
        """What this rank takes over: its own row, and some of those whose ranks are gone or no longer send."""
        senders = _senders(self._transport, self._within is not None)
        heirs = [rank if rank in senders else senders[rank % len(senders)] for rank in range(len(rows))]
        inherited = [row for row, heir in zip(rows, heirs, strict=True) if heir == self._transport.rank]
        mine = torch.stack(inherited).sum(0) if len(inherited) > 1 else (inherited or [torch.zeros_like(rows[0])])[0]
        # What is owed is owed to the mean: of more ranks, each counts for less.
        return mine if len(rows) == self._transport.size else mine * (self._transport.size / len(rows))

    def _names(self) -> dict[str, int]:
        """Compressed parameters, in the order of names, and their numbers of elements."""
        slots = [slot for bucket in self._replica.buckets for _, slot in _compressed_slots(bucket)]
        return {slot.name: slot.tensor.numel() for slot in sorted(slots, key=lambda slot: slot.name)}

    def _remembered(self) -> "_CodecMemory":
        kept = _CodecMemory()
        for bucket, compressed in self._sums.items():
            slots = dict(_compressed_slots(bucket))
            for key, flat in compressed.per_element.items():
                of_key = kept.elements.setdefault(key, {})
                of_key |= {slot.name: flat[start : start + slot.tensor.numel()] for start, slot in slots.items()}
            for key, value in compressed.save().items():
                what, _, start = key.partition("@")
                if start:
                    kept.factors[f"{what}@{slots[int(start)].name}"] = value
                else:
                    kept.common[key] = value
        return kept

    def _remember(self, kept: "_CodecMemory") -> None:
        for bucket, compressed in self._sums.items():
            saved = dict(kept.common)
            for start, slot in _compressed_slots(bucket):
                for key, elements in kept.elements.items():
                    compressed.per_element[key][start : start + slot.tensor.numel()] = elements[slot.name]
                for key, factor in kept.factors.items():
                    what, _, name = key.partition("@")
                    if name == slot.name:
                        saved[f"{what}@{start}"] = factor.clone()
            compressed.load(saved)


class _StagedWork(Work):
    """Operation that are taken in parts, from pause to pause; done when all parts are."""

    def __init__(self, steps: Operation, num_boundaries: int) -> None:
        self._steps = steps
        self._parts: list[Work] = []
        self.parts_left = num_boundaries + 1

    def advance(self, transport: Transport) -> None:
        """Have the next part taken."""
        self.parts_left -= 1
        self._parts.append(transport.start(self._up_to_pause() if self.parts_left else self._steps))

    def _up_to_pause(self) -> Operation:
        for work in self._steps:
            if work is STAGE_BOUNDARY:
                return
            yield work

    def done(self) -> bool:
        return not self.parts_left and all(part.done() for part in self._parts)

    def wait(self) -> None:
        assert not self.parts_left, "flush comes before wait"
        for part in self._parts:
            part.wait()


@dataclass
class _CodecMemory:
    """What codecs remember, by the parameters that it is about."""

    elements: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Of every element: residuals, say, by parameter."""
    factors: dict[str, Tensor] = field(default_factory=dict)
    """Of a parameter as a whole, the same on all ranks, by "what@parameter"."""
    common: dict[str, Any] = field(default_factory=dict)
    """Of the run: the number of steps."""


def _share_state(
    common: dict[str, Any], factors: dict[str, Tensor], transport: Transport
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Rank 0's, on every rank."""
    common, shapes = broadcast_json([common, {name: list(factor.shape) for name, factor in factors.items()}], transport)
    own = transport.rank == 0
    tensors = {
        name: factors[name].cpu() if own else torch.empty(shape, dtype=torch.float32, device="cpu")
        for name, shape in shapes.items()
    }
    broadcast_all(tensors.values(), transport)
    return common, tensors


def _compressed_slots(bucket: Bucket) -> Iterator[tuple[int, Slot]]:
    """Slots in the lossy part of a bucket, and where they begin."""
    for start, slot in zip(bucket.starts, bucket.slots, strict=True):
        if start < bucket.values.numel():
            yield start, slot


def _element_keys(codec: Codec) -> list[str]:
    state = codec.start(0, 0, torch.device("meta"))
    return [key for key, value in state.items() if isinstance(value, Tensor)]


def _senders(transport: Transport, two_levels: bool) -> list[int]:
    """The ranks that encode: all, or the first of every host."""
    if not two_levels:
        return list(range(transport.size))
    return sorted(transport.hosts.index(host) for host in set(transport.hosts))
