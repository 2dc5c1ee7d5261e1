"""One shard on its server: values, ledger, waiting pulls, snapshots; decodes updates and applies them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.collectives.compressed.messages import new_message
from tutti.errors import PacketError
from tutti.events import APPLY, Event
from tutti.replica import Bucket
from tutti.strategies.parameter_server.ledger import Ledger, Update, effective_updates
from tutti.strategies.parameter_server.messages.buffers import BufferPool
from tutti.strategies.parameter_server.messages.server.context import ServerContext
from tutti.strategies.parameter_server.messages.server.copies import CopySender
from tutti.strategies.parameter_server.shard_optimizer import ShardOptimizer, update_scales
from tutti.strategies.parameter_server.shards import ParameterShard
from tutti.strategies.parameter_server.sufficient_factors import matrix_shapes, unpack


@dataclass(eq=False)
class ShardSnapshot:
    """A copy of a shard's values at one version, which stays as it is while it is sent."""

    version: int
    buffer: Tensor
    num_readers: int = 0
    """Sends that have still to finish."""


class ServerShard:
    """A shard, and everything that its server knows of it."""

    def __init__(
        self,
        context: ServerContext,
        spec: ParameterShard,
        bucket: Bucket,
        ledger: Ledger,
        optimizer: ShardOptimizer | None,
    ) -> None:
        """Start at version 0; `bucket` is the one that `spec` is a part of."""
        self._context = context
        self._config = context.config
        self._names = [slot.name for slot in bucket.slots]
        self._matrix_shapes = matrix_shapes(spec, bucket)
        self.spec = spec
        """Which part of the model the shard is."""
        self.ledger = ledger
        self.optimizer = optimizer
        """Holds the values and steps them; None in a dry run, where there are only sizes."""
        self.buffers = BufferPool(spec.num_bytes, bucket.flat)
        self.waiting_pulls: dict[int, int] = {}
        """The version that each waiting worker wants."""
        self.version = 0
        """Versions whose step is taken. While a joint step waits for norms, the ledger's version is ahead of it."""
        self.answered_version = -1
        """The ledger's version when waiting pulls were last checked."""
        self.staleness: dict[int, int] = {}
        """Staleness of each worker's last applied update."""
        self.copies: CopySender | None = None
        """Sends the steps to the copy on another server, where there is one."""
        self._copied_version = 0
        """The last version of which the copy knows."""
        self._snapshot: ShardSnapshot | None = None
        """The newest copy that was made for a send; older ones belong to the sends that read them."""

    def value_bytes(self) -> Tensor:
        """Return the values as bytes, not a copy; in a dry run, any buffer of that size."""
        return self.buffers.take() if self.optimizer is None else self.optimizer.values.view(torch.uint8)

    def copy_after_loss(self) -> list[dict[str, Any]]:
        """Return a copy of the values and of the optimiser's state; where it is kept, also of those before the step."""
        if self.optimizer is None:
            return []
        found = [self._described(self.version, self.optimizer.values.clone(), list(self.optimizer.copy_states()))]
        if self._config.exact and self.version:
            found.append(self._described(self.version - 1, *self.optimizer.copy_before_step()))
        return found

    def _described(self, version: int, values: Tensor, states: list[Any]) -> dict[str, Any]:
        """Return values and states with the parameters' names and the ranges of them."""
        return {
            "version": version,
            "values": [
                [self._names[segment.slot_index], [segment.start, segment.stop], values[segment.shard_range]]
                for segment in self.spec.segments
            ],
            "segments": [
                [name, [segment.start, segment.stop, segment.is_whole], state] for name, segment, state in states
            ],
        }

    # Updates

    def allocate_payload(self, num_bytes: int) -> Tensor:
        """Return memory for the payload of a push that a header announces.

        Raises `PacketError` if no push of the shard is so long: nothing is allocated on a peer's word alone.
        """
        if not 0 < num_bytes <= self._config.max_push_bytes(self.spec):
            raise PacketError(f"{num_bytes} bytes for shard {self.spec.index}, which no push of it can have")
        # An exact gradient: its buffer becomes the update, and goes back to the pool after the step.
        if num_bytes == self.spec.num_bytes:
            return self.buffers.take()
        return new_message(num_bytes, self.value_bytes())

    def decode(self, payload: Tensor, exact: bool = False) -> Tensor | None:
        """Return the gradient that the payload of a push holds, compressed or `exact`; None in a dry run.

        It lies in the payload's memory or in a buffer of the shard, to which `step` gives it back. Raises `PacketError`
        if the payload cannot be a gradient of the shard.
        """
        if self.optimizer is None:
            return None
        spec, dtype, codec = self.spec, self.optimizer.values.dtype, self._config.codec
        # Factors are pushed only where they are smaller than the gradient, so the size tells which it is.
        if self._config.factors and payload.numel() < spec.num_bytes:
            gradient = self.buffers.take().view(dtype)
            unpack(payload, spec, self._matrix_shapes, gradient)
            return gradient
        if codec is None or spec.groups is None or exact:
            if payload.numel() != spec.num_bytes:
                raise PacketError(f"an update of {payload.numel()} bytes, wanted {spec.num_bytes}")
            return payload.view(dtype)
        gradient = self.buffers.take().view(dtype)
        is_float = gradient.dtype == torch.float32
        # Codecs decode to float32.
        decoded = gradient if is_float else torch.empty(spec.numel, dtype=torch.float32, device="cpu")
        codec.decode(payload, decoded, groups=spec.groups)
        return gradient if is_float else gradient.copy_(decoded)

    def combine(self, due: list[Update]) -> np.ndarray:
        """Make the mean of updates that the ledger has just taken; return one flag per segment: has a gradient."""
        now = self._context.transport.now()
        for update in due:
            # Reported to the worker with its next reply.
            self.staleness[update.worker] = update.staleness
            about = (self.spec.index, self.ledger.version, update.worker, update.clock)
            self._context.events.record(Event(APPLY, now, now, 0, about))
        if self.optimizer is None:
            return np.empty(0)
        consistency = self._config.consistency
        if not (updates := effective_updates(due, consistency)):
            return np.zeros(len(self.spec.segments), dtype=bool)
        # A mean that is clipped as a whole is scaled in `step`, when the norm over all servers is known.
        clip = None if self._config.clips_means else self._config.clip
        scales = update_scales(updates, self.spec, consistency, len(self._config.workers), clip)
        return self.optimizer.combine(updates, scales)

    def step(self, due: list[Update], has_grad: np.ndarray, factor: float = 1.0) -> None:
        """Step by the mean that `combine` made of these updates, scaled by `factor`, and free their memory."""
        is_effective = bool(effective_updates(due, self._config.consistency))
        if self.copies is not None and is_effective:
            # Before the step, which may scale the mean in place.
            self.copies.stepped(self, due[0].options, has_grad, factor)
            self._copied_version = self.ledger.version
        if self.optimizer is None:
            return
        if is_effective:
            # Updates are sorted by rank: the options of the lowest rank count for all.
            self.optimizer.step(has_grad, due[0].options, factor)
        for update in due:
            if update.values is not None and update.values.dtype == self.optimizer.values.dtype:
                self.buffers.give_back(update.values.view(torch.uint8))

    def publish(self) -> None:
        """The steps of all versions that the ledger counts are taken: replies carry the last one from here on."""
        self.version = self.ledger.version
        if self.copies is not None and self._copied_version != self.version:
            self.copies.stepped(self, None, np.empty(0), 1.0)  # A void step, or one that this shard has no part in.
            self._copied_version = self.version

    def restart(self) -> None:
        """Start again from version 0, with values and a state that are loaded next."""
        self.ledger.restart()
        # Minus one, so that the first look at waiting pulls counts version 0 as new.
        self.answered_version, self.version, self._copied_version = -1, 0, 0
        self._snapshot = None  # The next pull copies again: the values were replaced without a new version.

    # Copies

    def copy_mean(self) -> Tensor:
        """Return a copy of the mean that `combine` made last, as bytes."""
        if self.optimizer is None:
            return self.buffers.take()
        mean = self.optimizer.mean.view(torch.uint8)
        buffer = self.mean_buffer(mean.numel())
        buffer.copy_(mean)
        return buffer

    def mean_buffer(self, num_bytes: int) -> Tensor:
        """Return memory for a mean of so many bytes, which `buffers` takes back."""
        # Means of half-precision gradients are in float32.
        if num_bytes not in (self.spec.num_bytes, 4 * self.spec.numel):
            raise PacketError(f"a mean of {num_bytes} bytes for shard {self.spec.index}, which cannot have that")
        return self.buffers.take() if num_bytes == self.spec.num_bytes else new_message(num_bytes, self.value_bytes())

    def take_step(
        self, version: int, mean: Tensor | None, options: np.ndarray, has_grad: np.ndarray, factor: float
    ) -> None:
        """Take the step that the shard's server has taken, which makes `version`; without a mean, only count it."""
        if self.optimizer is not None and mean is not None:
            dtype = self.optimizer.values.dtype if mean.numel() == self.spec.num_bytes else torch.float32
            self.optimizer.take_mean(mean.view(dtype))
            self.optimizer.step(has_grad[: len(self.spec.segments)], options, factor)
        if mean is not None:
            self.buffers.give_back(mean)
        self.version = version

    # Snapshots

    def acquire_snapshot(self) -> ShardSnapshot:
        """Return the present values for a send; `release_snapshot` must follow. Readers of one version share a copy."""
        old = self._snapshot
        if old is None or old.version != self.version:
            buffer = self.buffers.take()
            if self.optimizer is not None:
                # One copy per version, whatever the number of workers that pull it.
                buffer.copy_(self.optimizer.values.view(torch.uint8))
            self._snapshot = ShardSnapshot(self.version, buffer)
            # While the old one is still being sent, its last reader gives the buffer back (`release_snapshot`).
            if old is not None and not old.num_readers:
                self.buffers.give_back(old.buffer)
        assert self._snapshot is not None
        self._snapshot.num_readers += 1
        return self._snapshot

    def release_snapshot(self, snapshot: ShardSnapshot) -> None:
        """End a send. The buffer of an outdated snapshot is free once no send reads it; the newest one is kept."""
        snapshot.num_readers -= 1
        if not snapshot.num_readers and snapshot is not self._snapshot:
            self.buffers.give_back(snapshot.buffer)
