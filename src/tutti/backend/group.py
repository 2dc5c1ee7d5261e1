"""A process group of torch.distributed over a Tutti transport."""

# mypy: disable-error-code="override, assignment"
# Torch's stubs name the arguments of methods of one meaning differently, and differently again in its next version.

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from tutti.backend.collectives import Collectives
from tutti.backend.operation_queue import OperationQueue
from tutti.backend.operators import ReduceOperator, operator
from tutti.backend.tensors import Flats
from tutti.backend.validate import Check
from tutti.backend.work import BackendWork, CoalescedWork
from tutti.transports.base import ANY, Operation, Transport, Work


class TuttiGroup(dist.ProcessGroup):
    """All that torch.distributed asks of a group. What all its ranks do together happens in the order asked."""

    def __init__(
        self, collectives: Collectives, lane: OperationQueue, messages: Transport, me: int, close: Callable[[], None]
    ) -> None:
        """Serve the ranks that `messages` joins; `me` is this one's number in the whole world, for error messages."""
        super().__init__(messages.rank, messages.size)  # type: ignore[call-arg]
        self._collectives, self._lane, self._messages, self._me = collectives, lane, messages, me
        self._check = Check(me, messages.size)
        self._close: Callable[[], None] | None = close
        self._name = self._description = "undefined"
        self._coalesced: list[BackendWork] | None = None

    # Who it is

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def getBackendName(self) -> str:
        return "tutti"

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def shutdown(self) -> None:
        """Leave: peers that still wait for this rank here are told. Idempotent."""
        if self._close is not None:
            close, self._close = self._close, None
            close()

    abort = shutdown

    # Reductions

    def allreduce(self, tensors: Any, opts: Any = None, **given: Any) -> BackendWork:
        opts = opts or c10d.AllreduceOptions()
        (tensor,) = self._check.only(tensors, "all_reduce")
        flats, found = self._reducible(tensor, opts)
        (flat,) = flats.inout(tensor)
        return self._ask(flats, self._reduced(self._collectives.all_reduce(flat, found), flat, found, tensor), opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> BackendWork:
        opts = opts or c10d.AllreduceCoalescedOptions()
        flats, found = self._reducible(tensors[0], opts)
        parts = flats.inout(*tensors)
        return self._ask(flats, self._all_reduce_joined(parts, found, tensors[0]), opts)

    def _all_reduce_joined(self, parts: list[Tensor], found: ReduceOperator, like: Tensor) -> Operation:
        """One reduction of all tensors together, as Gloo makes it."""
        joined = torch.cat(parts)
        yield from self._reduced(self._collectives.all_reduce(joined, found), joined, found, like)
        for part, result in zip(parts, joined.split([part.numel() for part in parts]), strict=True):
            part.copy_(result)

    def reduce(self, tensors: Any, opts: Any = None, **given: Any) -> BackendWork:
        opts = opts or c10d.ReduceOptions()
        (tensor,) = self._check.only(tensors, "reduce")
        flats, found = self._reducible(tensor, opts)
        (flat,) = flats.inout(tensor)
        steps = self._collectives.reduce(flat, found, opts.rootRank)
        return self._ask(flats, self._reduced(steps, flat, found, tensor), opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, **given: Any) -> BackendWork:
        opts = opts or c10d.ReduceScatterOptions()
        (output,), (tensors,) = self._check.only(outputs, "reduce_scatter"), self._check.only(inputs, "reduce_scatter")
        flats, found = self._reducible(output, opts)
        parts = flats.inputs(*self._check.one_each(tensors, "reduce_scatter"))
        (mine,) = flats.outputs(output)
        steps = self._collectives.reduce_parts(mine, parts, found)
        return self._ask(flats, self._reduced(steps, mine, found, output), opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> BackendWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> BackendWork:
        opts = opts or c10d.ReduceScatterOptions()
        flats, found = self._reducible(outputs[0], opts)
        steps = []
        for output, whole in zip(outputs, inputs, strict=True):
            self._check.sizes("reduce_scatter_tensor", whole, output)
            (flat,), (mine,) = flats.inputs(whole), flats.outputs(output)
            made = self._collectives.reduce_scatter(mine, flat, found)
            steps.append(self._reduced(made, mine, found, output))
        return self._ask(flats, _one_by_one(steps), opts)

    def _reduced(self, steps: Operation, result: Tensor, found: ReduceOperator, tensor: Tensor) -> Operation:
        yield from steps
        found.conclude(result, self.size(), tensor.dtype)

    # Copies

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **given: Any) -> BackendWork:
        opts = opts or c10d.AllgatherOptions()
        (everyones,), (tensor,) = self._check.only(outputs, "all_gather"), self._check.only(inputs, "all_gather")
        flats = Flats(self._me)
        (mine,) = flats.inputs(tensor)
        gathered = flats.outputs(*self._check.one_each(everyones, "all_gather", like=tensor))
        return self._ask(flats, self._collectives.all_gather(gathered, mine), opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> BackendWork:
        opts = opts or c10d.AllgatherOptions()
        flats, steps = Flats(self._me), []
        for number, tensor in enumerate(inputs):
            (mine,) = flats.inputs(tensor)
            everyones = self._check.one_each([each[number] for each in outputs], "all_gather", like=tensor)
            steps.append(self._collectives.all_gather(flats.outputs(*everyones), mine))
        return self._ask(flats, _one_by_one(steps), opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> BackendWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> BackendWork:
        opts = opts or c10d.AllgatherOptions()
        flats, steps = Flats(self._me), []
        for whole, tensor in zip(outputs, inputs, strict=True):
            self._check.sizes("all_gather_into_tensor", whole, tensor)
            (mine,), (flat,) = flats.inputs(tensor), flats.outputs(whole)
            parts = list(flat.split(mine.numel())) if mine.numel() else [flat] * self.size()
            steps.append(self._collectives.all_gather(parts, mine))
        return self._ask(flats, _one_by_one(steps), opts)

    def broadcast(self, tensors: Any, opts: Any = None, **given: Any) -> BackendWork:
        opts = opts or c10d.BroadcastOptions()
        (tensor,) = self._check.only(tensors, "broadcast")
        flats = Flats(self._me)
        (flat,) = flats.inout(tensor)
        return self._ask(flats, self._collectives.broadcast(flat, opts.rootRank), opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, **given: Any) -> BackendWork:
        opts = opts or c10d.GatherOptions()
        (tensor,) = self._check.only(inputs, "gather")
        flats, everyones = Flats(self._me), None
        (mine,) = flats.inputs(tensor)
        if self.rank() == opts.rootRank:
            (tensors,) = self._check.only(outputs, "gather")
            everyones = flats.outputs(*self._check.one_each(tensors, "gather", like=tensor))
        return self._ask(flats, self._collectives.gather(everyones, mine, opts.rootRank), opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, **given: Any) -> BackendWork:
        opts = opts or c10d.ScatterOptions()
        (tensor,) = self._check.only(outputs, "scatter")
        flats, parts = Flats(self._me), None
        if self.rank() == opts.rootRank:
            (tensors,) = self._check.only(inputs, "scatter")
            parts = flats.inputs(*self._check.one_each(tensors, "scatter", like=tensor))
        (mine,) = flats.outputs(tensor)
        return self._ask(flats, self._collectives.scatter(mine, parts, opts.rootRank), opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, **given: Any) -> BackendWork:
        opts = opts or c10d.AllToAllOptions()
        flats = Flats(self._me)
        sent = flats.inputs(*self._check.one_each(inputs, "all_to_all"))
        received = flats.outputs(*self._check.one_each(outputs, "all_to_all"))
        return self._ask(flats, self._collectives.all_to_all(received, sent), opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
        **given: Any,
    ) -> BackendWork:
        opts = opts or c10d.AllToAllOptions()
        flats = Flats(self._me)
        (whole,), (room,) = flats.inputs(input), flats.outputs(output)
        sent = self._check.split(whole, input, input_splits, "input")
        received = self._check.split(room, output, output_splits, "output")
        return self._ask(flats, self._collectives.all_to_all(received, sent), opts)

    def barrier(self, opts: Any = None, **given: Any) -> BackendWork:
        return self._ask(Flats(self._me), self._collectives.barrier(), opts or c10d.BarrierOptions())

    # Messages

    def send(self, tensors: Any, dst: int, tag: int = 0) -> BackendWork:
        (tensor,) = self._check.only(tensors, "send")
        flats = Flats(self._me)
        (flat,) = flats.inputs(tensor)

        def steps() -> Operation:
            yield self._messages.isend(flat, dst, tag)

        return self._tell(flats, steps())

    def recv(self, tensors: Any, src: int, tag: int = 0) -> BackendWork:
        (tensor,) = self._check.only(tensors, "recv")
        flats = Flats(self._me)
        (flat,) = flats.outputs(tensor)
        operation = BackendWork(self._me, [tensor])

        def steps() -> Operation:
            receiving: Work = self._messages.irecv(flat, src, tag)
            yield receiving
            operation.source = receiving.source if src == ANY else src

        return self._tell(flats, steps(), operation)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> BackendWork:
        return self.recv(tensors, ANY, tag)

    # Other names of the same, in versions of torch from 2.9 on

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Several at once

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> CoalescedWork:
        operations, self._coalesced = self._coalesced or [], None
        return CoalescedWork(operations)

    # What they have in common

    def _ask(self, flats: Flats, steps: Operation, opts: Any) -> BackendWork:
        operation = BackendWork(self._me, flats.filled)
        self._lane.collective(operation, flats.landed(steps), here=not getattr(opts, "asyncOp", True))
        return self._noted(operation)

    def _tell(self, flats: Flats, steps: Operation, operation: BackendWork | None = None) -> BackendWork:
        operation = operation or BackendWork(self._me, flats.filled)
        self._lane.message(operation, flats.landed(steps))
        return self._noted(operation)

    def _noted(self, operation: BackendWork) -> BackendWork:
        if self._coalesced is not None:
            self._coalesced.append(operation)
        return operation

    def _reducible(self, tensor: Tensor, opts: Any) -> tuple[Flats, ReduceOperator]:
        return Flats(self._me), operator(opts.reduceOp, tensor.dtype, self._me)


def _one_by_one(steps: list[Operation]) -> Operation:
    for each in steps:
        yield from each
