"""A worker of parameter servers: pushes gradients as they come, and reads parameters as old as it may."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tutti.codecs.base import State
from tutti.errors import DeadlineExceeded, NonFiniteLoss, RankLost, WorkerDropped
from tutti.events import PULL, READ, Event
from tutti.replica import Bucket, Replica
from tutti.replica.buckets import Slot, in_memory_order, is_dense
from tutti.replica.factors import Pair
from tutti.strategies.parameter_server.factored import joined, pack, shapes_of
from tutti.strategies.parameter_server.messages import saved
from tutti.strategies.parameter_server.messages.served import Pool
from tutti.strategies.parameter_server.messages.server import Server, Setting
from tutti.strategies.parameter_server.messages.wire import (
    HEAD,
    NOTHING,
    PAYLOAD,
    Head,
    Heads,
    Kind,
    Reply,
    Status,
    reply_tags,
)
from tutti.strategies.parameter_server.pieces import Piece, Share, cut
from tutti.strategies.parameter_server.shard_optimizer import Options, keeps_whole, whole_states
from tutti.strategies.parameter_server.worker import Worker, marks_of
from tutti.transports import SharesMemory, Transport, Work
from tutti.transports.base import Operation, Signal

if TYPE_CHECKING:
    from tutti.strategies.parameter_server.strategy import ParameterServer


class _Held:
    """What a worker knows of a piece."""

    def __init__(self, piece: Piece, server: int, pool: Pool, state: State) -> None:
        self.piece = piece
        self.server = server
        """Its rank."""
        self.pool = pool
        self.state = state
        """Of the codec."""
        self.version = 0
        """Of what the model has."""
        self.clock = 0
        """Of the next push."""
        self.asked: Work | None = None
        """Under which a newer one comes."""
        self.image: Tensor | None = None
        """Where it comes to; None where there are sizes alone."""
        self.targets: list[Tensor] = []
        """The model's own memory, and where in the image its values are."""
        self.sources: list[Tensor] = []
        self.reply: Reply | None = None
        self.told: Signal | None = None


class MessageWorker(Worker):
    """One worker, and the server of its rank, if that serves too."""

    def __init__(self, replica: Replica, transport: Transport, strategy: "ParameterServer") -> None:
        super().__init__(replica, transport, strategy)
        made = prepare(replica, transport, strategy)
        self._wire, self._setting, pieces = made.wire, made.setting, made.pieces
        self._server: Server | None = None
        if self._me in self._setting.servers:
            self._server = made.server(replica)
            self._server.told = self._told
        self._held = [self._hold(piece, replica) for piece in pieces]
        self._of_bucket: dict[int, list[_Held]] = {bucket.index: [] for bucket in replica.buckets}
        self._of_server: dict[int, list[_Held]] = {}
        self._of_slot: dict[Slot, list[_Held]] = {}
        for held in self._held:
            self._of_bucket[held.piece.bucket].append(held)
            self._of_server.setdefault(held.server, []).append(held)
            for share in held.piece.shares:
                self._of_slot.setdefault(replica.buckets[held.piece.bucket].slots[share.slot], []).append(held)
        self._active = sorted(self._of_server)
        self._sent_before = self._wire.bytes_sent
        self._leader = self._setting.workers[0]
        if self._setting.factors:
            replica.keep_factors()
        self._listen()

    def _hold(self, piece: Piece, replica: Replica) -> _Held:
        bucket, codec = replica.buckets[piece.bucket], self._setting.codec
        server = self._setting.servers[piece.server]
        own = self._server if server == self._me else None
        pool = own.pool(piece.number) if own is not None else Pool(piece.num_bytes, bucket.flat)
        lossy = codec is not None and piece.groups is not None and not replica.sizes_only
        state = codec.start(piece.numel, seed=self._me * 65_537 + piece.number) if lossy and codec is not None else {}
        held = _Held(piece, server, pool, state)
        if not replica.sizes_only:
            held.image = torch.empty(piece.numel, dtype=bucket.flat.dtype, device="cpu")
            for share in piece.shares:
                held.targets.append(in_memory_order(bucket.slots[share.slot].tensor)[share.start : share.stop])
                held.sources.append(held.image[share.offset : share.offset + share.stop - share.start])
        return held

    @property
    def bytes_sent(self) -> int:
        return self._wire.bytes_sent

    @property
    def version(self) -> int:
        """The oldest that the model has of any piece."""
        return min(held.version for held in self._held)

    @property
    def is_leader(self) -> bool:
        return self._me == self._leader

    @property
    def tolerates_loss(self) -> bool:
        return self._server is None  # Else a server is lost with it.

    # Coming and going

    def consensus(self) -> None:
        self._catch_up()
        self._together(Kind.MEET)

    def leave(self) -> None:
        """Take no part until `join`: the others go on without this worker.

        Where means are clipped, servers step together, and would not agree on when it is back: the others wait for it.
        """
        self._catch_up()
        if self._clips_means:
            return
        self._tell_all(Kind.LEAVE)

    def join(self) -> None:
        """Take part again, from what the servers have."""
        if self._clips_means:
            return
        self._together(Kind.JOIN)

    def finish(self) -> None:
        self.consensus()
        self._tell_all(Kind.BYE)
        if self._server is not None:
            self._wire.spawn(_until(self._server.over), deadline=False).wait()
        self.close()

    def _tell_all(self, kind: Kind) -> None:
        for task in [self._wire.spawn(self._tell(server, Head(kind))) for server in self._active]:
            task.wait()

    # Pushing

    def _push(self, bucket: Bucket, norm: float) -> None:
        marks = np.ones(len(bucket.slots), bool) if self.replica.sizes_only else np.array(marks_of(bucket))
        for held in self._of_bucket[bucket.index]:
            piece = held.piece
            payload = self._payload(held, bucket)
            wanted = self._wanted(held)
            now = self.transport.now()
            self.events.record(Event(READ, now, now, 0, (piece.number, held.clock, held.version)))
            head = Head(Kind.PUSH, piece.number, held.version, wanted, payload.nbytes, self._weight, norm)
            own = marks[[share.slot for share in piece.shares]]
            if self._rule.bound is not None:
                self._staleness[held.clock - held.version] += piece.number == 0
            held.clock += 1
            if wanted != NOTHING:
                held.reply = None
            task = self._wire.spawn(self._pushed(held, head, self._now, own, payload))
            if wanted != NOTHING:
                held.asked = task

    def _payload(self, held: _Held, bucket: Bucket) -> Tensor:
        """This worker's own copy: the bucket's memory is the user's, who may change it at once."""
        piece, codec = held.piece, self._setting.codec
        if codec is not None and piece.groups is not None:
            if self.replica.sizes_only:
                return Pool(codec.packet_bytes(piece.numel, piece.groups), bucket.flat).take()
            values = bucket.flat[piece.part].to("cpu", torch.float32)
            packet, held.state = codec.encode(values, held.state, groups=piece.groups)
            return packet
        if self._setting.factors and (packed := self._in_factors(piece, bucket)) is not None:
            return packed
        memory = held.pool.take()
        if not self.replica.sizes_only:
            memory.view(bucket.flat.dtype).copy_(bucket.flat[piece.part])
        return memory

    def _in_factors(self, piece: Piece, bucket: Bucket) -> Tensor | None:
        """The piece in factors, where they are smaller."""
        layers = {layer.slot: layer for layer in self.replica.factored}
        pairs: list[Pair | None] = []
        for share in piece.shares:
            layer = layers.get(bucket.slots[share.slot])
            kept = layer.pairs if layer is not None and layer.slot.tensor.is_contiguous() else []
            pairs.append(joined(kept) if kept else None)
        if not any(pair is not None for pair in pairs):
            return None
        return pack(piece, bucket.flat[piece.part], shapes_of(piece, bucket), pairs)

    def _wanted(self, held: _Held) -> int:
        """The version to ask for, if any: one that the iteration after the next will need is asked for in advance."""
        bound = self._rule.bound
        if bound is None:
            return 0
        needed = held.clock + 1 - bound
        if held.asked is None and self._rule.eager and bound:
            return max(needed, held.version + 1)
        if held.asked is not None or held.version > needed or (bound == 0 and held.version == needed):
            return NOTHING
        return needed if held.version < needed else needed + 1

    def _pushed(self, held: _Held, head: Head, options: np.ndarray, marks: np.ndarray, payload: Tensor) -> Operation:
        if held.server == self._me:
            assert self._server is not None
            self._server.hear(self._me, head, options, marks, payload)
        else:
            sending = [self._wire.isend(self._setting.heads.pack(head, options, marks), held.server, HEAD)]
            sending.append(self._wire.isend(payload, held.server, PAYLOAD))
            yield from sending
            held.pool.give(payload)
        if head.wanted != NOTHING:
            yield from self._hear(held)

    def _tell(self, server: int, head: Head) -> Operation:
        if server == self._me:
            assert self._server is not None
            self._server.hear(self._me, head, np.empty(0), np.empty(0), None)
        else:
            yield self._wire.isend(self._setting.heads.pack(head), server, HEAD)

    def _ask_to_stop(self) -> None:
        self._tell_all(Kind.STOP)
        self._stop_serving()

    def _stop_serving(self) -> None:
        """Go, but not before the server of this rank has told all others why."""
        with suppress(RankLost, DeadlineExceeded):
            self._tell_all(Kind.BYE)
            if self._server is not None:
                self._wire.spawn(_until(self._server.over)).wait()

    # Reading

    def _hear(self, held: _Held) -> Operation:
        """Receive a piece into its image."""
        if held.server == self._me:
            while held.reply is None or held.reply.status == Status.BEAT:
                held.reply, held.told = None, self._wire.signal()
                yield held.told
                held.told = None
            return
        head, payload = reply_tags(held.piece.number)
        reply = Reply(Status.BEAT)
        while reply.status == Status.BEAT:
            message = Reply.room()
            yield self._wire.irecv(message, held.server, head)
            reply = Reply.read(message)
        if reply.status == Status.HERE:
            yield self._wire.irecv(self._place(held), held.server, payload)
        held.reply = reply

    def _told(self, piece: int, reply: Reply, values: Tensor | None) -> None:
        """The server of this very rank says something."""
        held = self._held[piece]
        if values is not None and held.image is not None:
            self._place(held).copy_(values)
        held.reply = reply
        if held.told is not None:
            held.told.set()

    def _place(self, held: _Held) -> Tensor:
        """Where a piece goes, as bytes."""
        return held.pool.take() if held.image is None else held.image.view(torch.uint8)

    def _settle_all(self) -> None:
        for held in self._held:
            self._await(held)

    def _need(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            for held in self._of_slot[slot]:
                if held.asked is not None:
                    self._await(held)

    def _catch_up(self) -> None:
        """Wait for all that was asked for."""
        for held in self._held:
            self._await(held, needed=True)

    def _take_early(self) -> None:
        for held in self._held:
            if held.asked is not None and held.asked.done():
                self._await(held, needed=True)

    def _await(self, held: _Held, needed: bool = False) -> None:
        """Wait for what was asked for, if the next iteration may not go on without it, or it is needed all the same."""
        if held.asked is None:
            return
        bound, start_s = self._rule.bound, self.transport.now()
        if bound is not None and not needed and held.version >= held.clock - bound:
            return
        self._waited(held.asked)
        held.asked = None
        self.events.record(Event(PULL, start_s, self.transport.now()))
        self._take(held)
        if bound is None and held.piece.number == 0:
            assert held.reply is not None
            self._staleness[held.reply.staleness] += 1

    def _take(self, held: _Held) -> None:
        reply = held.reply
        assert reply is not None
        if reply.status == Status.STOPPED:
            self._stop_serving()
            raise NonFiniteLoss(self._me, [reply.version], self.replica.steps)
        if reply.status == Status.DROPPED:
            raise WorkerDropped(
                f"rank {self._me}: the server on rank {held.server} takes nothing more from this worker: an update of "
                f"piece {held.piece.number} was not what it must be. That rank's output says what was wrong with it."
            )
        held.version = reply.version
        self._leader = reply.leader
        if held.targets:
            with torch.no_grad():
                torch._foreach_copy_(held.targets, held.sources)

    def _together(self, kind: Kind) -> None:
        """Have all servers told all pieces, as they are when everybody has come, or at once."""
        start_s = self.transport.now()
        for held in self._held:
            held.reply = None
        for task in [self._wire.spawn(self._meet(server, Head(kind))) for server in self._active]:
            self._waited(task)
        for held in self._held:
            self._take(held)
            if self._rule.bound is not None:
                held.clock = max(held.clock, held.version)
        self.events.record(Event(PULL, start_s, self.transport.now()))

    def _meet(self, server: int, head: Head) -> Operation:
        yield from self._tell(server, head)
        for held in self._of_server[server]:
            yield from self._hear(held)

    def _waited(self, task: Work) -> None:
        """Wait; if it was in vain because the server of this very rank failed, say why."""
        try:
            task.wait()
        except RankLost as loss:
            if self._server is not None and self._server.failure is not None:
                raise self._server.failure from None
            if lost := sorted(loss.gone.keys() & set(self._active)):
                raise RankLost(
                    f"rank {self._me}: rank {lost[0]} is gone, and the parameters that it served with it: "
                    f"{loss.gone[lost[0]]}. Workers may be lost on one host, or if servers have ranks of their own.",
                    loss.gone,
                ) from None
            raise

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """What servers' optimisers remember, by parameter."""
        self.consensus()
        found: list[Any] = []
        for task in [self._wire.spawn(self._saved(server, found)) for server in self._active]:
            task.wait()
        shares = [(name, Share(0, start, stop, 0, whole), state) for name, (start, stop, whole), state in found]
        states = whole_states(shares, {slot.name: slot for slot in self.replica.slots})
        self._together(Kind.MEET)  # Nobody goes on before all have read.
        return {"optimizer": states}

    def _saved(self, server: int, found: list[Any]) -> Operation:
        if server == self._me:
            assert self._server is not None
            found += self._server.states()["shares"]
        else:
            yield from self._tell(server, Head(Kind.SAVE))
            states = yield from saved.hear(server, self._wire)
            found += states["shares"]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have servers go on from the model as it is here and what their optimisers are to remember."""
        images = {bucket.index: bucket.image() for bucket in self.replica.buckets}
        self.consensus()
        tasks = [
            self._wire.spawn(self._loaded(server, state, images))
            for server in self._active
            if server == self._me or (self.is_leader and self._server is None)
        ]
        for task in tasks:
            task.wait()
        for held in self._held:
            held.clock = 0  # Servers begin again.
        self._together(Kind.MEET)  # They have loaded before those who have them load come here.

    def _loaded(self, server: int, state: dict[str, Any], images: dict[int, Tensor]) -> Operation:
        mine = self._of_server[server]
        values = {str(held.piece.number): images[held.piece.bucket][held.piece.part].clone() for held in mine}
        states = {"values": values, "optimizer": state["optimizer"]}
        if server == self._me:
            assert self._server is not None
            self._server.load(states)
        else:
            yield from self._tell(server, Head(Kind.LOAD))
            yield from saved.tell(states, server, self._wire)
            yield self._wire.irecv(Reply.room(), server, reply_tags(mine[0].piece.number)[0])


def _until(signal: Signal) -> Operation:
    yield signal


@dataclass
class Prepared:
    """What a rank has before it serves or trains."""

    wire: Transport
    setting: Setting
    pieces: list[Piece]

    def server(self, replica: Replica) -> Server:
        """Start to serve, if there is anything to serve here."""
        me = self.wire.rank
        mine = [piece for piece in self.pieces if self.setting.servers[piece.server] == me]
        server = Server(mine, replica, self.wire, self.setting)
        serving = {self.setting.servers[piece.server] for piece in self.pieces}
        server.start(sorted(serving - {me}))
        return server


def prepare(replica: Replica, transport: Transport, strategy: "ParameterServer") -> Prepared:
    """Cut the model into pieces and open the conversation. Collective, the same on every rank."""
    plain = transport.inner if isinstance(transport, SharesMemory) else transport  # All of it travels in messages.
    wire = plain.channel("servers")
    workers, servers = strategy.roles(transport.size)
    compressed = strategy.codec is not None
    replica.allocate(plain, strategy.bucket_bytes, strategy.exact_below if compressed else 0)
    replica.arrange([slot.name for slot in replica.slots])
    whole = keeps_whole(replica.optimizer) or not all(is_dense(slot.tensor) for slot in replica.slots)
    pieces = cut(replica.buckets, len(servers), whole, compressed)
    num_marks = max((len(piece.shares) for piece in pieces), default=0)
    heads = Heads(len(Options(replica.optimizer)), num_marks)
    setting = Setting(
        strategy.consistency, strategy.codec, strategy.clip, tuple(workers), tuple(servers), heads, strategy.factors
    )
    return Prepared(wire, setting, pieces)
