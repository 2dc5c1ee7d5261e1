"""Server: receives the requests of workers and dispatches them. `messages/server/__init__.py` says how it works."""

import logging
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

import numpy as np
from torch import Tensor

from tutti.errors import PacketError, RankLost, ReplicaMismatch
from tutti.events import EventLog
from tutti.replica import Replica
from tutti.replica.samples import ADD_UP
from tutti.strategies.parameter_server.ledger import Ledger, Update
from tutti.strategies.parameter_server.messages.buffers import BufferPool
from tutti.strategies.parameter_server.messages.config import ServerGroupConfig
from tutti.strategies.parameter_server.messages.server.clipping import GlobalClipping
from tutti.strategies.parameter_server.messages.server.context import ServerContext
from tutti.strategies.parameter_server.messages.server.copies import CopyReceiver, CopySender
from tutti.strategies.parameter_server.messages.server.halting import ServerHalt
from tutti.strategies.parameter_server.messages.server.lifecycle import WorkerLifecycle
from tutti.strategies.parameter_server.messages.server.membership import WorkerMembership
from tutti.strategies.parameter_server.messages.server.ordering import UpdateOrdering
from tutti.strategies.parameter_server.messages.server.replies import LocalDelivery, ReplySender
from tutti.strategies.parameter_server.messages.server.shard import ServerShard
from tutti.strategies.parameter_server.messages.server.versions import VersionMaker, load_shard
from tutti.strategies.parameter_server.messages.state_transfer import receive_state, send_state
from tutti.strategies.parameter_server.messages.wire import (
    PAYLOAD_TAG,
    REQUEST_TAG,
    ReplyStatus,
    RequestHeader,
    RequestKind,
)
from tutti.strategies.parameter_server.shard_optimizer import ShardOptimizer
from tutti.strategies.parameter_server.shards import ParameterShard
from tutti.transports import Transport
from tutti.transports.base import Operation

_log = logging.getLogger("tutti")

_MALFORMED = (PacketError, ReplicaMismatch, ValueError)
"""Errors that a worker's malformed request raises: the worker is removed, and the server goes on."""


class Server:
    """All shards of one serving rank, and the workers that push and pull them."""

    def __init__(
        self,
        shards: list[ParameterShard],
        replica: Replica,
        transport: Transport,
        config: ServerGroupConfig,
        other_servers: list[int],
        copied: Sequence[ParameterShard] = (),
    ) -> None:
        """Hold `shards`, with the values that the parameters have in the replica, and copies of other shards.

        `other_servers` are the other ranks that hold shards; `copied` are shards of one of them.
        """
        self.events = EventLog()
        self.over = transport.signal()
        """Set when no worker is left, or when the server has failed."""
        self.failure: Exception | None = None
        """Why the server has failed."""
        self._transport = transport
        self._config = config
        self._membership = WorkerMembership(config.workers)
        context = ServerContext(config, transport, self._membership, other_servers, self.events, self._spawn)
        self._replies = ReplySender(context)
        consistency = config.consistency
        # With a quorum of 1 every update is a version by itself, and there is nothing to agree on.
        ordering = UpdateOrdering(context) if consistency.bound is None and consistency.quorum > 1 else None
        # Values and the optimiser's state are copied once, from this rank's model: all ranks have the same at the
        # start.
        order = None if ordering is None else ordering.order
        self._shards = {
            shard.index: _make_shard(context, shard, replica, Ledger(consistency, self._membership.members, order))
            for shard in shards
        }
        # The ledger of a copy stays empty: its server decides what makes a version.
        copies = {shard.index: _make_shard(context, shard, replica, Ledger(consistency, set())) for shard in copied}
        self._copies: CopyReceiver | None = None
        if copied:
            source = config.server_of(copied[0])
            self._copies = CopyReceiver(context, source, copies, self._replies.reply_from_here)
        if shards and (target := config.copy_of(shards[0])) is not None:
            self._replies.copies = CopySender(context, target)
            for held in self._shards.values():
                held.copies = self._replies.copies
        # The parts that act on shards come last, since they share the dictionary above.
        clipping = GlobalClipping(context, list(self._shards.values())) if config.clips_means else None
        self._versions = VersionMaker(context, self._shards, self._replies, ordering, clipping, self._complete_barrier)
        self._halt = ServerHalt(context, self._shards, copies, self._replies, self._fail)
        self._lifecycle = WorkerLifecycle(context, self._versions, self._replies, self._end)
        if not any(self._held()):
            self.over.set()  # Fewer shards than servers: nobody will send a request here.

    def buffers(self, shard_index: int) -> BufferPool:
        """Return the buffers of a shard, from which the worker of this rank takes what it pushes."""
        return self._shards[shard_index].buffers

    def connect_local_worker(self, deliver: LocalDelivery) -> None:
        """Hand replies to the worker of this rank to `deliver`, in place of messages."""
        self._replies.connect_local_worker(deliver)

    def start(self) -> None:
        """Begin to serve the workers of other ranks."""
        if not any(self._held()):
            return
        # Before the first request: orders and norms of other servers may come at once.
        self._versions.start()
        if self._copies is not None:
            self._spawn(self._copies.receive(self._halt.source_lost))
        for worker in self._config.workers:
            if worker != self._transport.rank:  # The worker of this rank calls `handle_request` itself.
                self._spawn(self._receive_requests(worker))
                self._spawn(self._replies.send_replies(worker))

    def handle_request(
        self, worker: int, header: RequestHeader, options: np.ndarray, has_grad: np.ndarray, payload: Tensor | None
    ) -> None:
        """Act on a request. A malformed one removes the worker.

        Args:
            worker: rank of the worker that sent it.
            header: the fixed part.
            options: numeric options of the worker's optimiser.
            has_grad: one flag per segment of the shard: whether the worker has a gradient for it.
            payload: the bytes that followed, if any.
        """
        if worker not in self._membership.alive or self._membership.is_frozen:
            return  # It was removed while this request was under way, or this server has ended.
        try:
            match header.kind:
                case RequestKind.PUSH | RequestKind.VOID:
                    self._push(worker, header, options, has_grad, payload)
                case RequestKind.BARRIER:
                    self._lifecycle.enter_barrier(worker)
                case RequestKind.LEAVE:
                    self._lifecycle.leave(worker)
                case RequestKind.JOIN:
                    self._lifecycle.join([worker])
                case RequestKind.SAVE_STATE:
                    # In the background, so that other requests are handled meanwhile. The state is copied now.
                    self._spawn(send_state(self.copy_state(), worker, self._transport))
                case RequestKind.LOAD_STATE:
                    self._spawn(self._receive_state(worker))
                case RequestKind.STOP:
                    self._lifecycle.stop(worker)
                case RequestKind.DISCONNECT:
                    self._lifecycle.remove(worker)
                case _:
                    raise PacketError(f"{header.kind.name}, which only servers send")
        except _MALFORMED as error:
            self._lifecycle.reject(worker, str(error))
        self._replies.flush()

    def num_pushed(self, worker: int) -> list[int]:
        """Return how many updates of a worker have arrived at each shard."""
        return [shard.ledger.num_pushed(worker) for shard in self._shards.values()]

    def copy_state(self) -> dict[str, Any]:
        """Return a copy of the optimiser's state of all shards."""
        return self._versions.copy_state()

    def copy_after_loss(self) -> list[dict[str, Any]]:
        """Freeze this server, and return copies of the values and the states of all shards and copies."""
        if self._shards and not self._config.exact and not self._membership.is_frozen:
            # What has arrived is applied, without waiting for any worker.
            self._membership.members.clear()
            self._versions.settle_all()
        self._membership.is_frozen = True
        return [
            {"shard": shard.spec.index, "is_copy": shard.spec.index not in self._shards, **state}
            for shard in self._held()
            for state in shard.copy_after_loss()
        ]

    def load_state(self, state: dict[str, Any]) -> None:
        """Start again from these parameters and this state of the optimiser, with every living worker as a member."""
        self._membership.wait_for_all()
        self._versions.load_state(state)
        for shard in () if self._copies is None else self._copies.shards.values():
            load_shard(shard, state)

    def _push(
        self, worker: int, header: RequestHeader, options: np.ndarray, has_grad: np.ndarray, payload: Tensor | None
    ) -> None:
        """Record a pushed update and take the steps that are due by it. Raises `PacketError` if it is malformed."""
        shard = self._shards.get(header.shard)
        is_void = header.kind == RequestKind.VOID
        # Running statistics have values in every update.
        if shard is None or is_void != (payload is None) or (is_void and not shard.spec.is_trained):
            raise PacketError(f"an update of {header.num_bytes} bytes for shard {header.shard}, which is not held here")
        valid_weight = isfinite(header.weight) and (header.weight >= 0 or header.weight == ADD_UP)
        # A version from the future, or a NaN weight, would spoil the parameters of all workers.
        if not valid_weight or not 0 <= header.base_version <= shard.ledger.version:
            raise PacketError(f"an update of weight {header.weight}, computed from version {header.base_version}")
        gradient = None if payload is None else shard.decode(payload, exact=header.is_synchronous == 1)
        has_grad = has_grad[: len(shard.spec.segments)]  # Requests are as long as the shard with most segments needs.
        update = Update(worker, header.base_version, header.weight, header.norm, options, has_grad, gradient)
        update.is_void, update.is_synchronous = is_void, header.is_synchronous == 1
        shard.ledger.push(update)
        self._versions.pushed(shard, update, header.wanted_version)

    def _receive_requests(self, worker: int) -> Operation:
        """Receive and handle a worker's requests until it is gone."""
        transport, request_format = self._transport, self._config.request_format
        try:
            while worker in self._membership.alive:
                # New memory every time: the update keeps a view of its options in it.
                message = request_format.empty()
                yield transport.irecv(message, worker, REQUEST_TAG)
                header, options, has_grad = request_format.parse(message)
                payload = None
                if header.num_bytes:
                    # Its size is checked first: a malformed header must not make the server allocate without bound.
                    payload = self._allocate_payload(header)
                    yield transport.irecv(payload, worker, PAYLOAD_TAG)
                self.handle_request(worker, header, options, has_grad, payload)
                del payload  # The buffer may be free from here on; while the next request is awaited, nobody needs it.
        except RankLost as loss:
            # Not raised: the loss of a worker ends this generator, and the server goes on with the others.
            if self._config.exact:
                self._halt.worker_lost(worker)
            else:
                self._lifecycle.lose(worker, loss.gone.get(self._transport.world_ranks[worker], "it answers no more"))
                self._replies.flush()
        except _MALFORMED as error:
            self._lifecycle.reject(worker, str(error))
            self._replies.flush()

    def _held(self) -> Iterator[ServerShard]:
        """Yield the shards of this server, then the copies."""
        yield from self._shards.values()
        if self._copies is not None:
            yield from self._copies.shards.values()

    def _end(self) -> None:
        """No worker is left."""
        if self._replies.copies is None:
            self.over.set()
        else:
            self._replies.copies.end(self.over.set)

    def _allocate_payload(self, header: RequestHeader) -> Tensor:
        """Return memory for the payload that a header announces. Raises `PacketError` if it is no push of a shard."""
        shard = self._shards.get(header.shard)
        if shard is None or header.kind != RequestKind.PUSH:
            raise PacketError(f"{header.num_bytes} bytes for shard {header.shard}, which no push of it can have")
        return shard.allocate_payload(header.num_bytes)

    def _receive_state(self, worker: int) -> Operation:
        """Receive parameters and state from a worker, start again from them, and reply when that is done."""
        state = yield from receive_state(worker, self._transport)
        self.load_state(state)
        # Any reply will do: `RequestSender.load_state` waits for it under the tag of the first shard or copy here.
        self._replies.reply_from_here(worker, next(self._held()), ReplyStatus.KEEP_ALIVE)

    def _complete_barrier(self) -> None:
        # `VersionMaker` and `WorkerLifecycle` call each other: this method is what the first knows of the second.
        self._lifecycle.complete_barrier()

    def _fail(self, error: Exception) -> None:
        """End this server, because of an error."""
        self.failure = error
        self.over.set()

    def _spawn(self, operation: Operation) -> None:
        """Run a generator in the server's thread, concurrently with the others."""
        self._transport.spawn(self._guarded(operation))

    def _guarded(self, operation: Operation) -> Operation:
        """Run a generator; if it fails, the server does. Nobody waits for it, so its error would be lost otherwise."""
        try:
            yield from operation
        except RankLost:
            # A lost worker is handled by its `_receive_requests`. After the loss of a server, every worker fails.
            return
        except Exception as error:
            rank, world_rank = self._transport.rank, self._transport.world_rank
            _log.error("rank %d: the server here has failed: %s: %s", world_rank, type(error).__name__, str(error))
            self._fail(error)
            if rank in self._config.workers:
                self._transport.interrupt()  # The worker of this rank must not wait for a server that has failed.


def _make_shard(context: ServerContext, spec: ParameterShard, replica: Replica, ledger: Ledger) -> ServerShard:
    """Return a shard, or the copy of one, with the values that the parameters have in the replica."""
    bucket = replica.buckets[spec.bucket_index]
    optimizer = None
    if not replica.sizes_only:
        # A copy of this part alone: `image` is a new tensor of the whole bucket, which can then be freed.
        values = bucket.image()[spec.bucket_range].clone()
        optimizer = ShardOptimizer(spec, bucket, replica.optimizer, values)
        if context.config.exact:
            optimizer.keep_previous()
    return ServerShard(context, spec, bucket, ledger, optimizer)
