"""A process group of torch.distributed over a Tutti transport.

Each method checks its arguments, makes flat CPU tensors of them, and submits an operation to the `OperationQueue`,
which runs collectives in the order of the calls. The work it returns is completed when the results are in the
caller's tensors.
"""

# mypy: disable-error-code="override, assignment"
# Torch's stubs name the arguments of equivalent methods differently, and change them between versions.

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from tutti.backend.collectives import Collectives
from tutti.backend.operation_queue import OperationQueue
from tutti.backend.operators import ReduceOperator, reduce_operator
from tutti.backend.tensors import FlatTensors
from tutti.backend.validate import ArgumentCheck
from tutti.backend.work import BackendWork, CoalescedWork
from tutti.transports.base import ANY, Operation, Transport, Work


class TuttiGroup(dist.ProcessGroup):
    """Torch's `ProcessGroup` interface. All ranks call the same collectives in the same order."""

    def __init__(
        self,
        collectives: Collectives,
        queue: OperationQueue,
        messages: Transport,
        world_rank: int,
        close: Callable[[], None],
    ) -> None:
        """Make a group of the ranks that `messages` joins.

        Args:
            collectives: makes the operations of collectives.
            queue: runs all operations.
            messages: carries `send` and `recv`.
            world_rank: this rank's number in the whole world, for error messages.
            close: called once by `shutdown`.
        """
        super().__init__(messages.rank, messages.size)  # type: ignore[call-arg]
        self._collectives, self._queue, self._messages = collectives, queue, messages
        self._world_rank = world_rank
        self._check = ArgumentCheck(world_rank, messages.size)
        self._close: Callable[[], None] | None = close
        self._name = self._description = "undefined"
        # None outside of `_start_coalescing` and `_end_coalescing`.
        self._coalesced: list[BackendWork] | None = None
        self.made_by_torch = False
        """Whether `init_process_group` or `new_group` makes this group and keeps it in torch's table."""

    # Identity

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
        # None until `init_process_group` has the group in its table. Since torch 2.15 it attaches a flight recorder to
        # a new group that has devices, and a recorder needs backends in C++, which this group does not have.
        being_made = self.made_by_torch and self not in c10d._world.pg_map
        return [] if being_made else [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> "TuttiGroup":
        """Return what serves tensors on a device: this group, on all of them. Torch asks for what it supports."""
        return self

    def shutdown(self) -> None:
        """Close the group. Peers that still wait for this rank in it fail. Idempotent."""
        if self._close is not None:
            close, self._close = self._close, None
            close()

    abort = shutdown

    # Reductions

    def allreduce(self, tensors: Any, opts: Any = None, **_: Any) -> BackendWork:
        opts = opts or c10d.AllreduceOptions()
        # Torch passes lists, one tensor per device of a rank; like Gloo, this group has one device.
        (tensor,) = self._check.single(tensors, "all_reduce")
        flats, op = self._reducible(tensor, opts)
        (flat,) = flats.inout(tensor)
        return self._submit_collective(
            flats, self._reduced(self._collectives.all_reduce(flat, op), flat, op, tensor), opts
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> BackendWork:
        opts = opts or c10d.AllreduceCoalescedOptions()
        flats, op = self._reducible(tensors[0], opts)
        parts = flats.inout(*tensors)
        return self._submit_collective(flats, self._all_reduce_concatenated(parts, op, tensors[0]), opts)

    def _all_reduce_concatenated(self, parts: list[Tensor], op: ReduceOperator, like: Tensor) -> Operation:
        """Reduce all tensors together, as Gloo does."""
        # As one tensor, because Gloo's blocks are cut from the joined length: separate sums would have other bits.
        joined = torch.cat(parts)
        yield from self._reduced(self._collectives.all_reduce(joined, op), joined, op, like)
        for part, result in zip(parts, joined.split([part.numel() for part in parts]), strict=True):
            part.copy_(result)

    def reduce(self, tensors: Any, opts: Any = None, **_: Any) -> BackendWork:
        opts = opts or c10d.ReduceOptions()
        (tensor,) = self._check.single(tensors, "reduce")
        flats, op = self._reducible(tensor, opts)
        (flat,) = flats.inout(tensor)
        operation = self._collectives.reduce(flat, op, opts.rootRank)
        return self._submit_collective(flats, self._reduced(operation, flat, op, tensor), opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> BackendWork:
        opts = opts or c10d.ReduceScatterOptions()
        (output,) = self._check.single(outputs, "reduce_scatter")
        (tensors,) = self._check.single(inputs, "reduce_scatter")
        flats, op = self._reducible(output, opts)
        parts = flats.inputs(*self._check.one_per_rank(tensors, "reduce_scatter"))
        (result,) = flats.outputs(output)
        operation = self._collectives.reduce_parts(result, parts, op)
        return self._submit_collective(flats, self._reduced(operation, result, op, output), opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> BackendWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> BackendWork:
        """Sum several tensors over ranks, and leave this rank's part of each in its output."""
        opts = opts or c10d.ReduceScatterOptions()
        flats, op = self._reducible(outputs[0], opts)
        operations = []
        for output, full in zip(outputs, inputs, strict=True):
            self._check.full_and_part("reduce_scatter_tensor", full, output)
            (flat,), (result,) = flats.inputs(full), flats.outputs(output)
            operation = self._collectives.reduce_scatter(result, flat, op)
            operations.append(self._reduced(operation, result, op, output))
        # One after the other, as one operation: the caller gets a single work for all of them, as torch's coalescing
        # expects.
        return self._submit_collective(flats, _in_sequence(operations), opts)

    def _reduced(self, operation: Operation, result: Tensor, op: ReduceOperator, tensor: Tensor) -> Operation:
        """Run a reduction of tensors like `tensor`, and turn `result` into what the operator returns."""
        yield from operation
        op.finish(result, self.size(), tensor.dtype)

    # Copies

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> BackendWork:
        opts = opts or c10d.AllgatherOptions()
        (tensors,), (tensor,) = self._check.single(outputs, "all_gather"), self._check.single(inputs, "all_gather")
        flats = FlatTensors(self._world_rank)
        (flat_input,) = flats.inputs(tensor)
        gathered = flats.outputs(*self._check.one_per_rank(tensors, "all_gather", like=tensor))
        return self._submit_collective(flats, self._collectives.all_gather(gathered, flat_input), opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> BackendWork:
        """Gather several tensors; `outputs` has a list for each rank, with a tensor for each input."""
        opts = opts or c10d.AllgatherOptions()
        flats, operations = FlatTensors(self._world_rank), []
        for number, tensor in enumerate(inputs):
            (flat_input,) = flats.inputs(tensor)
            gathered = self._check.one_per_rank([per_rank[number] for per_rank in outputs], "all_gather", like=tensor)
            operations.append(self._collectives.all_gather(flats.outputs(*gathered), flat_input))
        return self._submit_collective(flats, _in_sequence(operations), opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> BackendWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> BackendWork:
        """Gather several tensors, each into one tensor that holds the parts of all ranks in order."""
        opts = opts or c10d.AllgatherOptions()
        flats, operations = FlatTensors(self._world_rank), []
        for full, tensor in zip(outputs, inputs, strict=True):
            self._check.full_and_part("all_gather_into_tensor", full, tensor)
            (flat_input,), (flat,) = flats.inputs(tensor), flats.outputs(full)
            # `split` takes no size of 0: an empty tensor serves as the part of every rank.
            parts = list(flat.split(flat_input.numel())) if flat_input.numel() else [flat] * self.size()
            operations.append(self._collectives.all_gather(parts, flat_input))
        return self._submit_collective(flats, _in_sequence(operations), opts)

    def broadcast(self, tensors: Any, opts: Any = None, **_: Any) -> BackendWork:
        opts = opts or c10d.BroadcastOptions()
        (tensor,) = self._check.single(tensors, "broadcast")
        flats = FlatTensors(self._world_rank)
        (flat,) = flats.inout(tensor)
        return self._submit_collective(flats, self._collectives.broadcast(flat, opts.rootRank), opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> BackendWork:
        opts = opts or c10d.GatherOptions()
        (tensor,) = self._check.single(inputs, "gather")
        flats, gathered = FlatTensors(self._world_rank), None
        (flat_input,) = flats.inputs(tensor)
        if self.rank() == opts.rootRank:
            (tensors,) = self._check.single(outputs, "gather")
            gathered = flats.outputs(*self._check.one_per_rank(tensors, "gather", like=tensor))
        return self._submit_collective(flats, self._collectives.gather(gathered, flat_input, opts.rootRank), opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> BackendWork:
        opts = opts or c10d.ScatterOptions()
        (tensor,) = self._check.single(outputs, "scatter")
        flats, parts = FlatTensors(self._world_rank), None
        if self.rank() == opts.rootRank:
            (tensors,) = self._check.single(inputs, "scatter")
            parts = flats.inputs(*self._check.one_per_rank(tensors, "scatter", like=tensor))
        (result,) = flats.outputs(tensor)
        return self._submit_collective(flats, self._collectives.scatter(result, parts, opts.rootRank), opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, **_: Any) -> BackendWork:
        opts = opts or c10d.AllToAllOptions()
        flats = FlatTensors(self._world_rank)
        sent = flats.inputs(*self._check.one_per_rank(inputs, "all_to_all"))
        received = flats.outputs(*self._check.one_per_rank(outputs, "all_to_all"))
        return self._submit_collective(flats, self._collectives.all_to_all(received, sent), opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
        **_: Any,
    ) -> BackendWork:
        opts = opts or c10d.AllToAllOptions()
        flats = FlatTensors(self._world_rank)
        (full,), (target,) = flats.inputs(input), flats.outputs(output)
        sent = self._check.split(full, input, input_splits, "input")
        received = self._check.split(target, output, output_splits, "output")
        return self._submit_collective(flats, self._collectives.all_to_all(received, sent), opts)

    def barrier(self, opts: Any = None, **_: Any) -> BackendWork:
        return self._submit_collective(
            FlatTensors(self._world_rank), self._collectives.barrier(), opts or c10d.BarrierOptions()
        )

    # Messages

    def send(self, tensors: Any, dst: int, tag: int = 0) -> BackendWork:
        (tensor,) = self._check.single(tensors, "send")
        flats = FlatTensors(self._world_rank)
        (flat,) = flats.inputs(tensor)

        # The message starts inside the operation, in the thread that may use the channel.
        def steps() -> Operation:
            yield self._messages.isend(flat, dst, tag)

        return self._submit_message(flats, steps())

    def recv(self, tensors: Any, src: int, tag: int = 0) -> BackendWork:
        """Receive from a rank, or from any. The returned work knows the sender once it is complete."""
        (tensor,) = self._check.single(tensors, "recv")
        flats = FlatTensors(self._world_rank)
        (flat,) = flats.outputs(tensor)
        work = BackendWork(self._world_rank, [tensor])

        def steps() -> Operation:
            receiving: Work = self._messages.irecv(flat, src, tag)
            yield receiving
            # Known only now if any source was allowed; `dist.recv` returns it to the user.
            work.source = receiving.source if src == ANY else src

        return self._submit_message(flats, steps(), work)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> BackendWork:
        return self.recv(tensors, ANY, tag)

    # Other names of the same methods, in versions of torch from 2.9 on

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Coalescing

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> CoalescedWork:
        # Operations were submitted one by one as they came; torch only wants one work for all of them.
        works, self._coalesced = self._coalesced or [], None
        return CoalescedWork(works)

    # Submitting

    def _submit_collective(self, flats: FlatTensors, operation: Operation, opts: Any) -> BackendWork:
        """Queue a collective, whose work writes what `flats` has collected as written."""
        work = BackendWork(self._world_rank, flats.written)
        # Torch waits right after the call unless it is asynchronous: then the caller's thread can run the collective.
        blocking = not getattr(opts, "asyncOp", True)
        self._queue.submit_collective(work, flats.with_copy_back(operation), blocking)
        return self._note_coalesced(work)

    def _submit_message(self, flats: FlatTensors, operation: Operation, work: BackendWork | None = None) -> BackendWork:
        """Start a message; `work` is made here unless the operation needs it."""
        work = work or BackendWork(self._world_rank, flats.written)
        self._queue.submit_message(work, flats.with_copy_back(operation))
        return self._note_coalesced(work)

    def _note_coalesced(self, work: BackendWork) -> BackendWork:
        """Keep a work for `_end_coalescing`, within a coalesced region; return it."""
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _reducible(self, tensor: Tensor, opts: Any) -> tuple[FlatTensors, ReduceOperator]:
        """Start the tensors of a reduction, and find its operator."""
        return FlatTensors(self._world_rank), reduce_operator(opts.reduceOp, tensor.dtype, self._world_rank)


def _in_sequence(operations: list[Operation]) -> Operation:
    """Run operations one after the other, as one."""
    for operation in operations:
        yield from operation
