"""Means over ranks of buckets whose gradients a codec compresses.

How it works:

- Every bucket has a `CompressedSum`, which keeps the codec's state (residuals, velocities, low-rank factors).
- Its operation is cut into stages at `STAGE_BOUNDARY`, where a rank has sent something and would only wait. When a
  bucket is started, one more stage of every open bucket is queued, the newest bucket first: its packets leave before
  the sums of earlier buckets are waited for. `flush` queues the stages that are left.
- Operations of a transport run in the order in which they were queued. All ranks queue the same stages in the same
  order, so messages match. Ranks that do not encode yield the same number of boundaries for that reason.
- Where ranks share hosts, they sum in shared memory first. Only the leader of each host encodes, and broadcasts the
  result on its host.
- What a codec has not sent yet belongs to parameters, not to buckets: it moves with them when buckets are cut anew. In
  a checkpoint it is stored by parameter and rank, and other numbers of ranks can take it over (`load_state_dict`).
"""

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
    """Averages compressed buckets over ranks in the background; an implementation of `Mean`."""

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
        """Queue the first stage of this bucket, and the next stage of every open one before it."""
        operation = when_filled(bucket.flat, self.steps(bucket, self._weights))
        opened = _StagedWork(operation, self._num_boundaries if bucket.values.numel() else 0)
        self._open.append(opened)
        self._advance()
        return opened

    def flush(self) -> None:
        while self._open:
            self._advance()

    def _advance(self) -> None:
        """Queue one more stage of every open bucket, the newest first: its packets should leave before others wait."""
        for opened in reversed(self._open):
            opened.advance(self._transport)
        self._open = [opened for opened in self._open if opened.stages_left]

    def finish(self, bucket: Bucket) -> None:
        return None

    def steps(self, bucket: Bucket, weights: Tensor) -> Operation:
        """Return the operation of a bucket, for ranks of these weights. It yields `STAGE_BOUNDARY` between stages."""
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
        else:  # As many boundaries as the leader has, so that both queue the same stages in the same order.
            yield from [STAGE_BOUNDARY] * self._num_boundaries
        if self._within is not None:
            yield from broadcast_within(flat, self._within)

    def _compressed(self, bucket: Bucket, across: Transport) -> Operation:
        """Sum the compressed part of a bucket between the ranks that encode. Codecs work in float32."""
        values = wide = bucket.values
        if not values.is_meta:
            self._mark_unsent(bucket)
            wide = values.to(torch.float32)
        yield from self._sums[bucket].steps(wide, bucket.exact, across)
        if wide is not values:
            values.copy_(wide)

    def _mark_unsent(self, bucket: Bucket) -> None:
        """Mark parameters as having a gradient if none came in this step but some of an earlier one is not sent yet."""
        if (bucket.marks != 0).all():
            return
        for number, (start, slot) in enumerate(_compressed_slots(bucket)):
            whole = slice(start, start + slot.tensor.numel())
            # An old gradient that was not zeroed is encoded too, and must not be lost either.
            unsent = [bucket.values, *self._sums[bucket].per_element.values()]
            if not bucket.marks[number] and any(flat[whole].any() for flat in unsent):
                bucket.marks[number] = 1

    def _follow_buckets(self) -> None:
        """Make a sum for every bucket. When buckets are cut anew, the state moves with the parameters."""
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
        """Return the state of all ranks, by parameter, the same on every rank. Collective."""
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
        """Continue from what `state_dict` returned, with any number of ranks.

        Raises:
            ConfigError: it was saved for other parameters, or with another `exact_below`.
        """
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
        """Return the residual that this rank takes over: its own row, and rows of ranks that no longer encode."""
        encoding = _encoding_ranks(self._transport, self._within is not None)
        heirs = [rank if rank in encoding else encoding[rank % len(encoding)] for rank in range(len(rows))]
        inherited = [row for row, heir in zip(rows, heirs, strict=True) if heir == self._transport.rank]
        mine = torch.stack(inherited).sum(0) if len(inherited) > 1 else (inherited or [torch.zeros_like(rows[0])])[0]
        # Residuals are owed to the mean. In a mean of more ranks each counts for less, so it is scaled up.
        return mine if len(rows) == self._transport.size else mine * (self._transport.size / len(rows))

    def _names(self) -> dict[str, int]:
        """Return the compressed parameters in the order of their names, with their numbers of elements."""
        slots = [slot for bucket in self._replica.buckets for _, slot in _compressed_slots(bucket)]
        return {slot.name: slot.tensor.numel() for slot in sorted(slots, key=lambda slot: slot.name)}

    def _remembered(self) -> "_CodecMemory":
        """Collect the state of all sums, by parameter."""
        kept = _CodecMemory()
        for bucket, bucket_sum in self._sums.items():
            slots = dict(_compressed_slots(bucket))
            for key, flat in bucket_sum.per_element.items():
                of_key = kept.elements.setdefault(key, {})
                of_key |= {slot.name: flat[start : start + slot.tensor.numel()] for start, slot in slots.items()}
            for key, value in bucket_sum.save().items():
                what, _, start = key.partition("@")
                if start:
                    kept.factors[f"{what}@{slots[int(start)].name}"] = value
                else:
                    kept.common[key] = value
        return kept

    def _remember(self, kept: "_CodecMemory") -> None:
        """Distribute state by parameter to the sums of the present buckets."""
        for bucket, bucket_sum in self._sums.items():
            saved = dict(kept.common)
            for start, slot in _compressed_slots(bucket):
                for key, elements in kept.elements.items():
                    bucket_sum.per_element[key][start : start + slot.tensor.numel()] = elements[slot.name]
                for key, factor in kept.factors.items():
                    what, _, name = key.partition("@")
                    if name == slot.name:
                        saved[f"{what}@{start}"] = factor.clone()
            bucket_sum.load(saved)


class _StagedWork(Work):
    """An operation that is queued stage by stage. It is done when all stages are."""

    def __init__(self, operation: Operation, num_boundaries: int) -> None:
        self._operation = operation
        self._stages: list[Work] = []
        self.stages_left = num_boundaries + 1

    def advance(self, transport: Transport) -> None:
        """Queue the next stage on the transport."""
        self.stages_left -= 1
        self._stages.append(transport.start(self._up_to_boundary() if self.stages_left else self._operation))

    def _up_to_boundary(self) -> Operation:
        """Run the operation up to its next stage boundary."""
        for work in self._operation:
            if work is STAGE_BOUNDARY:
                return
            yield work

    def done(self) -> bool:
        return not self.stages_left and all(stage.done() for stage in self._stages)

    def wait(self) -> None:
        assert not self.stages_left, "flush must be called before wait"
        for stage in self._stages:
            stage.wait()


@dataclass
class _CodecMemory:
    """State of codecs by parameter, independent of how parameters are grouped into buckets."""

    elements: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """State of every element, such as residuals, by name and parameter."""
    factors: dict[str, Tensor] = field(default_factory=dict)
    """State of whole parameters that is equal on all ranks, such as low-rank factors, by "name@parameter"."""
    common: dict[str, Any] = field(default_factory=dict)
    """State that is equal for all buckets and ranks, such as the number of steps."""


def _share_state(
    common: dict[str, Any], factors: dict[str, Tensor], transport: Transport
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Broadcast rank 0's state. Ranks that do not encode have none of their own. Collective."""
    common, shapes = broadcast_json([common, {name: list(factor.shape) for name, factor in factors.items()}], transport)
    is_source = transport.rank == 0
    tensors = {
        name: factors[name].cpu() if is_source else torch.empty(shape, dtype=torch.float32, device="cpu")
        for name, shape in shapes.items()
    }
    broadcast_all(tensors.values(), transport)
    return common, tensors


def _compressed_slots(bucket: Bucket) -> Iterator[tuple[int, Slot]]:
    """Yield the slots in the compressed part of a bucket, and where they begin in it."""
    for start, slot in zip(bucket.starts, bucket.slots, strict=True):
        if start < bucket.values.numel():
            yield start, slot


def _element_keys(codec: Codec) -> list[str]:
    """Return the names of the codec's state per element."""
    state = codec.start(0, 0, torch.device("meta"))
    return [key for key, value in state.items() if isinstance(value, Tensor)]


def _encoding_ranks(transport: Transport, two_levels: bool) -> list[int]:
    """Return the ranks that encode: all of them, or the first of every host."""
    if not two_levels:
        return list(range(transport.size))
    return sorted(transport.hosts.index(host) for host in set(transport.hosts))
