"""Sums in the shared memory of one simulated host: the same bits as real shared memory, in the time it would take.

How it works
------------
The n-th sum of every rank of a channel is one `_HostSum`, found by its number in `channel.host_sums`. A rank joins it
with its tensor and weight, and gets back an `_Operand`: the work to wait for. The rank that joins last removes the
`_HostSum` from the channel, computes the sum with the kernels of the real shared-memory transport, and writes it into
all tensors. That is allowed because every other rank has promised not to touch its tensor before its work is done.

All operands end at the same virtual time: when the last rank has joined, and twice the time of a message of that size
within the host (every byte is read once and written once, between two barriers).

If a rank closes the channel, every sum that it has not joined fails on the others (`_HostSum.fail`, called by
`SimulatedChannel.close`). A sum that is joined after that fails at once.
"""

import math
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor

from tutti.errors import ConfigError, ReplicaMismatch, WeightRefused
from tutti.simulation.channel import SimulatedChannel
from tutti.simulation.rank import Rank
from tutti.simulation.transport import SimulatedTransport
from tutti.simulation.work import SimulatedWork
from tutti.transports.base import TransportWrapper, Work


class _Operand(SimulatedWork):
    """The tensor and weight of one rank in a sum, and the work of waiting for the result."""

    def __init__(self, rank: Rank, tensor: Tensor, weight: float, averaged: bool) -> None:
        super().__init__(rank)
        self.tensor, self.weight, self.averaged = tensor, weight, averaged
        self.posted_s = rank.time

    def describe(self) -> str:
        return "all ranks of its host to take part in a sum"


class _HostSum:
    """A sum over all ranks of a host, made when the last of them has joined."""

    def __init__(self, channel: SimulatedChannel, number: int) -> None:
        self._channel = channel
        self._number = number
        self._operands: dict[int, _Operand] = {}

    def join(self, rank: int, operand: _Operand) -> None:
        """Add a rank's operand; the last one makes the sum."""
        self._operands[rank] = operand
        # A rank that left without having joined never will.
        for lost in self._channel.closed:
            self.fail(lost)
        if len(self._operands) == len(self._channel.ranks):
            del self._channel.host_sums[self._number]
            # In the order of ranks, not of joining: rounding then does not depend on who was last.
            self._compute([self._operands[rank] for rank in range(len(self._operands))])

    def fail(self, lost: int) -> None:
        """Fail all operands, unless the rank that is gone has joined."""
        if lost not in self._operands:
            for operand in self._operands.values():
                operand.fail(self._channel.loss_error(operand.rank, lost))

    def _compute(self, operands: list[_Operand]) -> None:
        """Sum what all ranks brought, and complete the work of each of them at the same virtual time."""
        error = _mismatch(operands)
        if error is None and not operands[0].tensor.is_meta:
            _sum_in_place(operands)
        # Two barriers; every byte is read once and written once.
        spent_s = 2 * self._channel.network.cluster.within.seconds(operands[0].tensor.nbytes)
        # All end together: until the last rank has joined, none may touch its tensor.
        finish_s = max(operand.posted_s for operand in operands) + spent_s
        for operand in operands:
            operand.rank.travel.add(finish_s - spent_s, finish_s)
            operand.error = error  # The same on all ranks, raised by each one's wait.
            operand.complete(finish_s)


def _mismatch(operands: list[_Operand]) -> Exception | None:
    """Return why these cannot be summed, the same for every rank; None if they can."""
    requests = [(operand.tensor.numel(), operand.tensor.dtype, operand.averaged) for operand in operands]
    if any(request != requests[0] for request in requests):
        shapes = "; ".join(
            f"rank {operand.rank.number}: {numel} × {dtype}"
            for operand, (numel, dtype, _) in zip(operands, requests, strict=True)
        )
        return ReplicaMismatch(f"all-reduce of tensors that differ in length or dtype: {shapes}.")
    if bad := [operand.rank.number for operand in operands if math.isnan(operand.weight)]:
        return WeightRefused(bad)
    return None


def _sum_in_place(operands: list[_Operand]) -> None:
    """Replace every rank's tensor by the weighted sum, or mean, with the kernels of the real shared memory."""
    from tutti.transports.shared_memory.reduction import KERNELS, combine  # Imports a compiler, which is slow.

    weights = np.array([operand.weight for operand in operands])
    equal = bool((weights == weights[0]).all())
    divisor = 1.0 if not operands[0].averaged else float(len(operands)) if equal else float(weights.sum())
    if equal:
        weights[:] = 1.0  # As the real transport does: multiplying by equal weights would round differently.
    tensors = [operand.tensor for operand in operands]
    flats = [tensor.contiguous().view(-1) for tensor in tensors]
    if (kernel := KERNELS.get(tensors[0].dtype)) is not None:
        addresses = np.array([flat.data_ptr() for flat in flats])
        # Reads all tensors and writes all tensors: sources and destinations are the same.
        kernel(addresses, addresses, 0, flats[0].numel(), weights, divisor)
    else:
        combine(flats, weights.tolist(), divisor)
    for tensor, flat in zip(tensors, flats, strict=True):
        if flat.data_ptr() != tensor.data_ptr():  # It was not contiguous, and a copy was summed.
            tensor.copy_(flat.view(tensor.shape))


class SimulatedSharedMemory(TransportWrapper):
    """Ranks of one simulated host: sums and means are made in memory, messages go through `inner`."""

    inner: SimulatedTransport

    def __init__(self, inner: SimulatedTransport) -> None:
        self.inner = inner
        self.rank, self.size, self.hosts = inner.rank, inner.size, inner.hosts
        self.cluster, self.seed = inner.cluster, inner.seed
        self._reduced_bytes = 0
        self._num_sums = 0

    @property
    def timeout(self) -> timedelta:  # type: ignore[override]
        return self.inner.timeout

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        return self.inner.bytes_sent + self._reduced_bytes

    def channel(self, name: str, ranks: Sequence[int] | None = None) -> "SimulatedSharedMemory":
        return SimulatedSharedMemory(self.inner.channel(name, ranks))

    def interrupt(self) -> None:
        self.inner.interrupt()

    def close(self) -> None:
        self.inner.close()

    def all_reduce(self, tensor: Tensor) -> Work:
        return self._join_sum(tensor, 1.0, averaged=False)

    def average(self, tensor: Tensor, weight: float) -> Work:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ConfigError(f"the mean of {tensor.dtype} tensors is not an integer; use a sum.")
        return self._join_sum(tensor, weight, averaged=True)

    def broadcast(self, tensor: Tensor) -> Work:
        # A sum in which all ranks but rank 0 have weight 0.
        return self._join_sum(tensor, float(self.rank == 0), averaged=False)

    def _join_sum(self, tensor: Tensor, weight: float, averaged: bool) -> Work:
        """Bring this rank's tensor to the next sum of its host; the last rank to join computes it."""
        me, channel = self.inner.member()
        self._reduced_bytes += tensor.nbytes
        data = tensor.detach()
        # The kernels know real numbers only; the sum of complex ones is that of both parts.
        operand = _Operand(me, torch.view_as_real(data) if data.is_complex() else data, weight, averaged)
        number = self._num_sums  # Ranks call collectives in the same order, so numbers match between them.
        self._num_sums += 1
        if number not in channel.host_sums:
            channel.host_sums[number] = _HostSum(channel, number)
        channel.host_sums[number].join(self.rank, operand)
        return operand
