"""One of several ranks by itself: what it says to the others, who are not there, is written down."""

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
    """Something that all ranks do together."""

    kind: Kind
    num_bytes: float
    """Of what is reduced, handed out or exchanged; of a rank's own part where parts are gathered or scattered."""


class TracingCollectives(Collectives):
    """Nobody answers: this rank takes its own data for theirs."""

    def __init__(self) -> None:
        self.trace: list[TracedCollective] = []

    def all_reduce(self, flat: Tensor, operator: ReduceOperator) -> Operation:
        return self._note("all_reduce", flat)

    def reduce(self, flat: Tensor, operator: ReduceOperator, root: int) -> Operation:
        return self._note("all_reduce", flat)

    def reduce_scatter(self, mine: Tensor, flat: Tensor, operator: ReduceOperator) -> Operation:
        mine.copy_(flat[: mine.numel()])
        return self._note("reduce_scatter", mine)

    def reduce_parts(self, mine: Tensor, parts: list[Tensor], operator: ReduceOperator) -> Operation:
        mine.copy_(parts[0])
        return self._note("reduce_scatter", mine)

    def all_gather(self, everyones: list[Tensor], mine: Tensor) -> Operation:
        for room in everyones:
            room.copy_(mine)
        return self._note("all_gather", mine)

    def broadcast(self, flat: Tensor, root: int) -> Operation:
        return self._note("broadcast", flat)

    def gather(self, everyones: list[Tensor] | None, mine: Tensor, root: int) -> Operation:
        return self.all_gather(everyones or [], mine)

    def scatter(self, mine: Tensor, parts: list[Tensor] | None, root: int) -> Operation:
        return self._note("all_gather", mine)

    def all_to_all(self, received: list[Tensor], sent: list[Tensor]) -> Operation:
        for room, data in zip(received, sent, strict=True):
            room.copy_(data.new_zeros(room.shape))
        return self._note("all_to_all", *sent)

    def barrier(self) -> Operation:
        return self._note("all_reduce", torch.empty(0))

    def _note(self, kind: Kind, *tensors: Tensor) -> Operation:
        self.trace.append(TracedCollective(kind, sum(tensor.nbytes for tensor in tensors)))
        yield from ()


class _First(SingleRankTransport):
    """The first of so many ranks; the others are not there."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.size = num_ranks


class _AtOnce(OperationQueue):
    """There is nothing to wait for."""

    def submit_collective(self, work: BackendWork, operation: Operation, blocking: bool) -> None:
        for _ in operation:
            pass
        work.complete()

    def submit_message(self, work: BackendWork, operation: Operation) -> None:
        self.submit_collective(work, operation, True)

    def close(self) -> None:
        return None


@contextmanager
def traced_mesh(num_ranks: int, device_type: str) -> Iterator[tuple["DeviceMesh", list[TracedCollective]]]:
    """The row of so many ranks as the first of them sees it; what it says comes to the list."""
    collectives = TracingCollectives()
    group = TuttiGroup(collectives, _AtOnce(), _First(num_ranks), 0, lambda: None)
    with registered(group), device_mesh(group, device_type) as mesh:
        yield mesh, collectives.trace
