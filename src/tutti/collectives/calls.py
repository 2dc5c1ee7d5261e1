"""`CollectiveCalls`: calls that every rank makes with a small value, and that give all of them the same answer.

How it works
------------
Calls have a channel of their own, so that they fit between the steps of any strategy. All ranks make the same calls in
the same order, which numbers them. The root of a call is the lowest rank that is not lost:

    root:    HERE to every rank; receives every rank's REQUEST; combines the values; ANSWER (or ERROR) to every rank
    others:  REQUEST to the root; receive HERE, then ANSWER or ERROR

Only the root combines, so all ranks have the same bits. Whatever is wrong with the values, or with one rank's call, is
raised by the root and by ERROR on all others: no rank is left waiting, and the next call works.

Waits. The root waits for requests, each until it arrives, its sender is lost, or after the timeout; then it knows which
ranks have not called, names them in its own error and sends that as ERROR. Another rank waits for its root: if HERE has
not come by the timeout, the root is the rank that has not called; after HERE, the root's own deadline ends the wait,
and a second timeout does if the root hangs.

Lost ranks. If a lost rank is an error (`elastic` is False), the root sends that as ERROR. Otherwise it leaves the rank
out. If the root itself is lost, the others turn to the next one, which becomes the root of the same call. It may have
had the old root's answer already and be in a later call by then: it keeps its last answer, and sends that to a rank
that is one call behind. A rank whose request cannot be answered any more gets an ERROR.

Everything on the channel runs as spawned operations, one per peer, so that the loss of one does not end the others.

Ranks of one host make calls that no rank may miss in shared memory instead (`memory_calls`), where a call takes some
microseconds. Rank 0 is the root there. The values of one call may be too large for that: then all ranks make it here.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from tutti.collectives.memory_calls import MemoryCalls
from tutti.collectives.packing import from_bytes, to_bytes
from tutti.errors import ConfigError, DeadlineExceeded, RankLost, ReplicaMismatch, TuttiError
from tutti.transports import SharesMemory, Transport, Work
from tutti.transports.base import Operation

Combine = Callable[[dict[int, Any]], Any]
"""From the values by rank, of the ranks that took part, to the answer. Raises for values that do not go together."""

_ERRORS: dict[str, type[TuttiError]] = {
    error.__name__: error for error in (ReplicaMismatch, ConfigError, RankLost, DeadlineExceeded)
}
"""Errors that the root sends to the others, by name; a class before the one that it extends."""


class _Kind(IntEnum):
    REQUEST = 0
    HERE = 1
    ANSWER = 2
    ERROR = 3


@dataclass
class _Call:
    """One call, as this rank sees it."""

    name: str
    number: int
    elastic: bool
    root_is_here: bool = False
    answer: Any = None
    error: TuttiError | None = None


class CollectiveCalls:
    """Calls among the ranks of a transport. Collective: all of them make it at the same point."""

    def __init__(self, transport: Transport) -> None:
        # Messages only: where the transport shares memory, the plain transport beneath it is used.
        plain = transport.inner if isinstance(transport, SharesMemory) else transport
        self._channel = plain.channel("calls")
        self._transport = transport
        self._memory: MemoryCalls | None = None
        # All ranks together are the transport itself. Others are opened when a call finds that ranks are lost.
        self._groups: dict[tuple[int, ...], Transport] = {tuple(range(transport.size)): transport}
        self._rank = transport.rank
        self._alive = set(range(transport.size))
        self._num_calls = 0
        self._last_answer: Tensor | None = None
        self._failure: TuttiError | None = None
        """Set once a call has failed in a way that leaves ranks in different calls: later calls would mix them."""

    def open(self) -> None:
        """Let calls go through shared memory from now on, where ranks have it. Collective. Idempotent."""
        if self._memory is None:
            self._memory = MemoryCalls.of(self._transport)

    def call(self, name: str, value: Any, combine: Combine, elastic: bool) -> Any:
        """Return what `combine` makes of all ranks' values, the same on every rank. Collective.

        Args:
            name: what the user calls it; ranks that make different calls get an error with both.
            value: a nest of tensors and plain values. A `ConfigError` in its place is raised on every rank.
            elastic: whether a rank that is lost is left out, rather than an error.
        """
        if self._failure is not None:
            raise type(self._failure)(f"an earlier call failed: {self._failure}")
        if len(self._alive) == 1:
            if isinstance(value, ConfigError):
                raise value
            return combine({self._rank: value})
        self._num_calls += 1
        call = _Call(name, self._num_calls, elastic)
        data = _request(name, value)
        if self._memory is not None and not elastic:
            self._call_in_memory(self._memory, call, data, combine)
        while call.answer is None and call.error is None:
            # Again after every loss: ranks that know the same losses have the same root, and `_receive_request` bridges
            # the moment in which they do not.
            root = min(self._alive)
            if root == self._rank:
                self._lead(call, data, combine)
            else:
                self._follow(call, root, data)
        if call.error is not None:
            raise call.error
        return call.answer[0]

    def _call_in_memory(self, memory: MemoryCalls, call: _Call, data: Tensor, combine: Combine) -> None:
        """Make a call in shared memory. It has neither answer nor error afterwards if its values are too large."""

        def answer(requests: list[Tensor]) -> Tensor:
            self._combine(call, {rank: from_bytes(request) for rank, request in enumerate(requests)}, combine)
            return to_bytes(_outcome(call))

        try:
            found = memory.exchange(data, answer)
        except DeadlineExceeded:
            late = memory.late_ranks()
            self._failure = call.error = self._missing_error(call, late) if late else self._silent_error(call, 0)
        except RankLost as error:
            self._failure = call.error = error
        else:
            if found is None:
                call.answer = call.error = None
            elif self._rank != 0:
                _take_outcome(call, *from_bytes(found))

    @property
    def num_lost(self) -> int:
        """Number of ranks that calls have found lost, as this rank knows."""
        return self._transport.size - len(self._alive)

    def among(self, ranks: Sequence[int]) -> Transport:
        """Return a transport between some ranks, as a call has found them alive. Collective among them."""
        if tuple(ranks) not in self._groups:
            self._groups[tuple(ranks)] = self._transport.channel("living", ranks)
        return self._groups[tuple(ranks)]

    # The root

    def _lead(self, call: _Call, data: Tensor, combine: Combine) -> None:
        """Collect the values of all others, and answer."""
        requests: dict[int, Any] = {self._rank: from_bytes(data)}
        peers = sorted(self._alive - {self._rank})
        # All at once, so that the deadline of the slowest is one timeout after this rank's call, and not one for each.
        works = [self._channel.spawn(self._receive_request(peer, call, requests)) for peer in peers]
        try:
            for work in works:
                work.wait()
            if self._failure is not None:
                raise self._failure
            self._combine(call, requests, combine)
        except DeadlineExceeded:
            # Operations still wait for the missing ranks, so nothing else can be received here any more.
            self._failure = call.error = self._missing_error(call, sorted(set(peers) - requests.keys()))
        except RankLost as error:
            self._failure = call.error = error
        kind, content = _outcome(call)
        # Kept until the next call is answered: a rank that lost an earlier root may still ask for it.
        self._last_answer = _message(kind, call.number, to_bytes(content))
        # A rank that did not come cannot take the answer, and a send to it could block.
        here = [peer for peer in peers if peer in requests]
        for work in [self._channel.spawn(self._send(peer, self._last_answer)) for peer in here]:
            work.wait()

    def _combine(self, call: _Call, requests: dict[int, Any], combine: Combine) -> None:
        """Set the answer of a call, or the error that its values are."""
        try:
            call.answer = [combine(_values(call.name, requests, self._channel.world_ranks))]
        except ConfigError as error:
            call.error = error

    def _receive_request(self, peer: int, call: _Call, requests: dict[int, Any]) -> Operation:
        """Tell a peer that its root is here, and receive what it calls with; note if it is lost instead."""
        try:
            yield from _sending(self._channel, peer, _message(_Kind.HERE, call.number))
            while True:
                _, number, data = yield from _receiving(self._channel, peer)
                if number == call.number:
                    requests[peer] = from_bytes(data)
                    return
                if number > call.number or self._last_answer is None:
                    # A root before this one has answered it, and was lost before it answered this rank.
                    self._failure = RankLost(
                        f"rank {self._channel.world_rank}: a rank was lost in the middle of {call.name}, whose answer "
                        f"has reached rank {self._channel.world_ranks[peer]}, but not this one."
                    )
                    return
                yield from _sending(self._channel, peer, self._last_answer)  # It missed the last answer.
        except RankLost as error:
            self._alive.discard(peer)
            if not call.elastic:
                self._failure = error  # Raised when the others have come: they are to learn it too.

    def _send(self, peer: int, message: Tensor) -> Operation:
        """Send an answer to a peer, which may be lost by now."""
        try:
            yield from _sending(self._channel, peer, message)
        except RankLost:
            return  # The next call finds that out again, and knows whether it is an error.

    # The others

    def _follow(self, call: _Call, root: int, data: Tensor) -> None:
        """Send this rank's value to the root, and wait for the answer, or for the loss of the root."""
        work = self._channel.spawn(self._ask(call, root, _message(_Kind.REQUEST, call.number, data)))
        try:
            work.wait()
        except DeadlineExceeded:
            self._failure = call.error = self._no_answer(call, root, work)

    def _ask(self, call: _Call, root: int, message: Tensor) -> Operation:
        """Send this rank's request to the root, and take its answer, its error or its loss."""
        try:
            yield from _sending(self._channel, root, message)
            while True:
                kind, number, data = yield from _receiving(self._channel, root)
                if number < call.number:
                    continue  # Of a call that another root has answered.
                if kind == _Kind.HERE:
                    call.root_is_here = True
                    continue
                # Ranks other than the root keep it too: if the root is lost, the next one may have to give it to a
                # rank that missed it.
                self._last_answer = _message(kind, number, data)
                _take_outcome(call, kind, from_bytes(data))
                return
        except RankLost as error:
            self._alive.discard(root)
            if not call.elastic:
                self._failure = call.error = error

    def _no_answer(self, call: _Call, root: int, work: Work) -> TuttiError:
        """Return the error of a rank that has waited for its root in vain."""
        if not call.root_is_here:
            return self._missing_error(call, [root])
        with suppress(DeadlineExceeded):
            work.wait()  # The root waits for somebody: it knows for whom, and its deadline is close.
        return call.error or self._silent_error(call, root)

    def _silent_error(self, call: _Call, root: int) -> DeadlineExceeded:
        """Return the error of a rank whose root has come and has not answered."""
        return DeadlineExceeded(
            f"rank {self._channel.world_rank}: {call.name} was called by rank {self._channel.world_ranks[root]}, which "
            "did not answer in time: it waited for another rank, which its own error names, or hangs."
        )

    def _missing_error(self, call: _Call, missing: Sequence[int]) -> DeadlineExceeded:
        """Return the error that names the ranks which have not made a call that others wait in."""
        numbers = ", ".join(str(self._channel.world_ranks[rank]) for rank in missing)
        names = f"rank{'' if len(missing) == 1 else 's'} {numbers}"
        return DeadlineExceeded(
            f"{call.name} waited in vain for {names}, which did not call it and can no longer do so. All ranks that "
            "train must make the same calls in the same order."
        )


def _request(name: str, value: Any) -> Tensor:
    """Return a request as bytes: name and value, or name, None and the mistake that the root raises on all ranks."""
    try:
        if isinstance(value, ConfigError):
            raise value
        return to_bytes([name, value])
    except ConfigError as error:  # Raised by this rank alone, it would leave the others waiting.
        return to_bytes([name, None, str(error)])


def _values(name: str, requests: dict[int, Any], world_ranks: Sequence[int]) -> dict[int, Any]:
    """Return the values of all requests by rank. Raises if the ranks made different calls, or one made a mistake."""
    # In the order of ranks, since requests come in any order, and errors and sums must not depend on that.
    requests = dict(sorted(requests.items()))
    if others := [f"rank {world_ranks[rank]} called {got[0]}" for rank, got in requests.items() if got[0] != name]:
        leader = world_ranks[min(requests)]
        raise ReplicaMismatch(f"rank {leader} called {name}, and {'; '.join(others)}. All ranks make the same calls.")
    if mistakes := {world_ranks[rank]: got[2] for rank, got in requests.items() if len(got) > 2}:
        raise ConfigError("\n".join(f"rank {rank}: {name}: {mistake}" for rank, mistake in mistakes.items()))
    return {rank: got[1] for rank, got in requests.items()}


def _outcome(call: _Call) -> list[Any]:
    """Return what the root sends of a call: the kind of the message, and its content."""
    if call.error is None:
        return [_Kind.ANSWER, call.answer]
    return [_Kind.ERROR, [_name(call.error), str(call.error)]]


def _take_outcome(call: _Call, kind: int, content: Any) -> None:
    """Set the answer or the error of a call to what the root has sent."""
    if kind == _Kind.ANSWER:
        call.answer = content
    else:
        call.error = _ERRORS[content[0]](content[1])


def _name(error: TuttiError) -> str:
    """Return the name in `_ERRORS` of an error, or of the class that it extends."""
    return next(name for name, kind in _ERRORS.items() if isinstance(error, kind))


# Kind, number of the call and length of the data, as int64.
_HEADER_BYTES = 3 * 8


def _message(kind: _Kind, number: int, data: Tensor | None = None) -> Tensor:
    """Return a message: kind, number of the call, length of the data, and the data."""
    data = torch.empty(0, dtype=torch.uint8, device="cpu") if data is None else data
    header = torch.tensor([kind, number, data.numel()], device="cpu").view(torch.uint8)
    return torch.cat([header, data])


def _sending(channel: Transport, peer: int, message: Tensor) -> Operation:
    """Send the header first: the receiver learns the length of the data from it."""
    yield channel.isend(message[:_HEADER_BYTES], peer)
    if message.numel() > _HEADER_BYTES:
        yield channel.isend(message[_HEADER_BYTES:], peer)


def _receiving(channel: Transport, peer: int) -> Any:
    """Receive a message: a generator that returns its kind, its number and its data."""
    header = torch.empty(_HEADER_BYTES, dtype=torch.uint8, device="cpu")
    yield channel.irecv(header, peer)
    kind, number, length = header.view(torch.int64).tolist()
    # The header gives the length: only the sender knows how long its JSON text and tensors are.
    data = torch.empty(length, dtype=torch.uint8, device="cpu")
    if length:
        yield channel.irecv(data, peer)
    return _Kind(kind), number, data
