"""State of codecs by parameter, so that it moves between buckets, into checkpoints, and to other numbers of ranks.

A codec's state per element (its residual, say) is what the mean over ranks is still owed. Only its sum over ranks
matters, so rows of ranks that are gone can be added to those of others.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tutti.codecs import Codec
from tutti.collectives import all_gather, broadcast_all, broadcast_json, run
from tutti.collectives.compressed import CompressedSum
from tutti.replica import Bucket
from tutti.replica.buckets import Slot
from tutti.transports import Transport


@dataclass
class CodecMemory:
    """One rank's codec state by parameter, independent of how parameters are grouped into buckets."""

    elements: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """State of every element, such as residuals, by name and parameter."""
    factors: dict[str, Tensor] = field(default_factory=dict)
    """State of whole parameters that is equal on all ranks, such as low-rank factors, by "name@parameter"."""
    common: dict[str, Any] = field(default_factory=dict)
    """State that is equal for all buckets and ranks, such as the number of steps."""

    @classmethod
    def collect(cls, sums: Mapping[Bucket, CompressedSum]) -> "CodecMemory":
        """Collect the state of all sums. Tensors are views of theirs."""
        memory = cls()
        for bucket, bucket_sum in sums.items():
            slots = dict(compressed_slots(bucket))
            for key, flat in bucket_sum.per_element.items():
                # Views, so collecting costs no memory; the caller copies them before the sums go on.
                by_parameter = memory.elements.setdefault(key, {})
                by_parameter |= {slot.name: flat[start : start + slot.tensor.numel()] for start, slot in slots.items()}
            for key, value in bucket_sum.save().items():
                # "q@START" of a bucket becomes "q@PARAMETER", which stays valid when buckets are cut anew.
                name, _, start = key.partition("@")
                if start:
                    memory.factors[f"{name}@{slots[int(start)].name}"] = value
                else:
                    memory.common[key] = value
        return memory

    def distribute(self, sums: Mapping[Bucket, CompressedSum]) -> None:
        """Copy the state to the sums of the present buckets. What they have no place for is left out."""
        for bucket, bucket_sum in sums.items():
            saved = dict(self.common)
            for start, slot in compressed_slots(bucket):
                for key, flat in bucket_sum.per_element.items():
                    # A parameter that the saved state does not know keeps what its sum started with.
                    if (values := self.elements.get(key, {}).get(slot.name)) is not None:
                        flat[start : start + slot.tensor.numel()] = values
                for key, factor in self.factors.items():
                    name, _, parameter = key.partition("@")
                    if parameter == slot.name:
                        # The inverse of `collect`: back to the position of the parameter in its present bucket. A
                        # copy, since the tensors of `collect` still belong to the sums that they came from.
                        saved[f"{name}@{start}"] = factor.clone()
            bucket_sum.load(saved)

    def gather(self, codec: Codec, sizes: dict[str, int], transport: Transport) -> dict[str, Any]:
        """Return the state of all ranks, the same on every rank. Collective.

        Args:
            sizes: the compressed parameters and their numbers of elements, in the order of names.

        Returns: `elements` (by name and parameter, a matrix with a row for every rank), `common` and `factors`.
        """
        elements = {}
        for key in _element_keys(codec):
            rows = torch.zeros(transport.size, sum(sizes.values()), dtype=torch.float32, device="cpu")
            # Only this rank's row is filled in; the all-gather fills in the others, as rows are its equal parts.
            parts = rows[transport.rank].split(list(sizes.values()))
            for name, part in zip(sizes, parts, strict=True):
                if key in self.elements:  # Ranks that do not encode have none.
                    part.copy_(self.elements[key][name])
            run(all_gather.steps(rows.view(-1), transport))
            # Cloned: a view of all rows would be saved with all of them.
            columns = rows.split(list(sizes.values()), dim=1)
            elements[key] = {name: column.clone() for name, column in zip(sizes, columns, strict=True)}
        common, factors = _broadcast_state(self.common, self.factors, transport)
        return {"elements": elements, "common": common, "factors": factors}

    @classmethod
    def from_gathered(cls, state: dict[str, Any], transport: Transport, two_levels: bool) -> "CodecMemory":
        """Return this rank's part of what `gather` returned, saved by any number of ranks."""
        memory = cls(common=dict(state["common"]), factors=dict(state["factors"]))
        for key, by_parameter in state["elements"].items():
            memory.elements[key] = {
                name: _row_taken_over(rows, transport, two_levels) for name, rows in by_parameter.items()
            }
        return memory


def compressed_slots(bucket: Bucket) -> Iterator[tuple[int, Slot]]:
    """Yield the slots in the compressed part of a bucket, and where they begin in it."""
    for start, slot in zip(bucket.starts, bucket.slots, strict=True):
        if start < bucket.values.numel():
            yield start, slot


def parameter_sizes(buckets: Iterable[Bucket]) -> dict[str, int]:
    """Return the compressed parameters in the order of their names, with their numbers of elements."""
    slots = [slot for bucket in buckets for _, slot in compressed_slots(bucket)]
    return {slot.name: slot.tensor.numel() for slot in sorted(slots, key=lambda slot: slot.name)}


def _row_taken_over(rows: Tensor, transport: Transport, two_levels: bool) -> Tensor:
    """Return the state that this rank takes over: its own row, and rows of ranks that no longer encode."""
    encoding = _encoding_ranks(transport, two_levels)
    # Which rank gets each saved row. Rows without a rank of their number go to the others in turn.
    heirs = [rank if rank in encoding else encoding[rank % len(encoding)] for rank in range(len(rows))]
    inherited = [row for row, heir in zip(rows, heirs, strict=True) if heir == transport.rank]
    # A new rank inherits nothing and starts at zero.
    total = torch.stack(inherited).sum(0) if len(inherited) > 1 else (inherited or [torch.zeros_like(rows[0])])[0]
    # Residuals are owed to the mean. In a mean of more ranks each counts for less, so it is scaled up.
    return total if len(rows) == transport.size else total * (transport.size / len(rows))


def _broadcast_state(
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


def _element_keys(codec: Codec) -> list[str]:
    """Return the names of the codec's state per element."""
    # Without elements, and without memory: only the names are wanted.
    state = codec.start(0, 0, torch.device("meta"))
    return [key for key, value in state.items() if isinstance(value, Tensor)]


def _encoding_ranks(transport: Transport, two_levels: bool) -> list[int]:
    """Return the ranks that encode: all of them, or the first of every host."""
    if not two_levels:
        return list(range(transport.size))
    return sorted(transport.hosts.index(host) for host in set(transport.hosts))
