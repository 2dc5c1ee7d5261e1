"""Ranks of one simulated host: sums as in shared memory, to the bit, in the time that memory would take."""

import math
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor

from tutti.errors import ConfigError, ReplicaMismatch, WeightRefused
from tutti.simulation.messages import SimulatedChannel
from tutti.simulation.rank import Rank
from tutti.simulation.transport import SimulatedTransport
from tutti.simulation.work import Pending
from tutti.transports.base import TransportWrapper, Work


class _SumOperand(Pending):
    """One rank's part in a sum over all."""

    def __init__(self, rank: Rank, tensor: Tensor, weight: float, averaged: bool) -> None:
        super().__init__(rank)
        self.tensor, self.weight, self.averaged = tensor, weight, averaged
        self.posted_s = rank.time

    def describe(self) -> str:
        return "all ranks of its host to take part in a sum"


class _HostSum:
    """A sum that all ranks of a host take part in: made when the last of them has come."""

    def __init__(self, channel: SimulatedChannel, number: int) -> None:
        self._channel = channel
        self._number = number
        self._parts: dict[int, _SumOperand] = {}

    def join(self, rank: int, part: _SumOperand) -> None:
        self._parts[rank] = part
        for gone in self._channel.closed:
            self.fail(gone)
        if len(self._parts) == len(self._channel.ranks):
            del self._channel.host_sums[self._number]
            self._conclude([self._parts[number] for number in range(len(self._parts))])

    def fail(self, gone: int) -> None:
        """A rank has gone: unless it has done its part, this comes to nothing."""
        if gone not in self._parts:
            for part in self._parts.values():
                part.fail(self._channel.lost(part.rank, gone))

    def _conclude(self, parts: list[_SumOperand]) -> None:
        refused = _refusal(parts)
        if refused is None and not parts[0].tensor.is_meta:
            _add_up(parts)
        # Two barriers; every byte is read once and written once.
        spent_s = 2 * self._channel.network.cluster.within.seconds(parts[0].tensor.nbytes)
        finish_s = max(part.posted_s for part in parts) + spent_s
        for part in parts:
            part.rank.moving(finish_s - spent_s, finish_s)
            part.error = refused
            part.complete(finish_s)


def _refusal(parts: list[_SumOperand]) -> Exception | None:
    """Why this cannot be summed, the same for every rank."""
    asked = [(part.tensor.numel(), part.tensor.dtype, part.averaged) for part in parts]
    if any(each != asked[0] for each in asked):
        what = "; ".join(
            f"rank {part.rank.number}: {numel} × {dtype}" for part, (numel, dtype, _) in zip(parts, asked, strict=True)
        )
        return ReplicaMismatch(f"all-reduce of tensors that differ in length or dtype: {what}.")
    if bad := [number for number, part in enumerate(parts) if math.isnan(part.weight)]:
        return WeightRefused(bad)
    return None


def _add_up(parts: list[_SumOperand]) -> None:
    """Replace every rank's tensor by the weighted sum, or mean: as shared memory does it, to the bit."""
    from tutti.transports.shared_memory.reduction import KERNELS, combine  # Costs a compiler's import.

    weights = np.array([part.weight for part in parts])
    equal = bool((weights == weights[0]).all())
    divisor = 1.0 if not parts[0].averaged else float(len(parts)) if equal else float(weights.sum())
    if equal:
        weights[:] = 1.0
    tensors = [part.tensor for part in parts]
    flats = [tensor.contiguous().view(-1) for tensor in tensors]
    if (kernel := KERNELS.get(tensors[0].dtype)) is not None:
        addresses = np.array([flat.data_ptr() for flat in flats])
        kernel(addresses, addresses, 0, flats[0].numel(), weights, divisor)
    else:
        combine(flats, weights.tolist(), divisor)
    for tensor, flat in zip(tensors, flats, strict=True):
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))


class SimulatedMemory(TransportWrapper):
    """Ranks of one host. Sums and means are made in memory; messages go through `inner`."""

    inner: SimulatedTransport

    def __init__(self, inner: SimulatedTransport) -> None:
        self.inner = inner
        self.rank, self.size, self.hosts = inner.rank, inner.size, inner.hosts
        self.cluster, self.seed = inner.cluster, inner.seed
        self._reduced_bytes = 0
        self._number = 0

    @property
    def timeout(self) -> timedelta:  # type: ignore[override]
        return self.inner.timeout

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        return self.inner.bytes_sent + self._reduced_bytes

    def channel(self, name: str, ranks: Sequence[int] | None = None) -> "SimulatedMemory":
        return SimulatedMemory(self.inner.channel(name, ranks))

    def interrupt(self) -> None:
        self.inner.interrupt()

    def close(self) -> None:
        self.inner.close()

    def all_reduce(self, tensor: Tensor) -> Work:
        return self._add_to_sum(tensor, 1.0, averaged=False)

    def average(self, tensor: Tensor, weight: float) -> Work:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ConfigError(f"the mean of {tensor.dtype} tensors is not an integer; use a sum.")
        return self._add_to_sum(tensor, weight, averaged=True)

    def broadcast(self, tensor: Tensor) -> Work:
        return self._add_to_sum(
            tensor, float(self.rank == 0), averaged=False
        )  # A sum with weight 0 for all but rank 0.

    def _add_to_sum(self, tensor: Tensor, weight: float, averaged: bool) -> Work:
        me, channel = self.inner.member()
        self._reduced_bytes += tensor.nbytes
        data = tensor.detach()
        part = _SumOperand(me, torch.view_as_real(data) if data.is_complex() else data, weight, averaged)
        number = self._number
        self._number += 1
        if number not in channel.host_sums:
            channel.host_sums[number] = _HostSum(channel, number)
        channel.host_sums[number].join(self.rank, part)
        return part
