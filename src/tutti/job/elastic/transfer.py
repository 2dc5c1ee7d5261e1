"""The state of a job that ranks take over from others, sent to them alone, by several ranks at once.

A rank needs it if it is new, or if it missed the end of a step that others have completed. It takes over all or
nothing: everything is received before anything is changed, because a rank that sends may be lost in the middle.

How it works
------------
Training stops for this, as long as it takes: parameters and the optimiser's state change in every step, so a copy that
was sent while the others train is of no use afterwards. Everything else about a join is done before or behind it
(`ElasticJob.arrive`).

Under strategies that keep replicas equal, all ranks that miss nothing have the same tensors. Each of these *sources*
sends an equal part of their bytes to every *taker*, so a taker receives as fast as it can, and several takers do not
wait for one source. The first source also sends what only one can: plain values, and the tensors of one rank (buffers,
what the strategy has). Other ranks neither send nor wait.

Messages of a source to a taker come in the order in which they were sent: from the first source its values, then from
each source its part. Every wait is for a rank of this generation, and ends with its loss.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.collectives.messages import receive_json, send_json
from tutti.collectives.packing import pack, unpack
from tutti.replica import Replica
from tutti.transports import Transport, Work

_MESSAGE_BYTES = 16 << 20
"""The most bytes of a message."""
_SMALL_BYTES = 64 << 10
"""Tensors of fewer bytes travel together."""


@dataclass(frozen=True)
class SharedState:
    """The state of a job on one rank, as nests of tensors and plain values."""

    equal: Any
    """What is the same on all sources."""
    own: Any
    """What is not, or is not known to be."""


def state_bytes(replica: Replica) -> int:
    """Return the bytes of the trained parameters and the optimiser's state."""
    held = [value for state in replica.optimizer.state.values() for value in state.values()]
    tensors = [slot.tensor for slot in replica.slots] + [value for value in held if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def send_state(state: SharedState, transport: Transport, sources: Sequence[int], takers: Sequence[int]) -> None:
    """Send this rank's part of a state to ranks that take it over. Collective among the sources and these."""
    equal, own = _Packed(state.equal), _Packed(state.own)
    work: list[Work] = []
    for taker in takers:
        if transport.rank == sources[0]:
            send_json([equal.head, own.head], transport, taker)
            work += [transport.isend(part, taker) for part in own.parts(0, 1)]
        work += [transport.isend(part, taker) for part in equal.parts(sources.index(transport.rank), len(sources))]
    for each in work:
        each.wait()  # Ended by the other ranks of this generation, or by their loss.


def receive_state(transport: Transport, sources: Sequence[int]) -> SharedState:
    """Return the state that other ranks send to this one. Collective among the sources and those that take it over."""
    equal_head, own_head = receive_json(transport, sources[0])
    equal, own = _Packed.empty(equal_head), _Packed.empty(own_head)
    work = [transport.irecv(part, sources[0]) for part in own.parts(0, 1)]
    for number, source in enumerate(sources):
        work += [transport.irecv(part, source) for part in equal.parts(number, len(sources))]
    for each in work:
        each.wait()  # Ended by the other ranks of this generation, or by their loss.
    return SharedState(equal.unpacked(), own.unpacked())


class _Packed:
    """A nest as JSON values, and the memory of its tensors: a piece for all small ones, and one for each other."""

    def __init__(self, value: Any) -> None:
        tensors: list[Tensor] = []
        packed = pack(value, tensors)
        kinds = [[list(each.shape), str(each.dtype).removeprefix("torch.")] for each in tensors]
        self.head = [packed, kinds]
        octets = [each.detach().cpu().contiguous().view(-1).view(torch.uint8) for each in tensors if each.numel()]
        small = [each for each in octets if each.numel() < _SMALL_BYTES]
        self._pieces = [torch.cat(small)] if small else []
        self._pieces += [each for each in octets if each.numel() >= _SMALL_BYTES]

    @classmethod
    def empty(cls, head: Any) -> "_Packed":
        """Return one with the same values and other memory, to receive into."""
        made = cls.__new__(cls)
        made.head = head
        sizes = [num_bytes for _, _, num_bytes in made._tensors()]
        small = sum(each for each in sizes if each < _SMALL_BYTES)
        large = [each for each in sizes if each >= _SMALL_BYTES]
        made._pieces = [torch.empty(each, dtype=torch.uint8, device="cpu") for each in (small, *large) if each]
        return made

    def parts(self, number: int, of: int) -> Iterator[Tensor]:
        """Yield the memory that one of several sources sends, message by message."""
        total = sum(piece.numel() for piece in self._pieces)
        first, last, begin = number * total // of, (number + 1) * total // of, 0
        for piece in self._pieces:
            stop = min(last - begin, piece.numel())
            for at in range(max(0, first - begin), stop, _MESSAGE_BYTES):
                yield piece[at : min(at + _MESSAGE_BYTES, stop)]
            begin += piece.numel()

    def unpacked(self) -> Any:
        """Return the nest."""
        found, at, pieces = [], 0, list(self._pieces)
        small = pieces.pop(0) if any(0 < each < _SMALL_BYTES for _, _, each in self._tensors()) else None
        for shape, dtype, num_bytes in self._tensors():
            if num_bytes >= _SMALL_BYTES:
                octets = pieces.pop(0)
            elif num_bytes:
                assert small is not None
                octets = small[at : at + num_bytes].clone()  # In memory of its own, from a place that fits any type.
                at += num_bytes
            else:
                octets = torch.empty(0, dtype=torch.uint8, device="cpu")
            found.append(octets.view(dtype).view(shape))
        return unpack(self.head[0], found)

    def _tensors(self) -> Iterator[tuple[list[int], torch.dtype, int]]:
        """Yield shape, type and number of bytes of each tensor."""
        for shape, name in self.head[1]:
            dtype = getattr(torch, name)
            yield shape, dtype, math.prod(shape) * dtype.itemsize
