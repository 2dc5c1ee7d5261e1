"""Decoding of pushed gradients, and their application to a shard by the optimiser."""

import numpy as np
import torch
from torch import Tensor

from tutti.collectives.compressed.messages import new_message
from tutti.errors import PacketError
from tutti.events import APPLY, Event, EventLog
from tutti.strategies.parameter_server.ledger import Update
from tutti.strategies.parameter_server.messages.config import ServerGroupConfig
from tutti.strategies.parameter_server.messages.server.shard import ServerShard
from tutti.strategies.parameter_server.messages.wire import RequestHeader, RequestKind
from tutti.strategies.parameter_server.shard_optimizer import update_scales
from tutti.strategies.parameter_server.sufficient_factors import MatrixShape, unpack
from tutti.transports import Transport


class UpdateDecoder:
    """Turns the payload of a push into a gradient; refuses payloads that cannot be one."""

    def __init__(self, config: ServerGroupConfig, matrix_shapes: dict[int, list[MatrixShape]]) -> None:
        """Decode by the codec of `config`; `matrix_shapes` are those of the parameters, by shard index."""
        self._config = config
        self._matrix_shapes = matrix_shapes

    def allocate(self, header: RequestHeader, shard: ServerShard | None) -> Tensor:
        """Return memory for the payload that a header announces.

        Raises `PacketError` if no push of the shard is so long: nothing is allocated on a peer's word alone.
        """
        if (
            shard is None
            or header.kind != RequestKind.PUSH
            or not 0 < header.num_bytes <= self._config.max_push_bytes(shard.spec)
        ):
            raise PacketError(f"{header.num_bytes} bytes for shard {header.shard}, which no push of it can have")
        # An exact gradient: its buffer becomes the update, and goes back to the pool after the step.
        if header.num_bytes == shard.spec.num_bytes:
            return shard.buffers.take()
        return new_message(header.num_bytes, shard.value_bytes())

    def decode(self, shard: ServerShard, payload: Tensor) -> Tensor | None:
        """Return the gradient that a payload holds; None in a dry run.

        It lies in the payload's memory or in a buffer of the shard, to which `UpdateApplier.step` gives it back.
        """
        if shard.optimizer is None:
            return None
        spec, dtype, codec = shard.spec, shard.optimizer.values.dtype, self._config.codec
        # Factors are pushed only where they are smaller than the gradient, so the size tells which it is.
        if self._config.factors and payload.numel() < spec.num_bytes:
            gradient = shard.buffers.take().view(dtype)
            unpack(payload, spec, self._matrix_shapes[spec.index], gradient)
            return gradient
        if codec is None or spec.groups is None:
            if payload.numel() != spec.num_bytes:
                raise PacketError(f"an update of {payload.numel()} bytes, wanted {spec.num_bytes}")
            return payload.view(dtype)
        gradient = shard.buffers.take().view(dtype)
        is_float = gradient.dtype == torch.float32
        # Codecs decode to float32.
        decoded = gradient if is_float else torch.empty(spec.numel, dtype=torch.float32, device="cpu")
        codec.decode(payload, decoded, groups=spec.groups)
        return gradient if is_float else gradient.copy_(decoded)


class UpdateApplier:
    """Applies the updates of a version to a shard: their mean first, then a step of the optimiser with it."""

    def __init__(self, config: ServerGroupConfig, transport: Transport, events: EventLog) -> None:
        self._config = config
        self._transport = transport
        self._events = events

    def combine(self, shard: ServerShard, due: list[Update]) -> np.ndarray:
        """Make the mean of updates that the ledger has just taken; return one flag per segment: has a gradient."""
        now = self._transport.now()
        for update in due:
            # Reported to the worker with its next reply.
            shard.staleness[update.worker] = update.staleness
            about = (shard.spec.index, shard.ledger.version, update.worker, update.clock)
            self._events.record(Event(APPLY, now, now, 0, about))
        if shard.optimizer is None:
            return np.empty(0)
        # A mean that is clipped as a whole is scaled in `step`, when the norm over all servers is known.
        clip = None if self._config.clips_means else self._config.clip
        return shard.optimizer.combine(due, update_scales(due, shard.spec, self._config.consistency, clip))

    def step(self, shard: ServerShard, due: list[Update], has_grad: np.ndarray, factor: float = 1.0) -> None:
        """Step by the mean that `combine` made of these updates, scaled by `factor`, and free their memory."""
        if shard.optimizer is None:
            return
        # Updates are sorted by rank: the options of the lowest rank count for all.
        shard.optimizer.step(has_grad, due[0].options, factor)
        for update in due:
            if update.values.dtype == shard.optimizer.values.dtype:
                shard.buffers.give_back(update.values.view(torch.uint8))
