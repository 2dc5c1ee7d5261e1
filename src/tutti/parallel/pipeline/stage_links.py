"""Links between pipeline stages: activations go forward, gradients go backward, and the loss goes to every rank.

How it works
------------
A `StageMessage` is the output of one stage for one microbatch. Both ends know its tensors' shapes and dtypes from the
`PipelinePlan`, so no header is sent. A stage sends a message as soon as it has computed it, and asks for the input of
its next action before it begins the present one. So messages travel while ranks compute.

`MessageLinks` works over any transport. Each tensor of a message has a tag of its own, the same in every step. Messages
up to `EAGER_BYTES` are sent from the computing thread: they fit into the network's buffers. Larger ones would stop
half-way, since a computing rank does not serve its sockets. A background thread moves them, over a channel of its own.

`SharedMemoryLinks` works between ranks of one host. Each message has a slot in the memory of its receiver, written by
its sender alone. The sender copies its tensors there and publishes the number of the step; the receiver waits for that
number and computes on the slot without a copy. Every slot exists twice, for even and odd steps. No counter shows that a
slot has been read, so a sender may write the slot of step n + 2 only when the receiver has ended step n.

`end_step` gives that guarantee. The last rank has a loss when it has run all forward passes of step n, which needs
input from all other ranks: so all of them have begun step n, and therefore ended step n - 1. A rank that has received
the loss may begin step n + 1 and write its slots, which are those of step n - 1.

A wait for a peer ends with its message; or, if the peer has died or closed its channel, with `RankLost`; or after the
transport's timeout. A rank on which a step fails calls `abort`, which closes its channel and so ends the waits of its
peers. They fail too and abort in turn. Which gradients were added before the failure differs between ranks, so no
further step is allowed (`check_usable`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from tutti.errors import ConfigError
from tutti.parallel.pipeline.plan import PipelinePlan, TensorShapes
from tutti.parallel.pipeline.schedules import StageMessage
from tutti.transports import Transport, Work
from tutti.transports.base import Operation
from tutti.transports.capabilities import SharesAll, SharesMemory

EAGER_BYTES = 64 * 2**10
"""Largest message that is sent from the computing thread: it fits into the network's buffers."""

MAX_SHARED_BYTES = 2**30
"""Largest size of the slots of one rank, for two steps; pipelines that need more send messages."""

_ALIGNED_BYTES = 16
"""Each tensor in a slot begins at a multiple of this, as views of any dtype need."""

PendingTensors = Callable[[], tuple[Tensor, ...]]
"""Waits for the tensors of a message that is being received, and returns them."""


def open_links(plan: PipelinePlan, transport: Transport, device: torch.device) -> "StageLinks":
    """Open the fastest links that the ranks along `pipe` can have. Collective."""
    # In virtual time messages must take the time of the simulated network. GPU tensors cannot lie in the slots.
    shared = isinstance(transport, SharesMemory) and isinstance(transport, SharesAll) and transport.cluster is None
    if shared and device.type == "cpu" and 2 * _max_received_bytes(plan) <= MAX_SHARED_BYTES:
        return SharedMemoryLinks(plan, transport)
    return MessageLinks(plan, transport, device)


def _max_received_bytes(plan: PipelinePlan) -> int:
    """Return the bytes that the rank with most input receives in a step."""
    received = [0] * plan.num_ranks
    for message in plan.messages():
        received[plan.receiver(message)] += message_bytes(plan.shapes(message))
    return max(received)


class StageLinks(ABC):
    """Moves messages between the ranks along `pipe` while they compute."""

    def __init__(self, plan: PipelinePlan, transport: Transport, device: torch.device) -> None:
        self.control_transport = transport
        """Transport for collectives between steps, such as gathering timelines."""
        # A channel, so that `abort` can end the waits of peers in this pipeline and no others: collectives between
        # steps, and the exchange along `data`, go on.
        self.transport = transport.channel("stage_links")
        """Transport of the messages within steps; `abort` closes it."""
        self._plan = plan
        self._sending: list[Work] = []
        self._loss_device = "meta" if device.type == "meta" else "cpu"
        self._failed = False

    def check_usable(self) -> None:
        """Refuse another step after one that failed on this rank or on a peer."""
        if self._failed:
            raise ConfigError(
                f"rank {self.transport.world_rank}: an earlier step of this pipeline failed, so ranks may have "
                "different gradients. End this job, and continue from a checkpoint."
            )

    def abort(self) -> None:
        """Mark the pipeline as failed, and end the waits of the peers for this rank."""
        self._failed = True
        self.transport.close()  # Only this channel: the axis transport is closed with the mesh.

    def begin_step(self) -> None:
        """Begin a step. No rank begins step n + 2 before all ranks have ended step n."""
        return None

    @abstractmethod
    def send(self, message: StageMessage, tensors: Sequence[Tensor]) -> None:
        """Start sending; the tensors must not change until `end_step`."""

    @abstractmethod
    def receive(self, message: StageMessage) -> PendingTensors:
        """Start receiving."""

    def end_step(self, loss: Tensor | None) -> Tensor:
        """Wait until everything is sent, and return the loss of the last rank on every rank. Collective.

        Args:
            loss: the loss of the batch on the last rank; None on the others.
        """
        last = self._plan.num_ranks - 1
        if loss is None:
            # Also a barrier: the last rank has a loss only when all ranks have begun this step (see the module's text).
            # Of a fixed dtype, float64: receivers do not know that of the user's loss.
            loss = torch.empty((), dtype=torch.float64, device=self._loss_device)
            self.transport.irecv(loss, last).wait()
        else:
            loss = loss.to(self._loss_device)
            # To each rank directly: a chain through the stages would add a latency for each of them.
            self._sending += [self.transport.isend(loss, rank) for rank in range(last)]
        # Last, since receivers take their messages while this rank waits for the loss.
        for work in self._sending:
            work.wait()
        self._sending.clear()
        return loss

    def _as_planned(self, message: StageMessage, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors with the dtypes that the receiver expects; refuse other shapes than the example's."""
        shapes = self._plan.shapes(message)
        got, wanted = [tuple(tensor.shape) for tensor in tensors], [shape for shape, _ in shapes]
        if got != wanted:
            raise ConfigError(
                f"rank {self.transport.world_rank}: stage {message.stage} made tensors of shapes {got} from a "
                f"microbatch, and of shapes {wanted} from the example that distribute was given. All batches must have "
                "the shape of the example: pad them, or drop the last one."
            )
        # Under autocast a stage's outputs may have another dtype than they had for the example.
        dtypes = [getattr(torch, name) for _, name in shapes]
        return [tensor.detach().to(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]


class MessageLinks(StageLinks):
    """Links over any transport. A background thread moves large messages while the rank computes."""

    def __init__(self, plan: PipelinePlan, transport: Transport, device: torch.device) -> None:
        super().__init__(plan, transport, device)
        # A transport is used either by its own thread or by operations, never by both at once. It is closed with its
        # parent.
        self._large_transport = self.transport.channel("large")
        self._device = device
        # One tag per tensor, from 1 on: tag 0 is that of the loss.
        # Counted over all messages of the plan, which both ends list in the same order. A tag is used again in the next
        # step: messages of one sender and tag arrive in the order in which they were sent.
        first_tags = accumulate((len(plan.shapes(message)) for message in plan.messages()), initial=1)
        # Not strict: `initial` gives the tags one entry more than there are messages.
        self._first_tags = dict(zip(plan.messages(), first_tags, strict=False))

    def send(self, message: StageMessage, tensors: Sequence[Tensor]) -> None:
        contiguous = [tensor.contiguous() for tensor in self._as_planned(message, tensors)]
        self._sending = [work for work in self._sending if not work.done()]  # The others' tensors can be freed.
        self._sending += self._start(message, contiguous, _send_all, self._plan.receiver(message))

    def receive(self, message: StageMessage) -> PendingTensors:
        shapes = self._plan.shapes(message)
        # New memory for every message: the stage keeps its input until the backward pass of the microbatch.
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device=self._device) for shape, dtype in shapes]
        works = self._start(message, tensors, _receive_all, self._plan.sender(message))

        def wait() -> tuple[Tensor, ...]:
            for work in works:
                work.wait()
            return tuple(tensors)

        return wait

    def _start(
        self,
        message: StageMessage,
        tensors: list[Tensor],
        operation: Callable[[Transport, list[Tensor], int, int], Operation],
        peer: int,
    ) -> list[Work]:
        """Start an operation in the background thread if the message is large, otherwise here."""
        tag = self._first_tags[message]
        if message_bytes(self._plan.shapes(message)) > EAGER_BYTES:
            return [self._large_transport.spawn(operation(self._large_transport, tensors, peer, tag))]
        # Exhausting the generator submits all of its works without waiting for any.
        return list(operation(self.transport, tensors, peer, tag))


class SharedMemoryLinks(StageLinks):
    """Links between ranks of one host: the sender writes to memory in which the receiver computes."""

    def __init__(self, plan: PipelinePlan, transport: Transport) -> None:
        """Allocate the slots of all messages. Collective."""
        from tutti.transports.shared_memory.slots import MessageSlots  # Imports a compiler, which is slow.

        super().__init__(plan, transport, torch.device("cpu"))
        messages = list(plan.messages())
        self._slot_numbers = {message: number for number, message in enumerate(messages)}
        sizes = [(plan.receiver(message), message_bytes(plan.shapes(message))) for message in messages]
        self._slots = MessageSlots(self.transport, sizes)  # type: ignore[arg-type]
        # Steps count from 1 on: the counters of fresh slots are 0, which no step may take for its own.
        self._step = 0

    def begin_step(self) -> None:
        self._step += 1  # Its parity chooses between the two copies of each slot.

    def send(self, message: StageMessage, tensors: Sequence[Tensor]) -> None:
        for target, tensor in zip(self._slot_tensors(message), self._as_planned(message, tensors), strict=True):
            # Overwrites what this rank sent two steps ago. `end_step` guarantees that the receiver has ended that step.
            target.copy_(tensor)
        # Only now: the receiver reads the slot without a lock once it sees the number of this step.
        self._slots.publish(self._slot_numbers[message], self._step)

    def receive(self, message: StageMessage) -> PendingTensors:
        def wait() -> tuple[Tensor, ...]:
            self._slots.wait(self._slot_numbers[message], self._step, self._plan.sender(message))
            # Views of the slot: valid until this rank has ended the step.
            return tuple(self._slot_tensors(message))

        return wait

    def _slot_tensors(self, message: StageMessage) -> Iterator[Tensor]:
        """Yield views of the message's slot of this step, one for each tensor."""
        buffer = self._slots.buffer(self._slot_numbers[message], self._step)
        start = 0
        # Sender and receiver cut the slot by the same shapes, so nothing but the bytes has to be agreed upon.
        for shape, name in self._plan.shapes(message):
            dtype = getattr(torch, name)
            stop = start + prod(shape) * dtype.itemsize
            yield buffer[start:stop].view(dtype).view(shape)
            start = _aligned(stop)


def message_bytes(shapes: TensorShapes) -> int:
    """Return the bytes of a message whose tensors are aligned."""
    return sum(_aligned(prod(shape) * getattr(torch, dtype).itemsize) for shape, dtype in shapes)


def _aligned(num_bytes: int) -> int:
    """Round up to a multiple of `_ALIGNED_BYTES`."""
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _send_all(transport: Transport, tensors: list[Tensor], dst: int, tag: int) -> Operation:
    """Send the tensors of a message under consecutive tags. All are started before the first is waited for."""
    yield from [transport.isend(tensor, dst, tag + number) for number, tensor in enumerate(tensors)]


def _receive_all(transport: Transport, tensors: list[Tensor], src: int, tag: int) -> Operation:
    """Receive the tensors of a message, as `_send_all` sends them."""
    yield from [transport.irecv(tensor, src, tag + number) for number, tensor in enumerate(tensors)]
