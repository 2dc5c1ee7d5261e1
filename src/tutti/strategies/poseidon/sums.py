"""Means over ranks of gradients that travel as factors."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor

from tutti.collectives import parts, recursive_doubling, ring
from tutti.collectives.mean import weigh
from tutti.errors import ConfigError, WeightRefused
from tutti.replica import FactoredLayer
from tutti.replica.replica import GradientClock
from tutti.simulation.sizes import SizeOnlyTensor
from tutti.strategies.means import when_filled
from tutti.strategies.poseidon.rule import Method
from tutti.transports import Transport, Work
from tutti.transports.base import CompletedWork, Operation

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_NO_DTYPE = -1
_TAGS = 4
"""Of a layer's messages: what comes, factors of outputs, factors of inputs, rows of the sum."""


class _FactorHeader(NamedTuple):
    """What a rank says of its factors before it sends them."""

    rows: int
    dtype: int
    weight: float


@dataclass
class _Gathering:
    """One layer's exchange under way."""

    layer: FactoredLayer
    outputs: Tensor = field(default_factory=lambda: torch.empty(0))
    """Factors of this rank, and later of all, by rank."""
    inputs: Tensor = field(default_factory=lambda: torch.empty(0))
    heads: list[_FactorHeader] = field(default_factory=list)
    """Of all ranks."""
    done: Work = field(default_factory=CompletedWork)

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [_DTYPES[number] for number in sorted({head.dtype for head in self.heads} - {_NO_DTYPE})]

    @property
    def shares(self) -> list[float]:
        """How much each rank counts; 1 together."""
        weights = [head.weight for head in self.heads]
        if bad := [rank for rank, weight in enumerate(weights) if math.isnan(weight)]:
            raise WeightRefused(bad)
        if len(set(weights)) == 1:
            return [1 / len(weights)] * len(weights)
        return [weight / sum(weights) for weight in weights]

    @property
    def counts(self) -> bool:
        """Whether any rank that counts has rows."""
        return any(head.rows and share for head, share in zip(self.heads, self.shares, strict=True))

    def weighed(self) -> tuple[Tensor, Tensor]:
        """All factors, those of each rank in its share, in numbers of the weight's kind."""
        kind = self.layer.slot.tensor.dtype
        outputs, inputs = self.outputs.to(kind), self.inputs.to(kind)
        sizes = [head.rows for head in self.heads]
        rows = zip(outputs.split(sizes), inputs.split(sizes), self.shares, strict=True)
        for from_outputs, from_inputs, share in rows:
            if share == 0:  # Not a product: whatever is in there must not count, NaN included.
                from_inputs.zero_()
                from_outputs.zero_()
            else:
                from_outputs.mul_(share)
        return outputs, inputs


class FactorSums:
    """Exchanges the factors of layers beside backward, and each other, and multiplies when backward is over.

    Every rank says of every layer how many rows it has and how much they count, then sends them. A gradient that its
    factors do not hold, of earlier passes or of another use of the weight, is found at the end and summed in full.
    """

    def __init__(self, transport: Transport, compute_clock: GradientClock | None) -> None:
        self._wire = transport
        self._compute_clock = compute_clock
        self._others = [(transport.rank + step) % transport.size for step in range(1, transport.size)]
        self._methods: dict[str, Method] = {}
        self._weight = 1.0
        self._under_way: list[_Gathering] = []

    @property
    def bytes_sent(self) -> int:
        return self._wire.bytes_sent

    def follow(self, methods: dict[str, Method]) -> None:
        """From now on these parameters' gradients come here, in these ways."""
        self._methods = methods

    def begin(self, weight: float) -> None:
        self._weight = weight

    def start(self, layer: FactoredLayer) -> None:
        """Send the factors of a layer and receive those of others."""
        tag = _TAGS * (1 + sorted(self._methods).index(layer.slot.name))
        if layer.slot.tensor.is_meta:
            layer.handed_over = True
            self._under_way.append(_Gathering(layer, done=self._wire.spawn(self._sized(layer, tag))))
            return
        pairs = layer.hand_over()
        tensor = layer.slot.tensor
        outputs = torch.cat([e for e, _ in pairs]) if pairs else tensor.new_empty(0, layer.num_out)
        inputs = torch.cat([a for _, a in pairs]) if pairs else tensor.new_empty(0, layer.num_in)
        gathering = _Gathering(layer, outputs.cpu(), inputs.cpu())
        steps = self._broadcast if self._methods[layer.slot.name] == "broadcast" else self._owned
        gathering.done = self._wire.spawn(when_filled(outputs, steps(gathering, tag)))
        self._under_way.append(gathering)

    def finish(self, layers: list[FactoredLayer]) -> frozenset[str]:
        """Make the mean over ranks the gradient of every layer; names of those whose factors did not hold all of it."""
        kept = {layer.slot.name: _clone(layer.slot.tensor.grad) for layer in layers if layer.has_more}
        more = torch.tensor([float(layer.slot.name in kept) for layer in layers], device="cpu")
        known = self._wire.spawn(recursive_doubling.steps(more, self._wire))
        for gathering in self._under_way:  # Others are on their way meanwhile.
            gathering.done.wait()
            if self._compute_clock is not None:
                self._compute_clock.operations(self._operations(gathering))
            self._multiply(gathering)
        known.wait()
        partial = frozenset(layer.slot.name for layer, any_has in zip(layers, more, strict=True) if any_has)
        for gathering in sorted(self._under_way, key=lambda each: each.layer.slot.name):  # Sums in one order.
            slot = gathering.layer.slot
            if slot.name in partial:
                slot.view.add_(self._mean(kept.get(slot.name, torch.zeros_like(slot.view)), gathering))
            if not slot.tensor.is_meta and (gathering.counts or slot.name in partial):
                slot.tensor.grad = slot.view
        self._under_way.clear()
        return partial

    def _operations(self, gathering: _Gathering) -> float:
        """Of products that this rank makes for others: backward's own time is that of its own."""
        layer, others = gathering.layer, len(self._others)
        rows = sum(head.rows for head in gathering.heads) * others / (others + 1) or others * layer.rows
        parts_made = 1 if self._methods[layer.slot.name] == "broadcast" else others + 1
        return 2.0 * rows * layer.num_out * layer.num_in / parts_made

    def _multiply(self, gathering: _Gathering) -> None:
        """Fill the layer's memory for gradients; what was in there is kept elsewhere, if it is worth anything."""
        slot = gathering.layer.slot
        if slot.tensor.is_meta:
            return
        if not gathering.counts:
            slot.view.zero_()
        elif self._methods[slot.name] == "broadcast":
            _multiply(*gathering.weighed(), slot.view)
        else:
            slot.view.copy_(gathering.outputs.view(slot.view.shape))

    def _mean(self, tensor: Tensor, gathering: _Gathering) -> Tensor:
        """Of what is summed in full, since factors do not hold it."""
        weights = torch.tensor([head.weight for head in gathering.heads], dtype=torch.float64)
        weigh(tensor, weights, self._wire.rank)
        self._wire.spawn(ring.steps(tensor, self._wire)).wait()
        return tensor.div_(self._wire.size)

    # Operation

    def _sized(self, layer: FactoredLayer, tag: int) -> Operation:
        """The same messages, without values: of as many rows on every rank."""
        tensor, size = layer.slot.tensor, self._wire.size
        split = self._methods[layer.slot.name] == "owners"
        own_outputs = -(-layer.num_out // size) if split else layer.num_out
        factors = [
            SizeOnlyTensor(layer.rows * width, tensor.dtype, tensor.itemsize) for width in (own_outputs, layer.num_in)
        ]
        yield from self._all_to_all([SizeOnlyTensor(len(_FactorHeader._fields), torch.float64, 8), *factors], tag)
        if split:
            block = SizeOnlyTensor(own_outputs * layer.num_in, tensor.dtype, tensor.itemsize)
            yield from self._all_to_all([block], tag + 3)

    def _all_to_all(self, extents: list[SizeOnlyTensor], tag: int) -> list[Work]:
        messages = [(number, cast(Tensor, extent)) for number, extent in enumerate(extents)]
        sending = [self._wire.isend(one, peer, tag + number) for number, one in messages for peer in self._others]
        coming = [self._wire.irecv(one, peer, tag + number) for number, one in messages for peer in self._others]
        return coming + sending

    def _broadcast(self, gathering: _Gathering, tag: int) -> Operation:
        """Everybody's factors to everybody."""
        mine = gathering.outputs.contiguous(), gathering.inputs.contiguous()
        sending = self._introduce(gathering, tag)
        for number, part in enumerate(mine):
            sending += self._send(dict.fromkeys(self._others, part), tag + 1 + number)
        yield from self._hear(gathering, tag)
        rooms = [self._room(gathering, part) for part in mine]
        coming = [self._receive(room, gathering, tag + 1 + number) for number, room in enumerate(rooms)]
        yield from coming[0] + coming[1] + sending
        gathering.outputs, gathering.inputs = rooms

    def _owned(self, gathering: _Gathering, tag: int) -> Operation:
        """Factors to those who own rows of the matrix; each sums its rows and hands them out."""
        rank, layer = self._wire.rank, gathering.layer
        own = parts(layer.num_out, self._wire.size)
        sending = self._introduce(gathering, tag)
        by_owner = {peer: gathering.outputs[:, own[peer]].contiguous() for peer in self._others}
        inputs = gathering.inputs.contiguous()
        sending += self._send(by_owner, tag + 1) + self._send(dict.fromkeys(self._others, inputs), tag + 2)
        yield from self._hear(gathering, tag)
        rooms = [self._room(gathering, part) for part in (gathering.outputs[:, own[rank]], inputs)]
        yield from self._receive(rooms[0], gathering, tag + 1) + self._receive(rooms[1], gathering, tag + 2)
        gathering.outputs, gathering.inputs = rooms
        whole = torch.empty(layer.num_out, layer.num_in, dtype=layer.slot.tensor.dtype, device="cpu")
        blocks = [whole[rows] for rows in own]
        _multiply(*gathering.weighed(), blocks[rank])
        sending += self._send(dict.fromkeys(self._others, blocks[rank]), tag + 3)
        coming = [self._wire.irecv(blocks[peer].view(-1), peer, tag + 3) for peer in self._others if len(blocks[peer])]
        yield from coming + sending
        gathering.outputs = whole

    def _introduce(self, gathering: _Gathering, tag: int) -> list[Work]:
        """Say what this rank will send."""
        rows = len(gathering.outputs)
        own = _FactorHeader(rows, _DTYPES.index(gathering.outputs.dtype) if rows else _NO_DTYPE, self._weight)
        gathering.heads = [own] * self._wire.size  # Until others' are heard.
        head = torch.tensor(own, dtype=torch.float64, device="cpu")
        return [self._wire.isend(head, peer, tag) for peer in self._others]

    def _hear(self, gathering: _Gathering, tag: int) -> Operation:
        """Learn what others will send."""
        heard = torch.empty(self._wire.size, len(_FactorHeader._fields), dtype=torch.float64, device="cpu")
        heard[self._wire.rank] = torch.tensor(gathering.heads[self._wire.rank], dtype=torch.float64)
        yield from [self._wire.irecv(heard[peer], peer, tag) for peer in self._others]
        gathering.heads = [_FactorHeader(int(rows), int(dtype), weight) for rows, dtype, weight in heard.tolist()]
        if len(kinds := gathering.dtypes) > 1:
            names = " and ".join(str(kind).removeprefix("torch.") for kind in kinds)
            raise ConfigError(
                f"rank {self._wire.rank}: factors of '{gathering.layer.slot.name}' come in {names}. "
                "Use autocast alike on all ranks."
            )

    def _send(self, to_each: dict[int, Tensor], tag: int) -> list[Work]:
        return [self._wire.isend(part.view(-1), peer, tag) for peer, part in to_each.items() if part.numel()]

    def _receive(self, room: Tensor, gathering: _Gathering, tag: int) -> list[Work]:
        """Fill `room` with everybody's rows."""
        places = room.split([head.rows for head in gathering.heads])
        return [self._wire.irecv(places[peer].view(-1), peer, tag) for peer in self._others if places[peer].numel()]

    def _room(self, gathering: _Gathering, mine: Tensor) -> Tensor:
        """For everybody's rows, with this rank's in their place."""
        dtype = gathering.dtypes[0] if gathering.dtypes else mine.dtype
        sizes = [head.rows for head in gathering.heads]
        room = torch.empty(sum(sizes), mine.shape[1], dtype=dtype, device="cpu")
        room.split(sizes)[self._wire.rank].copy_(mine)
        return room


def _multiply(outputs: Tensor, inputs: Tensor, out: Tensor) -> None:
    """Eᵀ A."""
    matrix = out.view(outputs.shape[1], inputs.shape[1]) if out.is_contiguous() else None
    if matrix is not None and out.device == outputs.device:
        torch.mm(outputs.t(), inputs, out=matrix)
    else:
        out.copy_(torch.mm(outputs.to(out.device).t(), inputs.to(out.device)).view(out.shape))


def _clone(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.clone()
