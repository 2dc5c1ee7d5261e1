"""A server: holds pieces of the parameters, steps them as the consistency says, and tells workers.

Everything here happens in one thread, or in the simulator's engine: for every worker, steps that hear what it says, in
the order in which it says it, and steps that tell it what it asked for. Nothing waits for a worker but those.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tutti.codecs import Codec
from tutti.collectives.compressed.messages import room
from tutti.errors import PacketError, RankLost, ReplicaMismatch
from tutti.events import APPLY, Event, EventLog
from tutti.replica import Replica
from tutti.strategies.parameter_server.consistency import Consistency
from tutti.strategies.parameter_server.factored import shapes_of, unpack
from tutti.strategies.parameter_server.ledger import Ledger, Order, Update
from tutti.strategies.parameter_server.messages import saved
from tutti.strategies.parameter_server.messages.served import Pool, Served
from tutti.strategies.parameter_server.messages.wire import (
    HEAD,
    NORM,
    NOTHING,
    ORDER,
    PAYLOAD,
    Head,
    Heads,
    Kind,
    Reply,
    Status,
    reply_tags,
)
from tutti.strategies.parameter_server.pieces import Piece
from tutti.strategies.parameter_server.shard_optimizer import Stepper, clip_factor, scales_of
from tutti.transports import Transport
from tutti.transports.base import Operation, Signal

_log = logging.getLogger("tutti")


@dataclass(frozen=True)
class Setting:
    """What servers and workers agree on."""

    consistency: Consistency
    codec: Codec | None
    clip: float | None
    workers: tuple[int, ...]
    """Ranks that train."""
    servers: tuple[int, ...]
    """Ranks that serve; pieces name their places here."""
    heads: Heads
    factors: bool = False
    """Whether gradients of linear layers come as their factors, where those are smaller."""

    def most_bytes(self, piece: Piece) -> int:
        """That a worker may send of a piece."""
        if self.codec is None or piece.groups is None:
            return piece.num_bytes
        return 2 * self.codec.packet_bytes(piece.numel, piece.groups) + piece.num_bytes


@dataclass
class _Clipping:
    """A step of all pieces that waits for the norms of the other servers' pieces."""

    clock: int
    parts: list[tuple[Served, list[Update], np.ndarray]]
    """With what it is made of, and marks."""
    square: float


@dataclass
class _Client:
    """What a server knows of a worker."""

    outbox: dict[int, tuple[Served, Status]] = field(default_factory=dict)
    """What it is to be told, by piece."""
    wake: Signal | None = None
    beat_s: float = 0.0


class Server:
    """All that one rank serves."""

    def __init__(self, pieces: list[Piece], replica: Replica, transport: Transport, setting: Setting) -> None:
        """Hold `pieces`, from the parameters as they are in the replica."""
        self._transport = transport
        self._setting = setting
        self._me = transport.rank
        self.events = EventLog()
        self.members = set(setting.workers)
        """Who is waited for."""
        self._living = set(setting.workers)
        self._meeting: set[int] = set()
        self._stopped: int | None = None
        self._clients = {worker: _Client() for worker in setting.workers}
        self.told: Callable[[int, Reply, Tensor | None], None] = lambda *_: None
        """Tells the worker of this very rank."""
        self.over = transport.signal()
        """Given when no worker is left, or when the server has failed."""
        self.failure: Exception | None = None
        self._clipping: _Clipping | None = None
        self._norms: dict[tuple[int, int], float] = {}
        """Squares of others' norms, by server and clock."""
        self._others: list[int] = []
        self._first = self._me
        self._served: dict[int, Served] = {}
        rule = setting.consistency
        self._order = Order(self._living) if rule.bound is None and rule.quorum > 1 else None
        self._chooser: Ledger | None = None
        """Decides the order, on the first server."""
        self._shapes = {piece.number: shapes_of(piece, replica.buckets[piece.bucket]) for piece in pieces}
        for piece in pieces:
            bucket = replica.buckets[piece.bucket]
            stepper = None
            if not replica.sizes_only:
                stepper = Stepper(piece, bucket, replica.optimizer, bucket.image()[piece.part].clone())
            ledger = Ledger(rule, self.members, self._order)
            self._served[piece.number] = Served(piece, ledger, stepper, bucket.flat)
        if not self._served:
            self.over.set()

    def pool(self, piece: int) -> Pool:
        return self._served[piece].pool

    def start(self, others: list[int]) -> None:
        """Serve all workers of other ranks; `others` serve too."""
        self._others = others
        if not self._served:
            return
        self._first = min([self._me, *others])
        if self._order is not None:
            if self._me == self._first:
                self._chooser = Ledger(self._setting.consistency, self.members)
            else:
                self._begin(self._hear_order())
        for worker in self._setting.workers:
            if worker != self._me:
                self._begin(self._attend(worker))
                self._begin(self._tell(worker))
        if self._clips_means:
            for server in others:
                self._begin(self._hear_norms(server))

    def _begin(self, steps: Operation) -> None:
        self._transport.spawn(self._watched(steps))

    def _watched(self, steps: Operation) -> Operation:
        """The same steps. If they fail, so does the server: nobody waits for the work that they are."""
        try:
            yield from steps
        except RankLost:
            return  # A worker, and whoever attends it knows; or a server, and its workers do.
        except Exception as error:
            _log.error("rank %d: the server here has failed: %s: %s", self._me, type(error).__name__, str(error))
            self.failure = error
            self.over.set()
            if self._me in self._setting.workers:
                self._transport.interrupt()  # The worker of this rank, too, is told that it waits in vain.

    # What workers say

    def _attend(self, worker: int) -> Operation:
        """Hear what a worker says until it is gone."""
        transport, heads = self._transport, self._setting.heads
        try:
            while worker in self._living:
                message = heads.room()
                yield transport.irecv(message, worker, HEAD)
                head, options, marks = heads.read(message)
                payload = None
                if head.num_bytes:
                    payload = self._room(head)
                    yield transport.irecv(payload, worker, PAYLOAD)
                self.hear(worker, head, options, marks, payload)
                del payload
        except RankLost as loss:
            self._lost(worker, loss.gone.get(worker, "it answers no more"))
        except (PacketError, ReplicaMismatch, ValueError) as error:
            self._drop(worker, str(error))

    def _room(self, head: Head) -> Tensor:
        """Somewhere to receive what follows a head."""
        served = self._served.get(head.piece)
        if served is None or head.kind != Kind.PUSH or not 0 < head.num_bytes <= self._setting.most_bytes(served.piece):
            raise PacketError(f"{head.num_bytes} bytes for piece {head.piece}, which cannot be")
        if head.num_bytes == served.piece.num_bytes:
            return served.pool.take()
        return room(head.num_bytes, served.values())

    def hear(self, worker: int, head: Head, options: np.ndarray, marks: np.ndarray, payload: Tensor | None) -> None:
        """Act on what a worker says."""
        if worker not in self._living:
            return
        try:
            match head.kind:
                case Kind.PUSH:
                    self._push(worker, head, options, marks, payload)
                case Kind.MEET:
                    self._meeting.add(worker)
                    self._leave_clocks(worker)
                    if self._stopped is not None:
                        self._stop(self._stopped)
                case Kind.LEAVE:
                    self._leave_clocks(worker)
                case Kind.JOIN:
                    self._count_in([worker])
                case Kind.SAVE:
                    self._begin(saved.tell(self.states(), worker, self._transport))
                case Kind.LOAD:
                    self._begin(self._load(worker))
                case Kind.STOP:
                    self._stop(worker)
                case Kind.BYE:
                    self._gone(worker)
        except (PacketError, ReplicaMismatch, ValueError) as error:
            self._drop(worker, str(error))

    def _push(self, worker: int, head: Head, options: np.ndarray, marks: np.ndarray, payload: Tensor | None) -> None:
        served = self._served.get(head.piece)
        if served is None or payload is None:
            raise PacketError(f"an update of piece {head.piece} with {head.num_bytes} bytes, which is not held here")
        if not (isfinite(head.weight) and head.weight >= 0) or not 0 <= head.base <= served.ledger.version:
            raise PacketError(f"an update of weight {head.weight}, computed from version {head.base}")
        values = self._decoded(served, payload)
        marks = marks[: len(served.piece.shares)]
        served.ledger.push(Update(worker, head.base, head.weight, head.norm, options, marks, values))
        if self._chooser is not None and served.piece.number == min(self._served):
            self._chooser.push(Update(worker, 0, 0.0, 0.0, None, None, None))
            if self._choose():
                self._settle(list(self._served.values()))
        if head.wanted != NOTHING:
            served.asks[worker] = head.wanted
        self._settle([served], worker)
        self._beat()

    def _decoded(self, served: Served, payload: Tensor) -> Tensor | None:
        """The gradient that a message holds; None where there are only sizes."""
        if served.stepper is None:
            return None
        piece, values = served.piece, served.stepper.values
        codec = self._setting.codec
        if self._setting.factors and payload.numel() < piece.num_bytes:
            found = served.pool.take().view(values.dtype)
            unpack(payload, piece, self._shapes[piece.number], found)
            return found
        if codec is None or piece.groups is None:
            if payload.numel() != piece.num_bytes:
                raise PacketError(f"an update of {payload.numel()} bytes, wanted {piece.num_bytes}")
            return payload.view(values.dtype)
        found = served.pool.take().view(values.dtype)  # Given back when it has been added.
        wide = found if found.dtype == torch.float32 else torch.empty(piece.numel, dtype=torch.float32, device="cpu")
        codec.decode(payload, wide, groups=piece.groups)
        return found if wide is found else found.copy_(wide)

    def _leave_clocks(self, worker: int) -> None:
        self.members.discard(worker)
        self._settle_all()

    def _count_in(self, workers: list[int]) -> None:
        """Wait for these from the next version on, and tell them all pieces."""
        self.members.update(workers)
        for served in self._served.values():
            for worker in workers:
                served.ledger.join(worker)
                served.asks[worker] = served.ledger.clock_of(worker) - (self._setting.consistency.bound or 0)
                self._answer(served, worker)  # Now, or when what it had sent before it went is in.

    def _stop(self, worker: int) -> None:
        self._stopped = worker
        for other in self._living:
            for served in self._served.values():
                if other in self._meeting or other in served.asks:
                    self._reply(other, served, Status.STOPPED)
            self._meeting.discard(other)
        for served in self._served.values():
            served.asks.clear()

    def _load(self, worker: int) -> Operation:
        """Start again from what a worker has, with everybody at the beginning."""
        states = yield from saved.hear(worker, self._transport)
        self.load(states)
        self._reply(worker, next(iter(self._served.values())), Status.BEAT)

    def load(self, states: dict[str, Any]) -> None:
        """Start again from these parameters and what the optimiser is to remember of them."""
        self.members.clear()
        self.members.update(self._living)
        if self._chooser is not None:
            self._chooser.restart()
        self._clipping = None
        for served in self._served.values():
            served.ledger.restart()
            served.answered, served.version = -1, 0
            if self._order is not None:
                self._order.clear()
            served.forget_snapshot()
            if served.stepper is not None:
                served.stepper.values.copy_(states["values"][str(served.piece.number)])
                served.stepper.load(states["optimizer"])

    def states(self) -> dict[str, Any]:
        """What the optimiser remembers of what is held here."""
        steppers = [served.stepper for served in self._served.values() if served.stepper is not None]
        shares = [
            [name, [share.start, share.stop, share.whole], state]
            for stepper in steppers
            for name, share, state in stepper.state()
        ]
        return {"shares": shares}

    def _gone(self, worker: int) -> None:
        """A worker takes no part any more."""
        self._living.discard(worker)
        self._meeting.discard(worker)
        self.members.discard(worker)
        for served in self._served.values():
            served.asks.pop(worker, None)
        if (wake := self._clients[worker].wake) is not None:
            wake.set()
        self._settle_all()
        if not self._living:
            self.over.set()

    def _lost(self, worker: int, why: str) -> None:
        if worker in self._living:
            self._say(worker, why)
            for served in self._served.values():
                served.ledger.drop(worker)
            self._gone(worker)

    def _drop(self, worker: int, why: str) -> None:
        for served in self._served.values():
            self._reply(worker, served, Status.DROPPED)
        self._say(worker, f"it was dropped, having sent {why}; the parameters stay as they were", always=True)
        self._gone(worker)

    def _say(self, worker: int, why: str, always: bool = False) -> None:
        clock = next(iter(self._served.values())).ledger.clock_of(worker)
        # Every server sees it; one says it.
        if always or self._me == min({self._me, *self._others} - {worker}):
            left = len(self._living) - 1
            rest = "and its server with it" if worker in self._setting.servers else f"and {left} go on"
            _log.warning("rank %d: worker %d left at clock %d, %s: %s", self._me, worker, clock, rest, why)

    # Steps

    def _settle_all(self) -> None:
        self._choose()
        if self._order is not None:
            self._order.forget(min(served.ledger.place for served in self._served.values()))
        self._settle(list(self._served.values()))
        self._conclude()

    def _settle(self, changed: list[Served], asked: int | None = None) -> None:
        """Take the steps that are due, and tell those who may read; `asked` is who may have just asked."""
        if self._clips_means:
            self._settle_clipped()
        else:
            for served in changed:
                while due := served.ledger.take():
                    self._step(served, due, self._combine(served, due))
                served.version = served.ledger.version
        if self._clipping is None:  # Else versions are counted whose steps are still to be taken.
            for served in changed:
                self._answer(served, asked)

    def _combine(self, served: Served, due: list[Update]) -> np.ndarray:
        now = self._transport.now()
        for update in due:
            served.staleness[update.worker] = update.staleness
            about = (served.piece.number, served.ledger.version, update.worker, update.clock)
            self.events.record(Event(APPLY, now, now, 0, about))
        if served.stepper is None:
            return np.empty(0)
        clip = None if self._clips_means else self._setting.clip
        return served.stepper.combine(due, scales_of(due, served.piece, self._setting.consistency, clip))

    def _step(self, served: Served, due: list[Update], marks: np.ndarray, factor: float = 1.0) -> None:
        """Step by what was combined of these updates, whose memory is free afterwards."""
        if served.stepper is None:
            return
        served.stepper.step(marks, due[0].options, factor)
        for update in due:
            if update.values.dtype == served.stepper.values.dtype:
                served.pool.give(update.values.view(torch.uint8))

    def _answer(self, served: Served, asked: int | None = None) -> None:
        """Tell those who may read; if nothing is new, only who asked just now can be one of them."""
        new = self._setting.consistency.bound is None or served.answered != served.ledger.version
        served.answered = served.ledger.version
        for worker, wanted in [(who, wanted) for who, wanted in served.asks.items() if new or who == asked]:
            if self._stopped is not None:
                self._reply(worker, served, Status.STOPPED)
            elif served.ledger.readable(worker, wanted):
                self._reply(worker, served, Status.HERE)
            else:
                continue
            del served.asks[worker]

    def _conclude(self) -> None:
        """If every living worker has come to the meeting, tell all the same, and go on together."""
        idle = self._clipping is None and all(served.ledger.idle for served in self._served.values())
        if idle and self._meeting and self._meeting == self._living:
            present = sorted(self._meeting)
            self._meeting.clear()
            self._count_in(present)

    # Order: where a version is made of some updates only, all servers take the same.

    def _choose(self) -> bool:
        """Decide what can be decided, and tell the other servers; whether there was anything."""
        chosen = False
        while self._chooser is not None and self._order is not None and (due := self._chooser.take()):
            chosen = True
            self._order.sets.append({(update.worker, update.clock) for update in due})
            told = torch.full((2 * self._setting.consistency.quorum,), NOTHING, dtype=torch.int64, device="cpu")
            told[: 2 * len(due)] = torch.tensor([number for each in due for number in (each.worker, each.clock)])
            for server in self._others:
                self._begin(_sent(self._transport, told, server, ORDER))
        return chosen

    def _hear_order(self) -> Operation:
        assert self._order is not None
        while self._living:
            told = torch.empty(2 * self._setting.consistency.quorum, dtype=torch.int64, device="cpu")
            yield self._transport.irecv(told, self._first, ORDER)
            pairs = told.view(-1, 2).tolist()
            self._order.sets.append({(worker, clock) for worker, clock in pairs if worker != NOTHING})
            self._settle_all()

    # Clipping: all pieces of all servers take a step together, when the norm of the whole is known.

    @property
    def _clips_means(self) -> bool:
        return self._setting.clip is not None and self._setting.consistency.bound is not None

    def _settle_clipped(self) -> None:
        while self._clipping is not None or self._begin_clipping():
            clipping = self._clipping
            assert clipping is not None
            known = [self._norms.get((server, clipping.clock)) for server in self._others]
            if None in known:
                return
            for server in self._others:
                del self._norms[server, clipping.clock]
            total = clipping.square + sum(norm for norm in known if norm is not None)
            assert self._setting.clip is not None
            factor = clip_factor(self._setting.clip, sqrt(total))
            for served, due, marks in clipping.parts:
                self._step(served, due, marks, factor)
            self._clipping = None
            for served in self._served.values():
                served.version = served.ledger.version
                self._answer(served)
            self._conclude()

    def _begin_clipping(self) -> bool:
        """Take what makes the next step of all pieces, if all is there, and tell other servers how large it is."""
        pieces = list(self._served.values())
        if any(served.ledger.waits for served in pieces):
            return False
        asked = [clock for _, clock in self._norms]
        clocks = [clock for served in pieces if (clock := served.ledger.next_clock) is not None] + asked
        if not clocks:
            return False
        clock, parts, square = min(clocks), [], 0.0
        for served in pieces:
            if served.ledger.next_clock == clock and (due := served.ledger.take()):
                marks = self._combine(served, due)
                parts.append((served, due, marks))
                square += 0.0 if served.stepper is None else served.stepper.square_norm(marks)
            else:
                served.ledger.skip(clock)
        for server in self._others:
            told = torch.tensor([float(clock), square], dtype=torch.float64, device="cpu")
            self._begin(_sent(self._transport, told, server, NORM))
        self._clipping = _Clipping(clock, parts, square)
        return True

    def _hear_norms(self, server: int) -> Operation:
        while self._living:
            told = torch.empty(2, dtype=torch.float64, device="cpu")
            yield self._transport.irecv(told, server, NORM)
            self._norms[server, int(told[0])] = float(told[1])
            self._settle(list(self._served.values()))

    # What workers are told

    def _reply(self, worker: int, served: Served, status: Status) -> None:
        if worker == self._me:
            payload = served.values() if status == Status.HERE else None
            self.told(served.piece.number, self._head_of(worker, served, status), payload)
            return
        client = self._clients[worker]
        client.outbox[served.piece.number] = served, status
        if client.wake is not None:
            client.wake.set()

    def _head_of(self, worker: int, served: Served, status: Status) -> Reply:
        version = self._stopped if status == Status.STOPPED else served.version
        num_bytes = served.piece.num_bytes if status == Status.HERE else 0
        leader = min(self._living, default=0)
        return Reply(status, version or 0, served.staleness.get(worker, 0), num_bytes, leader)

    def _tell(self, worker: int) -> Operation:
        """Tell a worker what it is to be told, what its next forward pass needs first before the rest."""
        client, transport = self._clients[worker], self._transport
        while worker in self._living or client.outbox:
            if not client.outbox:
                client.wake = transport.signal()
                yield client.wake
                client.wake = None
                continue
            number = max(client.outbox)
            served, status = client.outbox.pop(number)
            head, payload = reply_tags(number)
            reply = self._head_of(worker, served, status)
            if status == Status.HERE:
                snapshot = served.snapshot()
                sending = [transport.isend(reply.pack(), worker, head)]
                sending.append(transport.isend(snapshot.memory, worker, payload))
                yield from sending
                served.give_back(snapshot)
            else:
                yield transport.isend(reply.pack(), worker, head)

    def _beat(self) -> None:
        """Tell those who wait in a meeting, now and then, that the others are on their way."""
        now = self._transport.now()
        for worker in self._meeting:
            client = self._clients[worker]
            if now - client.beat_s > self._transport.timeout.total_seconds() / 8:
                client.beat_s = now
                self._reply(worker, self._served[min(self._served)], Status.BEAT)


def _sent(transport: Transport, tensor: Tensor, dst: int, tag: int) -> Operation:
    yield transport.isend(tensor, dst, tag)
