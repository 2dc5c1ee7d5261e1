"""Positions in the data of all ranks of a generation that has ended, from what they have entered the next one with."""

from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import tutti
from one_thread import worlds
from tutti.data.trail import Trail
from tutti.job.elastic.positions import positions


def info(position: list[int], progress: int, agreed: list[int], **values: Any) -> dict[str, Any]:
    """What a rank enters with. It has taken a step per item since ranks have changed, at the start of epoch 0."""
    trail = Trail((0, 0))
    for step in range(1, position[1] + 1):
        trail.add(step, (0, step))
    found = {"positions": [position], "progress": progress, "agreed": [agreed], "trails": [trail.export()], "steps": {}}
    return {**found, **values}


def found(*infos: dict[str, Any] | None) -> list[list[int]]:
    """The positions of the ranks of a generation; None for one that is lost. All others are in the next generation."""
    members: list[Any] = [
        SimpleNamespace(description=SimpleNamespace(id=f"m{rank}"), after=0, info=info)
        for rank, info in enumerate(infos)
    ]
    loader = DataLoader(TensorDataset(torch.arange(200)), 2)
    data: Any = tutti.shard(loader, keep="local", world=worlds(len(infos))[0])
    old: Any = SimpleNamespace(members=members)
    new: Any = SimpleNamespace(members=[member for member in members if member.info is not None])
    source = max(range(len(new.members)), key=lambda rank: (new.members[rank].info["progress"], -rank))
    return positions(data, old, new, source, 0)


def test_a_rank_that_is_a_block_behind_repeats_what_it_did_since() -> None:
    """The others have got the mean of the block that ended at item 8, and have gone on from it to item 11."""
    ahead, behind = info([0, 11], 2, agreed=[0, 8]), info([0, 9], 1, agreed=[0, 4])
    assert found(ahead, behind, None) == [[0, 11], [0, 8], [0, 8]]


def test_a_rank_that_is_a_step_behind_takes_over_the_position_of_the_others() -> None:
    ahead, behind = (info([0, n], n, agreed=[0, n], trails=[]) for n in (11, 10))
    assert found(behind, ahead, None) == [[0, 11], [0, 11], [0, 11]]


def test_a_rank_that_is_behind_has_used_what_others_have_of_it() -> None:
    """Under gossip, for example."""
    ahead = info([0, 11], 2, agreed=[0, 0], steps={"1": [6, 6, False], "2": [3, 3, False]})
    behind = info([0, 9], 1, agreed=[0, 0])
    assert found(ahead, behind, None) == [[0, 11], [0, 6], [0, 3]]


def test_a_rank_that_has_joined_and_taken_over_nothing_is_where_the_others_began() -> None:
    """A loss ended its wait for the others, which had all they needed of it."""
    new = info([0, 0], -1, agreed=[0, 0], positions=[], trails=[])
    ahead = info([0, 11], 2, agreed=[0, 0], steps={"1": [0, 11, True], "2": [0, 11, True]})
    assert found(ahead, new, None) == [[0, 11], [0, 0], [0, 11]]


def test_a_rank_that_has_not_come_to_its_data_is_where_ranks_changed() -> None:
    ahead = info([0, 3], 2, agreed=[0, 0])
    assert found(ahead, info([0, 0], 2, agreed=[0, 0], positions=[], trails=[]), None) == [[0, 3], [0, 0], [0, 0]]
