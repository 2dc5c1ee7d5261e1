"""Meetings: all ranks that are left agree on who they are and, perhaps, on the mean of what they bring.

Everybody tells everybody of having come. When all have, each brings its value to the first of them, who tells all what
has come of it. If the first is lost, everybody turns to the next with what they have, the outcome if they know it: so
no two ranks that are left ever have different outcomes of one meeting, and nobody waits for one who is gone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor

from tutti.errors import RankLost
from tutti.strategies.decentralised.peer_group import Company
from tutti.strategies.decentralised.wire import Head, Kind
from tutti.transports.base import Operation

_LINE_BYTES = 64


class Purpose(IntEnum):
    """What a rank comes to a meeting for. If one only regroups, all do, and the others come again."""

    REGROUP = 0
    AGREE = 1
    PART = 2


@dataclass(frozen=True)
class Outcome:
    """What has come of a meeting."""

    number: int
    purpose: Purpose
    clock: int
    """The largest of those who came."""
    group: tuple[int, ...]
    """Who came."""
    value: Tensor | None
    """The mean, if they came to agree."""


class Meetings:
    """Those of one company, one after the other."""

    def __init__(self, company: Company, average: Callable[[list[Tensor]], Tensor], sizes_only: bool) -> None:
        self._company, self._average, self._sizes_only = company, average, sizes_only
        self._me = company.me
        self.number = 0
        """Of the last whose outcome is known here."""
        self.within = False
        """Whether this rank is in one."""
        self.parted = False
        self._arrivals: dict[int, Head] = {}
        self._brought: dict[int, tuple[Head, Tensor | None]] = {}
        self._last: tuple[Head, Tensor | None] | None = None
        self._beat_s = 0.0

    # What the exchange does

    def attend(
        self, purpose: Purpose, clock: int, ready: Callable[[], bool], bring: Callable[[], Tensor | None]
    ) -> Operation:
        """Come to the next meeting, and be there until it is over; `bring` is asked when all are here and `ready`."""
        company, number = self._company, self.number + 1
        self.within = True
        company.tell_all(Head(Kind.ARRIVED, number, purpose, clock))
        yield from company.until(lambda: self.number >= number or (self.all_here(number) and ready()))
        regroup = purpose == Purpose.REGROUP or self.regroup_called
        mine = None if regroup else bring()
        told = self._me
        while self.number < number and not company.over:
            if company.leader == self._me:
                if company.others <= self._brought.keys():
                    self._conclude(number, clock, mine)
                    break
            elif told != company.leader:
                told = company.leader
                company.tell(told, Head(Kind.VALUE, number, 0, clock, 0 if mine is None else mine.nbytes), mine)
            yield from company.until(partial(self._moved_on, number, company.leader))
        self.within = False

    def part(self, clock: int) -> Operation:
        """Leave when everybody knows the last outcome and wants to leave; or come to know that somebody does not."""
        company, number = self._company, self.number + 1
        company.tell_all(Head(Kind.ARRIVED, number, Purpose.PART, clock))
        yield from company.until(lambda: self.all_here(number) or self._others_meet(number))
        if self._others_meet(number):
            return
        self.parted = True
        company.tell_all(Head(Kind.BYE))
        yield from company.until(company.flushed)

    def _others_meet(self, number: int) -> bool:
        """Whether somebody has come to that meeting for something else than to leave."""
        came = [self._arrivals[peer] for peer in self._company.others if self.waits(peer, number)]
        return any(arrival.origin != Purpose.PART for arrival in came)

    def all_here(self, number: int) -> bool:
        """Whether everybody has come to that meeting."""
        return all(self.waits(peer, number) for peer in self._company.others)

    def waits(self, peer: int, number: int | None = None) -> bool:
        """Whether a peer is in that meeting, or the next."""
        arrival = self._arrivals.get(peer)
        return arrival is not None and arrival.number >= (self.number + 1 if number is None else number)

    @property
    def regroup_called(self) -> bool:
        """Whether somebody waits for everybody to come and regroup."""
        calls = [self._arrivals[peer] for peer in self._company.others if self.waits(peer)]
        return any(call.origin == Purpose.REGROUP for call in calls)

    @property
    def outcome(self) -> Outcome:
        """Of the last meeting."""
        assert self._last is not None
        head, payload = self._last
        if payload is None or self._sizes_only:
            group, value = tuple(sorted(self._company.living)), payload
        else:
            words = payload.view(torch.int64)
            group = tuple(words[1 : 1 + int(words[0])].tolist())
            value = payload[_aligned(8 + 8 * len(group)) :]
        purpose = Purpose(head.origin)
        return Outcome(head.number, purpose, head.clock, group, value if purpose == Purpose.AGREE else None)

    def beat(self) -> None:
        """Tell those who wait, now and then, that this rank is on its way."""
        now = self._company.wire.now()
        if not self.within and now - self._beat_s > self._company.wire.timeout.total_seconds() / 8:
            self._beat_s = now
            for peer in sorted(self._company.others):
                if self.waits(peer):
                    self._company.tell(peer, Head(Kind.BEAT))

    # What others say

    def hear(self, peer: int, head: Head, payload: Tensor | None) -> None:
        match head.kind:
            case Kind.ARRIVED:
                self._arrivals[peer] = head
                self._company.clocks[peer] = head.clock
            case Kind.VALUE if head.number > self.number:
                self._brought[peer] = head, payload
            case Kind.VALUE if self._last is not None and head.number == self.number:
                self._company.tell(peer, *self._last)
            case Kind.RESULT if head.number == self.number + 1:
                self._know(head, payload)

    def lost(self, peer: int) -> None:
        self._brought.pop(peer, None)
        leader = self._company.leader
        if self._last is not None and peer < leader != self._me:
            self._company.tell(leader, *self._last)  # It may have to tell those who do not know.

    def _moved_on(self, number: int, leader: int) -> bool:
        """Whether the outcome is known, another leads, or this rank leads and has what it takes."""
        complete = self._company.leader == self._me and self._company.others <= self._brought.keys()
        return self.number >= number or self._company.leader != leader or complete

    def _conclude(self, number: int, clock: int, mine: Tensor | None) -> None:
        brought = {peer: self._brought[peer] for peer in sorted(self._company.others)}
        clocks = [clock, *(head.clock for head, _ in brought.values())]
        values = [mine, *(value for _, value in brought.values())]  # This rank is the first of them.
        given = [value for value in values if value is not None]
        purpose = Purpose.AGREE if len(given) == len(values) else Purpose.REGROUP
        mean = self._average(given) if purpose == Purpose.AGREE else None
        payload = self._payload([self._me, *brought], mean)
        num_bytes = 0 if payload is None else payload.nbytes
        self._know(Head(Kind.RESULT, number, purpose, max(clocks), num_bytes), payload)

    def _payload(self, group: list[int], value: Tensor | None) -> Tensor | None:
        if self._sizes_only:
            return value
        start = _aligned(8 + 8 * len(group))
        payload = torch.zeros(start + (0 if value is None else value.nbytes), dtype=torch.uint8, device="cpu")
        payload.view(torch.int64)[: 1 + len(group)] = torch.tensor([len(group), *group])
        if value is not None:
            payload[start:] = value
        return payload

    def _know(self, head: Head, payload: Tensor | None) -> None:
        """The outcome is known: those who count on this rank to tell them are told."""
        self.number, self._last = head.number, (head, payload)
        asked, self._brought = self._brought, {}
        for peer in asked:
            self._company.tell(peer, head, payload)
        if self._me not in self.outcome.group:
            error = RankLost(f"rank {self._me}: the others have met without this rank, which they took for lost.")
            self._company.fail(error)
        self._company.change()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
