"""Updates as messages: what a step has changed, exactly or in a codec's fewer bytes."""

import torch
from torch import Tensor

from tutti.codecs import Codec
from tutti.codecs.scale_groups import ScaleGroups
from tutti.collectives.compressed.messages import aligned, join, split
from tutti.errors import PacketError
from tutti.replica import Bucket
from tutti.strategies.decentralised.flat_model import Images


class Packets:
    """Makes messages of changes, and adds messages to images. What a codec leaves out it says later, or never."""

    def __init__(self, images: Images, codec: Codec | None, seed: int) -> None:
        self._images, self._codec = images, codec
        self._groups = [
            _groups_of(bucket) if codec is not None and bucket.values.numel() else None for bucket in images.buckets
        ]
        self.states = [
            codec.start(bucket.values.numel(), seed=seed * 65_537 + bucket.index)
            if codec is not None and groups is not None and not images.sizes_only
            else {}
            for bucket, groups in zip(images.buckets, self._groups, strict=True)
        ]

    def encode(self, change: Tensor) -> Tensor:
        """A message that says what `change` holds, or most of it."""
        if self._codec is None:
            return change
        if self._images.sizes_only:
            return self._images.room(self._estimate())
        messages = []
        for number, (bucket, part) in enumerate(zip(self._images.buckets, self._images.parts(change), strict=True)):
            packet = torch.empty(0, dtype=torch.uint8, device="cpu")
            numel = bucket.values.numel()
            if (groups := self._groups[number]) is not None:
                values = part[:numel].to(torch.float32)
                packet, self.states[number] = self._codec.encode(values, self.states[number], groups=groups)
            messages.append(join(packet, part[numel:]))
        lengths = torch.tensor([each.numel() for each in messages], device="cpu")
        padded = [torch.nn.functional.pad(each, (0, aligned(each.numel()) - each.numel())) for each in messages]
        return torch.cat([lengths.view(torch.uint8), *padded])

    def add(self, message: Tensor, memory: Tensor) -> None:
        """Add what a message says to what `memory` holds. Raises `PacketError` if it can be no such message."""
        if self._images.sizes_only:
            return
        parts = self._images.parts(memory)
        if self._codec is None:
            if message.numel() != self._images.num_bytes:
                raise PacketError(f"an update of {message.numel()} bytes, wanted {self._images.num_bytes}")
            torch._foreach_add_(parts, self._images.parts(message))
            return
        for number, each in enumerate(self._cut(message)):
            self._add_part(number, each, parts[number])

    def _add_part(self, number: int, message: Tensor, part: Tensor) -> None:
        numel, codec = self._images.buckets[number].values.numel(), self._codec
        assert codec is not None
        if message.numel() < aligned(part[numel:].nbytes):
            raise PacketError(f"{message.numel()} bytes for bucket {number}, wanted {part[numel:].nbytes} or more")
        packet, exact = split(message, part[numel:])
        if (groups := self._groups[number]) is not None:
            if part.dtype == torch.float32:
                codec.decode(packet, part[:numel], groups=groups, add=True)
            else:
                wide = torch.empty(numel, dtype=torch.float32, device="cpu")
                codec.decode(packet, wide, groups=groups)
                part[:numel] += wide
        part[numel:] += exact

    def _cut(self, message: Tensor) -> list[Tensor]:
        count = len(self._images.buckets)
        lengths = message[: 8 * count].clone().view(torch.int64).tolist() if message.numel() >= 8 * count else []
        ends = [8 * count]
        for length in lengths:
            if length < 0:
                raise PacketError(f"an update with a part of {length} bytes")
            ends.append(ends[-1] + aligned(length))
        if len(lengths) != count or ends[-1] != message.numel():
            raise PacketError(f"an update of {message.numel()} bytes whose parts do not add up")
        return [message[at : at + length] for at, length in zip(ends[:-1], lengths, strict=True)]

    def _estimate(self) -> int:
        assert self._codec is not None
        total = 8 * len(self._groups)
        for bucket, groups in zip(self._images.buckets, self._groups, strict=True):
            total += aligned(bucket.exact.nbytes)
            total += 0 if groups is None else aligned(self._codec.packet_bytes(bucket.values.numel(), groups))
        return total


def _groups_of(bucket: Bucket) -> ScaleGroups:
    numel = bucket.values.numel()
    layout = zip(bucket.starts, bucket.slots, strict=True)
    return ScaleGroups.from_layout(
        [(start, tuple(slot.tensor.shape)) for start, slot in layout if start < numel], numel
    )
