"""A dry run of one tensor-parallel rank without its peers: collectives are recorded and answered with its own data.

How it works. `traced_mesh` makes a `torch.distributed` group in which this process is rank 0 of `num_ranks`. Its
`TracingCollectives` record the kind and the bytes of every collective, and fill the results with this rank's data: the
values are wrong and the shapes are right, which is all that timing needs. Operations complete when they are submitted,
so nothing ever waits for a rank that does not exist.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tutti.backend.collectives import Collectives
from tutti.backend.group import TuttiGroup
from tutti.backend.operation_queue import OperationQueue
from tutti.backend.operators import ReduceOperator
from tutti.backend.work import BackendWork
from tutti.parallel.groups import device_mesh, registered
from tutti.transports import SingleRankTransport
from tutti.transports.base import Operation

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]


@dataclass(frozen=True)
class TracedCollective:
    """One collective operation, as it was recorded."""

    kind: Kind
    num_bytes: float
    """Bytes that are reduced, broadcast or exchanged; bytes of one rank's part for gathers and scatters."""


class TracingCollectives(Collectives):
    """Records collectives, and takes this rank's data for that of the others."""

    def __init__(self) -> None:
        self.trace: list[TracedCollective] = []

    def all_reduce(self, flat: Tensor, operator: ReduceOperator) -> Operation:
        return self._record("all_reduce", flat)

    # Rooted collectives are recorded as those without a root, which cost at least as much.
    def reduce(self, flat: Tensor, operator: ReduceOperator, root: int) -> Operation:
        return self._record("all_reduce", flat)

    def reduce_scatter(self, output: Tensor, flat: Tensor, operator: ReduceOperator) -> Operation:
        # This process is rank 0, whose part is the first.
        output.copy_(flat[: output.numel()])
        return self._record("reduce_scatter", output)

    def reduce_parts(self, output: Tensor, parts: list[Tensor], operator: ReduceOperator) -> Operation:
        output.copy_(parts[0])
        return self._record("reduce_scatter", output)

    def all_gather(self, outputs: list[Tensor], flat: Tensor) -> Operation:
        for output in outputs:
            output.copy_(flat)
        return self._record("all_gather", flat)

    def broadcast(self, flat: Tensor, root: int) -> Operation:
        return self._record("broadcast", flat)

    def gather(self, outputs: list[Tensor] | None, flat: Tensor, root: int) -> Operation:
        return self.all_gather(outputs or [], flat)

    def scatter(self, output: Tensor, parts: list[Tensor] | None, root: int) -> Operation:
        return self._record("all_gather", output)

    def all_to_all(self, outputs: list[Tensor], inputs: list[Tensor]) -> Operation:
        # Parts may differ in size between ranks, so that this rank's inputs do not fit: zeros do.
        for output, data in zip(outputs, inputs, strict=True):
            output.copy_(data.new_zeros(output.shape))
        return self._record("all_to_all", *inputs)

    def barrier(self) -> Operation:
        # An all-reduce of nothing: it costs latencies only, as a barrier does.
        return self._record("all_reduce", torch.empty(0))

    def _record(self, kind: Kind, *tensors: Tensor) -> Operation:
        self.trace.append(TracedCollective(kind, sum(tensor.nbytes for tensor in tensors)))
        yield from ()  # Makes this a generator, as an `Operation` must be, that waits for nothing.


class _FirstRank(SingleRankTransport):
    """The transport of rank 0 of `num_ranks` ranks, the others of which do not exist."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.size = num_ranks


class _ImmediateQueue(OperationQueue):
    """Completes operations when they are submitted."""

    def submit_collective(self, work: BackendWork, operation: Operation, blocking: bool) -> None:
        # It yields nothing to wait for (see `_record`); running it through has all the effects that it has.
        for _ in operation:
            pass
        work.complete()

    def submit_message(self, work: BackendWork, operation: Operation) -> None:
        self.submit_collective(work, operation, True)

    def close(self) -> None:
        return None


@contextmanager
def traced_mesh(num_ranks: int, device_type: str) -> Iterator[tuple["DeviceMesh", list[TracedCollective]]]:
    """Yield a device mesh of `num_ranks` ranks as the first of them sees it, and the list of its collectives."""
    collectives = TracingCollectives()
    group = TuttiGroup(collectives, _ImmediateQueue(), _FirstRank(num_ranks), 0, lambda: None)
    with registered(group), device_mesh(group, device_type) as mesh:
        yield mesh, collectives.trace
