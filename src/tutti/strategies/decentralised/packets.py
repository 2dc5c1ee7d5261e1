"""Packets of peers' updates: what a step has changed, exact or compressed by a codec.

An exact packet is the flat change itself. A compressed one holds an int64 length for each bucket, then each bucket's
message, aligned: the bucket's values that are not compressed, followed by the codec's packet.
"""

import torch
from torch import Tensor

from tutti.codecs import Codec
from tutti.codecs.scale_groups import ScaleGroups
from tutti.collectives.compressed.messages import aligned, join, split
from tutti.errors import PacketError
from tutti.replica import Bucket
from tutti.strategies.compressed_state import FlatStates, bucket_spans
from tutti.strategies.decentralised.flat_model import FlatModel


class UpdatePackets:
    """Encodes changes as packets, and adds packets to flat values."""

    def __init__(self, model: FlatModel, codec: Codec | None, seed: int) -> None:
        """Encode by `codec`, or exactly if there is none; `seed` differs between ranks."""
        self._model, self.codec = model, codec
        self._groups = [
            _scale_groups(bucket) if codec is not None and bucket.values.numel() else None for bucket in model.buckets
        ]
        self.states = [
            # Another seed for every rank and bucket: random codecs must not draw the same numbers everywhere.
            codec.start(bucket.values.numel(), seed=seed * 65_537 + bucket.index)
            if codec is not None and groups is not None and not model.sizes_only
            else {}
            for bucket, groups in zip(model.buckets, self._groups, strict=True)
        ]
        """The codec's state of each bucket: what error feedback has not sent yet."""

    @property
    def codec_states(self) -> FlatStates:
        """The codec's states, with the parameters in them."""
        buckets = zip(self.states, self._model.buckets, strict=True)
        return [(state, bucket_spans(bucket)) for state, bucket in buckets if state]

    def encode(self, change: Tensor) -> Tensor:
        """Return a packet of a flat change. With a codec, what it leaves out stays in its state."""
        if self.codec is None:
            return change
        if self._model.sizes_only:
            return self._model.empty(self._estimated_bytes())
        messages = []
        for index, (bucket, values) in enumerate(
            zip(self._model.buckets, self._model.bucket_views(change), strict=True)
        ):
            packet = torch.empty(0, dtype=torch.uint8, device="cpu")
            numel = bucket.values.numel()
            if (groups := self._groups[index]) is not None:
                compressible = values[:numel].to(torch.float32)
                # Only what the codec can compress; the bucket's small tensors (`values[numel:]`) are sent exactly.
                packet, self.states[index] = self.codec.encode(compressible, self.states[index], groups=groups)
            messages.append(join(packet, values[numel:]))
        lengths = torch.tensor([message.numel() for message in messages], device="cpu")
        # Every message begins at a multiple of 8 bytes, so that its exact values can be read in place.
        padded = [
            torch.nn.functional.pad(message, (0, aligned(message.numel()) - message.numel())) for message in messages
        ]
        return torch.cat([lengths.view(torch.uint8), *padded])

    def add(self, packet: Tensor, memory: Tensor) -> None:
        """Add the change that a packet holds to flat values. Raises `PacketError` if it is malformed."""
        if self._model.sizes_only:
            return
        views = self._model.bucket_views(memory)
        if self.codec is None:
            # Checked before the views are cut: a peer with another model would otherwise fail deep inside torch.
            if packet.numel() != self._model.num_bytes:
                raise PacketError(f"an update of {packet.numel()} bytes, wanted {self._model.num_bytes}")
            torch._foreach_add_(views, self._model.bucket_views(packet))
            return
        for index, message in enumerate(self._split_buckets(packet)):
            self._add_bucket(index, message, views[index])

    def _add_bucket(self, index: int, message: Tensor, values: Tensor) -> None:
        """Add the change of one bucket to its values, flat: [numel]. Raises `PacketError` if it is malformed."""
        numel, codec = self._model.buckets[index].values.numel(), self.codec
        assert codec is not None
        # `split` trusts the length, and this message comes from a peer.
        if message.numel() < aligned(values[numel:].nbytes):
            raise PacketError(f"{message.numel()} bytes for bucket {index}, wanted {values[numel:].nbytes} or more")
        packet, exact = split(message, values[numel:])
        if (groups := self._groups[index]) is not None:
            if values.dtype == torch.float32:
                # Added while it is decoded: no temporary tensor of the bucket's size.
                codec.decode(packet, values[:numel], groups=groups, add=True)
            else:
                decoded = torch.empty(numel, dtype=torch.float32, device="cpu")
                codec.decode(packet, decoded, groups=groups)
                values[:numel] += decoded
        values[numel:] += exact

    def _split_buckets(self, packet: Tensor) -> list[Tensor]:
        """Return the message of each bucket. Raises `PacketError` if the lengths do not match the packet."""
        num_buckets = len(self._model.buckets)
        lengths_bytes = 8 * num_buckets
        has_lengths = packet.numel() >= lengths_bytes
        lengths = packet[:lengths_bytes].clone().view(torch.int64).tolist() if has_lengths else []
        edges = [lengths_bytes]
        for length in lengths:
            if length < 0:
                raise PacketError(f"an update with a part of {length} bytes")
            edges.append(edges[-1] + aligned(length))
        # The lengths come from a peer: they must add up to the packet before anything is sliced by them.
        if len(lengths) != num_buckets or edges[-1] != packet.numel():
            raise PacketError(f"an update of {packet.numel()} bytes whose parts do not add up")
        return [packet[start : start + length] for start, length in zip(edges[:-1], lengths, strict=True)]

    def _estimated_bytes(self) -> int:
        """Return the size of a packet, for a dry run."""
        assert self.codec is not None
        total = 8 * len(self._groups)
        for bucket, groups in zip(self._model.buckets, self._groups, strict=True):
            total += aligned(bucket.exact.nbytes)
            total += 0 if groups is None else aligned(self.codec.packet_bytes(bucket.values.numel(), groups))
        return total


def _scale_groups(bucket: Bucket) -> ScaleGroups:
    """Return the groups of elements that share a scale, in the compressible part of a bucket."""
    numel = bucket.values.numel()
    layout = zip(bucket.starts, bucket.slots, strict=True)
    shapes = [(start, tuple(slot.tensor.shape)) for start, slot in layout if start < numel]
    return ScaleGroups.from_layout(shapes, numel)
