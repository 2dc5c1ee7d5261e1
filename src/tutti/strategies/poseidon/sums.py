"""Means over ranks of gradients that are sent as sufficient factors (Zhang et al. 2015).

How it works:

- A layer's factors are E (gradients of outputs, one row per sample) and A (inputs). The gradient is Eᵀ A. The mean over
  ranks is the product of all ranks' rows, each rank's E scaled by its share of the samples.
- When backward has a layer's factors, `start` spawns an operation that exchanges them. It runs beside backward, beside
  other layers, and in any order: each layer has its own four tags, by the position of its name among all names.
- Each rank first sends a header with its number of rows, its dtype and its weight, then its factors at once, without
  waiting for other headers. Receivers wait for the headers, because they need the lengths.
- "broadcast" sends all factors to all ranks. "owners" sends each owner its columns of E and all of A; the owner
  multiplies its rows of the matrix, and sends them to all.
- `finish` runs when backward is over. It waits for each exchange and multiplies. Meanwhile a small sum over ranks finds
  out whether any rank's gradient holds more than its factors, from earlier passes or another use of the weight. Those
  gradients are summed in full beside, in the order of names on every rank.
- A wait ends when the message arrives, or by the transport's error if its sender is lost. A weight of NaN raises
  `WeightRefused` on every rank.
"""

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
"""Dtypes of factors, in the order of their numbers in headers."""

_NO_DTYPE = -1
"""The number in the header of a rank that has no rows."""

_TAGS = 4
"""Tags per layer: for headers, factors of outputs, factors of inputs, and rows of the sum."""


class _FactorHeader(NamedTuple):
    """What a rank sends of its factors before the factors: three numbers in float64."""

    rows: int
    """Rows of both factors."""
    dtype: int
    """Position of their dtype in `_DTYPES`."""
    weight: float
    """Samples that the rank counts for."""


@dataclass
class _Gathering:
    """The exchange of one layer's factors in one step."""

    layer: FactoredLayer
    world_ranks: tuple[int, ...]
    """The world ranks of all ranks, for error messages."""
    outputs: Tensor = field(default_factory=lambda: torch.empty(0))
    """Factors of outputs: of this rank, later of all ranks by rank. With "owners" it is at last the whole mean."""
    inputs: Tensor = field(default_factory=lambda: torch.empty(0))
    """Factors of inputs: of this rank, and later of all ranks by rank."""
    headers: list[_FactorHeader] = field(default_factory=list)
    """Headers of all ranks."""
    done: Work = field(default_factory=CompletedWork)
    """The operation under way."""

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of all ranks' factors. More than one is an error."""
        return [_DTYPES[number] for number in sorted({header.dtype for header in self.headers} - {_NO_DTYPE})]

    @property
    def shares(self) -> list[float]:
        """Each rank's share of the samples; together 1. Raises `WeightRefused` if a weight is NaN."""
        weights = [header.weight for header in self.headers]
        if bad := [rank for rank, weight in zip(self.world_ranks, weights, strict=True) if math.isnan(weight)]:
            raise WeightRefused(bad)
        # Also all 0: then all ranks count alike, as in `weigh`.
        if len(set(weights)) == 1:
            return [1 / len(weights)] * len(weights)
        return [weight / sum(weights) for weight in weights]

    @property
    def counts(self) -> bool:
        """Whether any rank with a share of the samples has rows. Otherwise there is no gradient."""
        return any(header.rows and share for header, share in zip(self.headers, self.shares, strict=True))

    def weighed(self) -> tuple[Tensor, Tensor]:
        """Return all factors in the dtype of the weight, each rank's outputs scaled by its share."""
        dtype = self.layer.slot.tensor.dtype
        # Outputs: all rows × M; inputs: all rows × N. `split` below gives views, so scaling them is in place.
        outputs, inputs = self.outputs.to(dtype), self.inputs.to(dtype)
        sizes = [header.rows for header in self.headers]
        rows = zip(outputs.split(sizes), inputs.split(sizes), self.shares, strict=True)
        for rank_outputs, rank_inputs, share in rows:
            if share == 0:  # Not a product: 0 × NaN would still be NaN.
                rank_inputs.zero_()
                rank_outputs.zero_()
            else:
                rank_outputs.mul_(share)
        return outputs, inputs


class FactorSums:
    """Exchanges the factors of layers while backward runs, and multiplies them when backward is over."""

    def __init__(self, transport: Transport, compute_clock: GradientClock | None) -> None:
        self._transport = transport
        self._compute_clock = compute_clock
        self._others = [(transport.rank + step) % transport.size for step in range(1, transport.size)]
        self._methods: dict[str, Method] = {}
        self._weight = 1.0
        self._under_way: list[_Gathering] = []

    @property
    def bytes_sent(self) -> int:
        return self._transport.bytes_sent

    def follow(self, methods: dict[str, Method]) -> None:
        """Exchange the factors of these parameters by these methods from now on."""
        self._methods = methods

    def begin(self, weight: float) -> None:
        """Start a backward pass in which this rank counts for `weight` samples."""
        self._weight = weight

    def start(self, layer: FactoredLayer) -> None:
        """Start to exchange the factors of a layer. All ranks start the same layers, in any order."""
        # From `_TAGS` on: the sums in `finish` use tag 0 of this channel.
        tag = _TAGS * (1 + sorted(self._methods).index(layer.slot.name))
        if layer.slot.tensor.is_meta:
            layer.handed_over = True
            done = self._transport.spawn(self._sized(layer, tag))
            self._under_way.append(_Gathering(layer, self._transport.world_ranks, done=done))
            return
        # One pair (E, A) per forward pass of the layer; a rank without samples has none.
        pairs = layer.hand_over()
        tensor = layer.slot.tensor
        outputs = torch.cat([e for e, _ in pairs]) if pairs else tensor.new_empty(0, layer.num_out)
        inputs = torch.cat([a for _, a in pairs]) if pairs else tensor.new_empty(0, layer.num_in)
        gathering = _Gathering(layer, self._transport.world_ranks, outputs.cpu(), inputs.cpu())
        steps = self._broadcast if self._methods[layer.slot.name] == "broadcast" else self._owned
        gathering.done = self._transport.spawn(when_filled(outputs, steps(gathering, tag)))
        self._under_way.append(gathering)

    def finish(self, layers: list[FactoredLayer]) -> frozenset[str]:
        """Make the mean over ranks the gradient of every layer. Collective.

        Returns: names of the layers of which some rank's factors did not hold the whole gradient.
        """
        # Cloned, because `_multiply` overwrites the memory of gradients.
        kept = {layer.slot.name: _clone(layer.slot.tensor.grad) for layer in layers if layer.has_more}
        more = torch.tensor([float(layer.slot.name in kept) for layer in layers], device="cpu")
        # A sum of 0s and 1s: above 0 where any rank has more.
        known = self._transport.spawn(recursive_doubling.steps(more, self._transport))
        for gathering in self._under_way:  # Later ones arrive meanwhile.
            gathering.done.wait()
            if self._compute_clock is not None:
                self._compute_clock.operations(self._operations(gathering))
            self._multiply(gathering)
        known.wait()
        partial = frozenset(layer.slot.name for layer, any_rank_has in zip(layers, more, strict=True) if any_rank_has)
        # Backward may fill layers in another order on other ranks: the sums below need one order on all of them.
        for gathering in sorted(self._under_way, key=lambda gathering: gathering.layer.slot.name):
            slot = gathering.layer.slot
            if slot.name in partial:
                # A rank that has no more than its factors takes part with zeros.
                slot.view.add_(self._mean(kept.get(slot.name, torch.zeros_like(slot.view)), gathering))
            if not slot.tensor.is_meta and (gathering.counts or slot.name in partial):
                slot.tensor.grad = slot.view
        self._under_way.clear()
        return partial

    def _operations(self, gathering: _Gathering) -> float:
        """Return the operations of products with other ranks' rows. Those with its own rows are part of backward."""
        layer, others = gathering.layer, len(self._others)
        # Dry runs have no headers: there all ranks have as many rows as this one.
        rows = sum(header.rows for header in gathering.headers) * others / (others + 1) or others * layer.rows
        parts_made = 1 if self._methods[layer.slot.name] == "broadcast" else others + 1
        return 2.0 * rows * layer.num_out * layer.num_in / parts_made

    def _multiply(self, gathering: _Gathering) -> None:
        """Store the mean in the layer's memory for gradients. `finish` has saved what is still needed of it."""
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
        """Return the weighted mean over ranks of a part of the gradient that factors do not hold."""
        weights = torch.tensor([header.weight for header in gathering.headers], dtype=torch.float64)
        weigh(tensor, weights, self._transport)
        self._transport.spawn(ring.steps(tensor, self._transport)).wait()
        return tensor.div_(self._transport.size)

    # Operations

    def _sized(self, layer: FactoredLayer, tag: int) -> Operation:
        """Send the same messages without values, for dry runs: all ranks have as many rows."""
        tensor, size = layer.slot.tensor, self._transport.size
        split = self._methods[layer.slot.name] == "owners"
        # Rounded up, so that every rank is priced as the one with the largest share.
        num_owned_outputs = -(-layer.num_out // size) if split else layer.num_out
        factors = [
            SizeOnlyTensor(layer.rows * width, tensor.dtype, tensor.itemsize)
            for width in (num_owned_outputs, layer.num_in)
        ]
        yield from self._all_to_all([SizeOnlyTensor(len(_FactorHeader._fields), torch.float64, 8), *factors], tag)
        if split:
            block = SizeOnlyTensor(num_owned_outputs * layer.num_in, tensor.dtype, tensor.itemsize)
            yield from self._all_to_all([block], tag + 3)

    def _all_to_all(self, tensors: list[SizeOnlyTensor], tag: int) -> list[Work]:
        """Send each of these to all other ranks, and receive as much from each of them."""
        messages = [(number, cast(Tensor, tensor)) for number, tensor in enumerate(tensors)]
        sending = [
            self._transport.isend(tensor, peer, tag + number) for number, tensor in messages for peer in self._others
        ]
        receiving = [
            self._transport.irecv(tensor, peer, tag + number) for number, tensor in messages for peer in self._others
        ]
        return receiving + sending

    def _broadcast(self, gathering: _Gathering, tag: int) -> Operation:
        """Exchange factors by sufficient factor broadcasting: all factors to all ranks."""
        # Contiguous, since messages are flat memory; kept in `local` so that it lives until the sends below are
        # complete.
        local = gathering.outputs.contiguous(), gathering.inputs.contiguous()
        sending = self._send_headers(gathering, tag)
        for number, part in enumerate(local):
            sending += self._send(dict.fromkeys(self._others, part), tag + 1 + number)
        # Ranks may have different numbers of rows (a shorter last batch), so buffers can be made only now.
        yield from self._receive_headers(gathering, tag)
        buffers = [self._buffer_for(gathering, part) for part in local]
        receiving = [self._receive(buffer, gathering, tag + 1 + number) for number, buffer in enumerate(buffers)]
        yield from receiving[0] + receiving[1] + sending
        gathering.outputs, gathering.inputs = buffers

    def _owned(self, gathering: _Gathering, tag: int) -> Operation:
        """Send factors to the owners of rows of the matrix. Each owner multiplies its rows, and sends them to all."""
        rank, layer = self._transport.rank, gathering.layer
        owned = parts(layer.num_out, self._transport.size)
        sending = self._send_headers(gathering, tag)
        # Each owner needs its columns of E (K × its share of M) and all of A (K × N).
        by_owner = {peer: gathering.outputs[:, owned[peer]].contiguous() for peer in self._others}
        inputs = gathering.inputs.contiguous()
        sending += self._send(by_owner, tag + 1) + self._send(dict.fromkeys(self._others, inputs), tag + 2)
        yield from self._receive_headers(gathering, tag)
        buffers = [self._buffer_for(gathering, part) for part in (gathering.outputs[:, owned[rank]], inputs)]
        yield from self._receive(buffers[0], gathering, tag + 1) + self._receive(buffers[1], gathering, tag + 2)
        gathering.outputs, gathering.inputs = buffers
        # Row block r of the mean (M/P × N) is computed by rank r.
        matrix = torch.empty(layer.num_out, layer.num_in, dtype=layer.slot.tensor.dtype, device="cpu")
        blocks = [matrix[rows] for rows in owned]
        _multiply(*gathering.weighed(), blocks[rank])
        sending += self._send(dict.fromkeys(self._others, blocks[rank]), tag + 3)
        # With fewer outputs than ranks, some own no rows, and send none.
        owners = [peer for peer in self._others if len(blocks[peer])]
        receiving = [self._transport.irecv(blocks[peer].view(-1), peer, tag + 3) for peer in owners]
        yield from receiving + sending
        gathering.outputs = matrix

    def _send_headers(self, gathering: _Gathering, tag: int) -> list[Work]:
        """Send this rank's header to all others."""
        rows = len(gathering.outputs)
        local_header = _FactorHeader(rows, _DTYPES.index(gathering.outputs.dtype) if rows else _NO_DTYPE, self._weight)
        gathering.headers = [local_header] * self._transport.size  # Others' are filled in when they arrive.
        header = torch.tensor(local_header, dtype=torch.float64, device="cpu")
        return [self._transport.isend(header, peer, tag) for peer in self._others]

    def _receive_headers(self, gathering: _Gathering, tag: int) -> Operation:
        """Receive the headers of all other ranks. Raises `ConfigError` if dtypes differ."""
        headers = torch.empty(self._transport.size, len(_FactorHeader._fields), dtype=torch.float64, device="cpu")
        headers[self._transport.rank] = torch.tensor(gathering.headers[self._transport.rank], dtype=torch.float64)
        yield from [self._transport.irecv(headers[peer], peer, tag) for peer in self._others]
        gathering.headers = [_FactorHeader(int(rows), int(dtype), weight) for rows, dtype, weight in headers.tolist()]
        if len(dtypes := gathering.dtypes) > 1:
            names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ConfigError(
                f"rank {self._transport.world_rank}: factors of '{gathering.layer.slot.name}' come in {names}. "
                "Use autocast alike on all ranks."
            )

    def _send(self, by_peer: dict[int, Tensor], tag: int) -> list[Work]:
        """Send each rank its tensor. Empty ones are not sent, because the header has announced no rows."""
        return [self._transport.isend(part.view(-1), peer, tag) for peer, part in by_peer.items() if part.numel()]

    def _receive(self, buffer: Tensor, gathering: _Gathering, tag: int) -> list[Work]:
        """Receive all other ranks' rows into `buffer`."""
        rows = buffer.split([header.rows for header in gathering.headers])
        return [self._transport.irecv(rows[peer].view(-1), peer, tag) for peer in self._others if rows[peer].numel()]

    def _buffer_for(self, gathering: _Gathering, local: Tensor) -> Tensor:
        """Return a buffer for all ranks' rows, with this rank's filled in."""
        # A rank without rows does not know the dtype of the others: their headers tell.
        dtype = gathering.dtypes[0] if gathering.dtypes else local.dtype
        sizes = [header.rows for header in gathering.headers]
        buffer = torch.empty(sum(sizes), local.shape[1], dtype=dtype, device="cpu")
        buffer.split(sizes)[self._transport.rank].copy_(local)
        return buffer


def _multiply(outputs: Tensor, inputs: Tensor, out: Tensor) -> None:
    """Store Eᵀ A in `out`."""
    matrix = out.view(outputs.shape[1], inputs.shape[1]) if out.is_contiguous() else None
    # Straight into the gradient where that is possible; otherwise through a temporary matrix.
    if matrix is not None and out.device == outputs.device:
        torch.mm(outputs.t(), inputs, out=matrix)
    else:
        out.copy_(torch.mm(outputs.to(out.device).t(), inputs.to(out.device)).view(out.shape))


def _clone(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.clone()
