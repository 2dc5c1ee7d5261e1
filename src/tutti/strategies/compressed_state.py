"""State of codecs by parameter, so that it moves between buckets, into checkpoints, and to other strategies and worlds.

A codec's state per element (its residual, say) is what is still owed to the sum of all ranks. Only that sum matters, so
the state of ranks that are gone can be added to that of others.

In a checkpoint the state of a strategy's codec is

    codec    the text of the codec
    share    how much one rank's value counts in what all ranks make of it: 1/N in a mean over N ranks, 1 in a sum
    factors  state of whole parameters that is equal on all ranks, such as low-rank factors, by "name@parameter"
    ranks    for each rank: `elements`, by name of the state and of the parameter, in the parameter's shape; and
             `common`, its other values, such as the number of steps

`residuals` are of gradients, whether sent to all ranks or to servers; `block_residuals` of changes of a block;
`update_residuals` of changes of a step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutti.codecs import Codec, print_codec
from tutti.collectives.compressed import CompressedSum
from tutti.replica import Bucket
from tutti.replica.buckets import Slot, like
from tutti.strategies.saved_state import PerRank
from tutti.transports import Transport

_RESIDUAL = "residual"
"""The name of what a codec has not sent yet, in its state."""


class Span(NamedTuple):
    """Elements of a parameter in a flat tensor of a codec's state."""

    slot: Slot
    start: int
    """First of the parameter's elements, in the order of its memory."""
    stop: int
    """One past the last of them."""
    offset: int
    """Where they begin in the flat tensor."""


FlatStates = Sequence[tuple[dict[str, Any], Sequence[Span]]]
"""States of a codec, one for every tensor that is encoded by itself, each with the parameters that lie in it."""


@dataclass
class CodecMemory:
    """One rank's codec state by parameter, independent of how parameters are grouped into tensors."""

    elements: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """State of every element, such as residuals, by name and parameter, in the parameter's shape."""
    common: dict[str, Any] = field(default_factory=dict)
    """State that is equal for all tensors of this rank, such as the number of steps."""
    factors: dict[str, Tensor] = field(default_factory=dict)
    """State of whole parameters that is equal on all ranks, such as low-rank factors, by "name@parameter"."""

    @classmethod
    def collect(cls, states: FlatStates) -> "CodecMemory":
        """Collect copies of the state of all tensors."""
        memory = cls()
        flats: dict[tuple[str, Slot], Tensor] = {}
        for state, spans in states:
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    # Seeds differ between ranks and tensors, and are made anew by both.
                    memory.common |= {} if key.endswith("seed") else {key: value}
                    continue
                for slot, start, stop, offset in spans:
                    if (key, slot) not in flats:
                        flats[key, slot] = value.new_zeros(slot.tensor.numel())
                    flats[key, slot][start:stop] = value[offset : offset + stop - start]
        for (key, slot), flat in flats.items():
            memory.elements.setdefault(key, {})[slot.name] = like(flat, slot.tensor)
        return memory

    @torch.no_grad()
    def distribute(self, states: FlatStates) -> None:
        """Copy the state to these tensors. What they have no place for is left out."""
        for state, spans in states:
            for key, value in state.items():
                for slot, start, stop, offset in spans if isinstance(value, Tensor) else ():
                    # A parameter that this memory does not know keeps what its tensor started with.
                    if (saved := self.elements.get(key, {}).get(slot.name)) is not None:
                        flat = torch.empty(slot.tensor.numel(), dtype=value.dtype, device="cpu")
                        like(flat, slot.tensor).copy_(saved)
                        value[offset : offset + stop - start] = flat[start:stop].to(value.device)
            state.update({key: value for key, value in self.common.items() if key in state})

    def state_dict(self, codec: Codec, share: float) -> dict[str, Any]:
        """Return what is saved, as the module's text describes it."""
        # A rank that joins owes nothing yet.
        ranks = PerRank({"elements": self.elements, "common": self.common}, new={"elements": {}, "common": self.common})
        return {"codec": print_codec(codec), "share": share, "factors": self.factors, "ranks": ranks}

    @classmethod
    def inherited(
        cls, state: dict[str, Any], codec: Codec, share: float, rank: int, encoding: Sequence[int]
    ) -> "CodecMemory":
        """Return what one rank takes over of a saved state, which may be of another codec or number of ranks.

        Args:
            state: what `state_dict` returned, with the lists of all ranks.
            codec: the codec that continues.
            share: how much one rank counts under the strategy that continues.
            rank: the rank that takes over.
            encoding: the ranks that encode.
        """
        saved = state["ranks"]
        # Which rank gets the state of each saved one. Those without a rank of their number go to the others in turn.
        heirs = [index if index in encoding else encoding[index % len(encoding)] for index in range(len(saved))]
        mine = [each for each, heir in zip(saved, heirs, strict=True) if heir == rank]
        # What is owed counts by `share`: where one rank counts for less, it must hold more.
        memory = cls(_summed([each["elements"] for each in mine], state["share"] / share))
        # Residuals are plain numbers that any codec can go on from. The rest means something to its own codec only.
        if state["codec"] == print_codec(codec):
            # Ranks that do not encode have none.
            memory.common = next((dict(each["common"]) for each in [*mine, *saved] if each["common"]), {})
            memory.factors = dict(state["factors"])
        return memory


def owed(state: dict[str, Any], codec: Codec | None = None, compressed: Iterable[str] = ()) -> dict[str, Tensor]:
    """Return what all ranks together owe of each parameter, but for what a codec takes over.

    Args:
        state: what `CodecMemory.state_dict` returned, with the lists of all ranks.
        codec: the codec that continues, if any. One without error feedback takes over nothing.
        compressed: the parameters that it encodes.
    """
    taken_over = set(compressed) if codec is not None and _RESIDUAL in codec.start(1) else set()
    total = _summed([each["elements"] for each in state["ranks"]], state["share"]).get(_RESIDUAL, {})
    return {name: value for name, value in total.items() if name not in taken_over and value.any()}


def _summed(elements: list[dict[str, dict[str, Tensor]]], factor: float) -> dict[str, dict[str, Tensor]]:
    """Return the sum of several ranks' state per element, scaled."""
    total: dict[str, dict[str, Tensor]] = {}
    for by_key in elements:
        for key, by_name in by_key.items():
            sums = total.setdefault(key, {})
            for name, value in by_name.items():
                sums[name] = sums[name] + value if name in sums else value
    # Not multiplied by 1: the same ranks go on with the same tensors.
    return total if factor == 1 else {key: {name: v * factor for name, v in by.items()} for key, by in total.items()}


def compressed_slots(bucket: Bucket) -> Iterator[tuple[int, Slot]]:
    """Yield the slots in the compressed part of a bucket, and where they begin in it."""
    for start, slot in zip(bucket.starts, bucket.slots, strict=True):
        if start < bucket.values.numel():
            yield start, slot


def bucket_spans(bucket: Bucket) -> list[Span]:
    """Return the parameters in the compressed part of a bucket."""
    return [Span(slot, 0, slot.tensor.numel(), start) for start, slot in compressed_slots(bucket)]


def collect_sums(sums: Mapping[Bucket, CompressedSum]) -> CodecMemory:
    """Collect copies of the state of the sums of buckets."""
    memory = CodecMemory.collect([(each.per_element, bucket_spans(bucket)) for bucket, each in sums.items()])
    for bucket, bucket_sum in sums.items():
        slots = dict(compressed_slots(bucket))
        for key, value in bucket_sum.save().items():
            # "q@START" of a bucket becomes "q@PARAMETER", which stays valid when buckets are cut anew.
            name, _, start = key.partition("@")
            if start:
                memory.factors[f"{name}@{slots[int(start)].name}"] = value.clone()
            else:
                memory.common[key] = value
    return memory


def distribute_to_sums(memory: CodecMemory, sums: Mapping[Bucket, CompressedSum]) -> None:
    """Copy state to the sums of the present buckets. What they have no place for is left out."""
    memory.distribute([(each.per_element, bucket_spans(bucket)) for bucket, each in sums.items()])
    for bucket, bucket_sum in sums.items():
        saved = dict(memory.common)
        starts = {slot.name: start for start, slot in compressed_slots(bucket)}
        for key, factor in memory.factors.items():
            name, _, parameter = key.partition("@")
            if parameter in starts:
                # The inverse of `collect_sums`: back to the position of the parameter in its present bucket.
                saved[f"{name}@{starts[parameter]}"] = factor.clone()
        bucket_sum.load(saved)


def encoding_ranks(transport: Transport, two_levels: bool) -> list[int]:
    """Return the ranks that encode: all of them, or the first of every host."""
    if not two_levels:
        return list(range(transport.size))
    return sorted(transport.hosts.index(host) for host in set(transport.hosts))
