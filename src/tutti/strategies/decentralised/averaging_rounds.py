"""Averaging rounds: all living ranks agree on who they are and, unless they only regroup, on the mean of their values.

How it works
------------
Rounds are numbered from 1. Every rank takes part in every round.

1. Enter: a rank sends `ROUND_ENTERED` to all, with its purpose and clock, and waits until all living peers have entered
   and its own exchange is ready (for peers' updates: all updates of the others have arrived).
2. Contribute: each rank sends its values to the leader, the lowest living rank, as `ROUND_VALUE`. If any rank entered
   to regroup, no rank sends values.
3. Conclude: the leader waits for a contribution of every living peer, averages them, and sends `ROUND_RESULT` to all.

If the leader is lost, all ranks contribute again, to the next one. A rank that already has the result sends it to the
new leader (`peer_lost`), and a leader that has a result answers a late contribution with it (`receive`). A rank that
has the result contributes no more, so the new leader cannot conclude before it has that result too. Therefore two
living ranks never have different results of one round.

Waits are `PeerGroup.wait_until`, on conditions about living peers: a lost rank is not waited for. Ranks that are still
training send `KEEP_ALIVE` to those who wait, because a round may be entered long before the last rank comes.

Finishing is a round without a result: a rank that enters with `FINISH` leaves when all others have entered to finish
too; if any has entered for another purpose, it takes part in one more round first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor

from tutti.errors import RankLost
from tutti.strategies.decentralised.flat_model import align
from tutti.strategies.decentralised.peer_group import PeerGroup
from tutti.strategies.decentralised.wire import PeerMessageHeader, PeerMessageKind
from tutti.transports.base import Operation


class RoundPurpose(IntEnum):
    """Why a rank enters a round. If one rank only regroups, all do, and those that want a mean enter again."""

    REGROUP = 0
    AVERAGE = 1
    FINISH = 2


@dataclass(frozen=True)
class RoundResult:
    """What all ranks of a round agree on."""

    number: int
    """Number of the round."""
    purpose: RoundPurpose
    """`AVERAGE` if there is a mean, else `REGROUP`."""
    clock: int
    """The highest clock of the ranks that took part."""
    members: tuple[int, ...]
    """Ranks that took part, in order."""
    value: Tensor | None
    """The mean, a full block of `FlatModel`, if the purpose was to average."""


class AveragingRounds:
    """The rounds of one rank, one after the other. Runs in the transport's thread, as `PeerGroup` does."""

    def __init__(self, group: PeerGroup, average: Callable[[list[Tensor]], Tensor], sizes_only: bool) -> None:
        """Make no round yet; `average` returns the mean of values in the order of their ranks."""
        self._group, self._average, self._sizes_only = group, average, sizes_only
        self._rank = group.rank
        self.last_round = 0
        """Number of the last round whose result is known here."""
        self.in_round = False
        """Whether this rank is in a round."""
        self.is_finished = False
        """Whether all ranks have finished."""
        self._entries: dict[int, PeerMessageHeader] = {}
        """The last `ROUND_ENTERED` of each peer."""
        self._contributions: dict[int, tuple[PeerMessageHeader, Tensor | None]] = {}
        """What peers have sent to this rank as leader of the next round."""
        self._result: tuple[PeerMessageHeader, Tensor | None] | None = None
        """The last result, as the message that carries it."""
        self._last_keep_alive_s = 0.0

    def take_part(
        self,
        purpose: RoundPurpose,
        clock: int,
        is_ready: Callable[[], bool],
        contribution: Callable[[], Tensor | None],
    ) -> Operation:
        """Take part in the next round until its result is known.

        Args:
            purpose: why this rank enters.
            clock: number of steps that this rank has taken.
            is_ready: whether this rank can contribute; asked once all peers have entered.
            contribution: returns this rank's values; called once, when all are ready.
        """
        group, number = self._group, self.last_round + 1
        # From here on this rank sends no keep-alives: it waits itself, and has nothing to report.
        self.in_round = True
        group.send_to_all(PeerMessageHeader(PeerMessageKind.ROUND_ENTERED, number, purpose, clock))
        # A result before all have entered means that the others took this rank for lost: `_learn_result` makes it
        # fail.
        yield from group.wait_until(lambda: self.last_round >= number or (self.all_entered(number) and is_ready()))
        # All ranks come to the same answer: each has every peer's entry, and so every purpose.
        regroup = purpose == RoundPurpose.REGROUP or self.regroup_requested
        value = None if regroup else contribution()
        sent_to = self._rank  # Nobody yet: a leader does not send to itself.
        # Each turn contributes to the leader of the moment, and ends when the result is here or the leader is lost.
        while self.last_round < number and not group.is_over:
            if group.leader == self._rank:
                # A peer that already has a result never contributes: it sends that result instead.
                if group.others <= self._contributions.keys():
                    self._conclude(number, clock, value)
                    break
            elif sent_to != group.leader:
                sent_to = group.leader
                num_bytes = 0 if value is None else value.nbytes
                header = PeerMessageHeader(PeerMessageKind.ROUND_VALUE, number, 0, clock, num_bytes)
                group.send(sent_to, header, value)
            # The leader is fixed here: a change of it while this waits must end the wait.
            yield from group.wait_until(partial(self._can_proceed, number, group.leader))
        self.in_round = False

    def finish(self, clock: int) -> Operation:
        """Leave when all ranks know the last result and want to leave; return if one of them wants another round."""
        group, number = self._group, self.last_round + 1
        group.send_to_all(PeerMessageHeader(PeerMessageKind.ROUND_ENTERED, number, RoundPurpose.FINISH, clock))
        yield from group.wait_until(lambda: self.all_entered(number) or self._others_go_on(number))
        if self._others_go_on(number):
            return
        self.is_finished = True
        # So that peers do not take the end of this rank for a loss.
        group.send_to_all(PeerMessageHeader(PeerMessageKind.DISCONNECT))
        yield from group.wait_until(group.is_flushed)  # The channel is closed next, which drops what is not sent.

    def _others_go_on(self, number: int) -> bool:
        """Whether a peer has entered a round for another purpose than to finish."""
        entries = [self._entries[peer] for peer in self._group.others if self.has_entered(peer, number)]
        return any(entry.origin != RoundPurpose.FINISH for entry in entries)

    def all_entered(self, number: int) -> bool:
        """Whether all living peers have entered a round."""
        return all(self.has_entered(peer, number) for peer in self._group.others)

    def has_entered(self, peer: int, number: int | None = None) -> bool:
        """Whether a peer has entered a round, by default the next one."""
        entry = self._entries.get(peer)
        # Only the last entry of a peer is kept: one that has entered a later round has entered this one too.
        return entry is not None and entry.number >= (self.last_round + 1 if number is None else number)

    @property
    def regroup_requested(self) -> bool:
        """Whether a peer waits in the next round to regroup."""
        entries = [self._entries[peer] for peer in self._group.others if self.has_entered(peer)]
        return any(entry.origin == RoundPurpose.REGROUP for entry in entries)

    @property
    def result(self) -> RoundResult:
        """The result of the last round."""
        assert self._result is not None
        header, payload = self._result
        if payload is None or self._sizes_only:
            # In a dry run payloads have no contents; there, all ranks know the same living ones.
            members, value = tuple(sorted(self._group.alive)), payload
        else:
            # Laid out by `_pack`: the number of members, the members, then the mean on the next cache line.
            words = payload.view(torch.int64)
            members = tuple(words[1 : 1 + int(words[0])].tolist())
            value = payload[align(8 + 8 * len(members)) :]
        purpose = RoundPurpose(header.origin)
        value = value if purpose == RoundPurpose.AVERAGE else None
        return RoundResult(header.number, purpose, header.clock, members, value)

    def send_keep_alives(self) -> None:
        """Tell peers that wait in a round, eight times per timeout, that this rank still makes progress."""
        now, timeout_s = self._group.transport.now(), self._group.transport.timeout.total_seconds()
        if not self.in_round and now - self._last_keep_alive_s > timeout_s / 8:
            self._last_keep_alive_s = now
            for peer in sorted(self._group.others):
                if self.has_entered(peer):
                    self._group.send(peer, PeerMessageHeader(PeerMessageKind.KEEP_ALIVE))

    def receive(self, peer: int, header: PeerMessageHeader, payload: Tensor | None) -> None:
        """Handle a peer's message about rounds; others are ignored."""
        match header.kind:
            case PeerMessageKind.ROUND_ENTERED:
                self._entries[peer] = header
                self._group.clocks[peer] = header.clock
            # May arrive before this rank has entered, or before it knows that it leads: kept until then.
            case PeerMessageKind.ROUND_VALUE if header.number > self.last_round:
                self._contributions[peer] = header, payload
            # The peer has lost a former leader before the result of that round reached it.
            case PeerMessageKind.ROUND_VALUE if self._result is not None and header.number == self.last_round:
                self._group.send(peer, *self._result)
            # Results of earlier rounds are duplicates, sent again after the loss of a leader.
            case PeerMessageKind.ROUND_RESULT if header.number == self.last_round + 1:
                self._learn_result(header, payload)

    def peer_lost(self, peer: int) -> None:
        """Go on without a peer; if it was the leader, let the next one have the last result."""
        self._contributions.pop(peer, None)
        leader = self._group.leader
        # The peer is removed already, and a leader is the lowest living rank: so any rank below the present one was
        # leader.
        was_leader = peer < leader
        if self._result is not None and was_leader and leader != self._rank:
            self._group.send(leader, *self._result)  # Others may ask it for a result that it does not know yet.

    def _can_proceed(self, number: int, leader: int) -> bool:
        """Whether the result is known, the leader has changed, or this rank leads and has all contributions."""
        is_complete = self._group.leader == self._rank and self._group.others <= self._contributions.keys()
        return self.last_round >= number or self._group.leader != leader or is_complete

    def _conclude(self, number: int, clock: int, value: Tensor | None) -> None:
        """As leader: average all contributions, and send the result."""
        contributions = {peer: self._contributions[peer] for peer in sorted(self._group.others)}
        # Everybody continues at the highest clock, so that no rank repeats a step number that others have used.
        clocks = [clock, *(header.clock for header, _ in contributions.values())]
        # The leader is the lowest rank, so its value comes first.
        values = [value, *(peer_value for _, peer_value in contributions.values())]
        present = [peer_value for peer_value in values if peer_value is not None]
        purpose = RoundPurpose.AVERAGE if len(present) == len(values) else RoundPurpose.REGROUP
        mean = self._average(present) if purpose == RoundPurpose.AVERAGE else None
        payload = self._pack([self._rank, *contributions], mean)
        num_bytes = 0 if payload is None else payload.nbytes
        header = PeerMessageHeader(PeerMessageKind.ROUND_RESULT, number, purpose, max(clocks), num_bytes)
        self._learn_result(header, payload)

    def _pack(self, members: list[int], value: Tensor | None) -> Tensor | None:
        """Return the payload of a result: number of members, members (int64), and the aligned value."""
        if self._sizes_only:
            return value
        start = align(8 + 8 * len(members))
        payload = torch.zeros(start + (0 if value is None else value.nbytes), dtype=torch.uint8, device="cpu")
        payload.view(torch.int64)[: 1 + len(members)] = torch.tensor([len(members), *members])
        if value is not None:
            payload[start:] = value
        return payload

    def _learn_result(self, header: PeerMessageHeader, payload: Tensor | None) -> None:
        """Keep a result, and send it to the peers that have contributed to this rank: they count on it as leader."""
        self.last_round, self._result = header.number, (header, payload)
        contributors, self._contributions = self._contributions, {}
        for peer in contributors:
            self._group.send(peer, header, payload)
        # The others took this rank for lost: it must not go on training alone.
        if self._rank not in self.result.members:
            message = (
                f"rank {self._group.transport.world_rank}: the other ranks completed an averaging round without this "
                "rank, taken for lost."
            )
            self._group.fail(RankLost(message))
        self._group.notify()
