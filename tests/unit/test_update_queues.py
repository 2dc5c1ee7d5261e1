"""Queues of peers' updates: each update is taken once, and kept until all living peers have acknowledged it."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tutti.strategies.decentralised.update_queues import SentUpdates, UpdateInbox
from tutti.strategies.decentralised.wire import PeerMessageHeader


class Group:
    """Three ranks, of which this is rank 0; records what is sent."""

    rank = 0

    def __init__(self) -> None:
        self.alive = frozenset({0, 1, 2})
        self.away: frozenset[int] = frozenset()
        self.sent: list[tuple[int, int]] = []

    @property
    def others(self) -> frozenset[int]:
        return self.alive - {self.rank}

    def send(self, peer: int, header: PeerMessageHeader, message: Tensor | None = None) -> None:
        self.sent.append((peer, header.number))


@given(st.permutations([1, 2, 3, 4] * 2))
def test_an_update_is_accepted_once_in_any_order(numbers: list[int]) -> None:
    inbox = UpdateInbox([1])
    accepted = [number for number in numbers if inbox.accept(1, number)]
    assert sorted(accepted) == [1, 2, 3, 4]
    inbox.apply_all(lambda origin, message: None)
    assert inbox.num_applied(1) == 4


def test_only_updates_without_a_gap_count_as_applied() -> None:
    inbox, applied = UpdateInbox([1, 2]), []
    for number in (1, 3):
        assert inbox.accept(1, number)
        inbox.append(1, torch.tensor([number]))
    assert len(inbox) == 2
    inbox.apply_all(lambda origin, message: applied.append((origin, int(message))))
    assert applied == [(1, 1), (1, 3)]
    assert (inbox.num_applied(1), inbox.num_applied(2), len(inbox)) == (1, 0, 0)
    assert inbox.unacknowledged(at_least=1) == [1]
    assert inbox.acknowledge(1) == 1
    assert inbox.unacknowledged(at_least=1) == []


def test_updates_of_unknown_ranks_are_refused() -> None:
    assert not UpdateInbox([1]).accept(7, 1)


def sent_updates(group: Any, count: int) -> SentUpdates:
    updates = SentUpdates(group, [1, 2])
    for _ in range(count):
        message = torch.zeros(4, dtype=torch.uint8)
        updates.keep(updates.next_header(message), message)
    return updates


def test_what_a_peer_lacks_is_sent_again() -> None:
    group = Group()
    updates = sent_updates(group, 3)
    updates.acknowledge(1, 2)
    updates.resend_to_all()
    assert group.sent == [(1, 3), (2, 1), (2, 2), (2, 3)]
    updates.acknowledge(2, 1)
    assert len(updates) == 2, "the first is with all"
    updates.acknowledge(2, 0)
    assert len(updates) == 2, "a late acknowledgement takes nothing back"


@pytest.mark.parametrize("gone", ["alive", "away"])
def test_a_peer_that_is_gone_holds_nobody_back(gone: str) -> None:
    group = Group()
    updates = sent_updates(group, 3)
    updates.acknowledge(1, 3)
    assert [updates.is_behind(peer, max_ahead=3) for peer in (1, 2)] == [False, True]
    if gone == "alive":
        group.alive -= {2}
        updates.drop_acknowledged()
        assert len(updates) == 0
    else:
        group.away |= {2}
    assert not updates.is_behind(2, max_ahead=3)
