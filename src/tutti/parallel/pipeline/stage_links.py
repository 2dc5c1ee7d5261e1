"""What stages tell each other: activations forward, gradients back, and at the end the loss."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from tutti.errors import ConfigError
from tutti.parallel.pipeline.plan import PipelinePlan, Shapes
from tutti.parallel.pipeline.schedules import StageMessage
from tutti.transports import Transport, Work
from tutti.transports.base import Operation
from tutti.transports.capabilities import SharesAll, SharesMemory

EAGER_BYTES = 64 * 2**10
"""A message as small as this fits into the network's buffers: it needs nobody to move it along while ranks compute."""

MAX_SHARED_BYTES = 2**30
"""What may come to a rank through memory in two steps."""

PendingTensors = Callable[[], tuple[Tensor, ...]]
"""Waits for tensors that are on their way here."""


def open_links(plan: PipelinePlan, transport: Transport, device: torch.device) -> "StageLinks":
    """The quickest there are between the ranks along `pipe`. Collective."""
    shared = isinstance(transport, SharesMemory) and isinstance(transport, SharesAll) and transport.cluster is None
    if shared and device.type == "cpu" and 2 * _most_received(plan) <= MAX_SHARED_BYTES:
        return SharedMemoryLinks(plan, transport)
    return MessageLinks(plan, transport, device)


def _most_received(plan: PipelinePlan) -> int:
    received = [0] * plan.num_ranks
    for message in plan.messages():
        received[plan.receiver(message)] += num_bytes(plan.shapes(message))
    return max(received)


class StageLinks(ABC):
    """Takes messages between the ranks along `pipe` while they compute."""

    def __init__(self, plan: PipelinePlan, transport: Transport, device: torch.device) -> None:
        self.control_transport = transport
        """For what is said between steps."""
        self.transport = transport.channel("stage_links")
        self._plan = plan
        self._sending: list[Work] = []
        self._loss_device = "meta" if device.type == "meta" else "cpu"
        self._broken = False

    def check_usable(self) -> None:
        """Refuse to go on after a step that failed, here or elsewhere: what others have of it is not known."""
        if self._broken:
            raise ConfigError(
                f"rank {self.transport.world_rank}: an earlier step of this pipeline failed, and ranks may have "
                "different parts of it. End this job, and go on from a checkpoint."
            )

    def abort(self) -> None:
        """A step failed: whoever waits for this rank is told."""
        self._broken = True
        self.transport.close()

    def begin_step(self) -> None:
        """A step begins. No rank begins the next but one before all have ended this."""
        return None

    def _as_planned(self, message: StageMessage, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors as the receiver expects them: under autocast they may be of another dtype than the example's."""
        shapes = self._plan.shapes(message)
        got, wanted = [tuple(each.shape) for each in tensors], [shape for shape, _ in shapes]
        if got != wanted:
            raise ConfigError(
                f"rank {self.transport.world_rank}: stage {message.stage} made tensors of shapes {got} of a microbatch "
                f"and {wanted} of the example that distribute was given. All batches must be of one shape, the "
                "example's: pad them, or drop the last."
            )
        dtypes = [getattr(torch, name) for _, name in shapes]
        return [each.detach().to(dtype) for each, dtype in zip(tensors, dtypes, strict=True)]

    @abstractmethod
    def send(self, message: StageMessage, tensors: Sequence[Tensor]) -> None:
        """Start sending; the tensors stay as they are until `end_step`."""

    @abstractmethod
    def receive(self, message: StageMessage) -> PendingTensors:
        """Start receiving."""

    def end_step(self, loss: Tensor | None) -> Tensor:
        """The step is done: wait until all is sent. The loss, which the last rank has, on all of them. Collective.

        It has one when all other ranks have begun this step: so nobody who is here is a step ahead of anybody.
        """
        last = self._plan.num_ranks - 1
        if loss is None:
            loss = torch.empty((), dtype=torch.float64, device=self._loss_device)
            self.transport.irecv(loss, last).wait()
        else:
            loss = loss.to(self._loss_device)
            self._sending += [self.transport.isend(loss, rank) for rank in range(last)]
        for work in self._sending:
            work.wait()
        self._sending.clear()
        return loss


class MessageLinks(StageLinks):
    """Over any network; large messages are moved by a thread, because ranks that compute do not."""

    def __init__(self, plan: PipelinePlan, transport: Transport, device: torch.device) -> None:
        super().__init__(plan, transport, device)
        self._large = self.transport.channel("large")
        self._device = device
        tags = accumulate((len(plan.shapes(message)) for message in plan.messages()), initial=1)
        self._tags = dict(zip(plan.messages(), tags, strict=False))

    def send(self, message: StageMessage, tensors: Sequence[Tensor]) -> None:
        held = [it.contiguous() for it in self._as_planned(message, tensors)]
        self._sending = [work for work in self._sending if not work.done()]
        self._sending += self._started(message, held, _sends, self._plan.receiver(message))

    def receive(self, message: StageMessage) -> PendingTensors:
        shapes = self._plan.shapes(message)
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device=self._device) for shape, dtype in shapes]
        works = self._started(message, tensors, _receives, self._plan.sender(message))

        def wait() -> tuple[Tensor, ...]:
            for work in works:
                work.wait()
            return tuple(tensors)

        return wait

    def _started(
        self,
        message: StageMessage,
        tensors: list[Tensor],
        steps: Callable[[Transport, list[Tensor], int, int], Operation],
        peer: int,
    ) -> list[Work]:
        tag = self._tags[message]
        if num_bytes(self._plan.shapes(message)) > EAGER_BYTES:
            return [self._large.spawn(steps(self._large, tensors, peer, tag))]
        return list(steps(self.transport, tensors, peer, tag))


class SharedMemoryLinks(StageLinks):
    """Between ranks of one host: who sends writes where the other reads."""

    def __init__(self, plan: PipelinePlan, transport: Transport) -> None:
        """Open the memory. Collective."""
        from tutti.transports.shared_memory.slots import MessageSlots  # Costs a compiler's import.

        super().__init__(plan, transport, torch.device("cpu"))
        messages = list(plan.messages())
        self._places = {message: place for place, message in enumerate(messages)}
        sizes = [(plan.receiver(message), num_bytes(plan.shapes(message))) for message in messages]
        self._slots = MessageSlots(self.transport, sizes)  # type: ignore[arg-type]
        self._turn = 0

    def begin_step(self) -> None:
        self._turn += 1

    def send(self, message: StageMessage, tensors: Sequence[Tensor]) -> None:
        for room, tensor in zip(self._rooms(message), self._as_planned(message, tensors), strict=True):
            room.copy_(tensor)
        self._slots.publish(self._places[message], self._turn)

    def receive(self, message: StageMessage) -> PendingTensors:
        def wait() -> tuple[Tensor, ...]:
            self._slots.wait(self._places[message], self._turn, self._plan.sender(message))
            return tuple(self._rooms(message))

        return wait

    def _rooms(self, message: StageMessage) -> Iterator[Tensor]:
        """The tensors of a message, where they lie in this step."""
        room = self._slots.buffer(self._places[message], self._turn)
        start = 0
        for shape, name in self._plan.shapes(message):
            dtype = getattr(torch, name)
            stop = start + prod(shape) * dtype.itemsize
            yield room[start:stop].view(dtype).view(shape)
            start = _aligned(stop)


def num_bytes(shapes: Shapes) -> int:
    """Of a message, each tensor of which begins where any number may."""
    return sum(_aligned(prod(shape) * getattr(torch, dtype).itemsize) for shape, dtype in shapes)


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


def _sends(transport: Transport, tensors: list[Tensor], dst: int, tag: int) -> Operation:
    yield from [transport.isend(it, dst, tag + number) for number, it in enumerate(tensors)]


def _receives(transport: Transport, tensors: list[Tensor], src: int, tag: int) -> Operation:
    yield from [transport.irecv(it, src, tag + number) for number, it in enumerate(tensors)]
