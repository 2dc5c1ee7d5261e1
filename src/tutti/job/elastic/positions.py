"""Positions in the data of all ranks of a generation that has ended, those that are lost included.

How it works
------------
Every rank enters the next generation with what it knows: its own position, the trail of its positions after each step
(`tutti.data.trail`), and how many steps of each other rank are in the model with which it goes on
(`Exchange.steps_of`). From what all have entered with, each rank computes the same.

A lost rank is where the longest of these trails was after as many steps as any rank knows to be begun. So no sample is
used twice. Steps that are not complete are in the model in part, or not at all: their samples are counted as lost.
Where nobody knows a step of it, none is in the model, and it is where all agreed last. The same holds for a rank that
is there and behind: it takes over the state of another one, and what it did since then is dropped.
"""

from dataclasses import replace
from typing import Any

from tutti.coordination.elastic_member import Generation
from tutti.data.sharded_data import ShardedData
from tutti.job.metrics import Changes
from tutti.strategies.resumable import KnownSteps


def positions(data: ShardedData, old: Generation, new: Generation, source: int, number: int) -> list[list[int]]:
    """Return how far every rank of the last generation was in the data of a number. Called before ranks change.

    Args:
        data: that data, on this rank.
        old: the generation that has ended.
        new: the next one.
        source: the rank of `new` whose state those take over that miss something.
        number: number of the data.
    """
    first, infos = new.members[source].info, _infos(new)
    found = []
    for rank, each in enumerate(old.members):
        info = infos.get(each.description.id)
        # One that is behind takes over what the others have, unless steps are in the model one by one.
        is_behind = info is not None and info["progress"] < first["progress"] and not info["steps"]
        # One that has not come to its data has used nothing since ranks have changed, when all agreed.
        if info is not None and not is_behind and number < len(info["positions"]):
            found.append(info["positions"][number])
        # What the others have of a rank is no estimate while that rank is there: it may have done nothing yet.
        elif (steps := lost_steps(rank, new)) is not None and (info is None or not steps.is_estimate):
            found.append(data.position_after(_trails(new, number), steps.begun))
        else:  # What it did since the last agreement is in nobody's model.
            found.append(first["agreed"][number])
    return found


def lost_steps(rank: int, new: Generation) -> KnownSteps | None:
    """Return how many steps of a lost rank are in the model, as the others know together; None if none of them.

    What one of them has, all get when they agree: the most counts, lest a sample is used twice.
    """
    known = [info["steps"][str(rank)] for info in _infos(new).values() if str(rank) in info["steps"]]
    if not known:
        return None
    exact = [each for each in known if not each[2]]
    complete, begun, _ = zip(*(exact or known), strict=True)
    return KnownSteps(min(complete), max(begun), is_estimate=not exact)


def with_losses(changes: Changes, data: list[ShardedData], old: Generation, new: Generation) -> Changes:
    """Return counts with what is lost by a change of the ranks. Called before ranks change."""
    living = _infos(new)
    num_lost, samples = 0, 0
    for rank, each in enumerate(old.members):
        if each.description.id in living:
            continue
        num_lost += 1
        if (steps := lost_steps(rank, new)) is not None and steps.complete < steps.begun:
            samples += sum(
                part.most_samples(_trails(new, number), steps.complete, steps.begun) for number, part in enumerate(data)
            )
    infos = list(living.values())
    return replace(
        changes,
        generations=changes.generations + 1,
        lost_ranks=changes.lost_ranks + num_lost,
        lost_samples=changes.lost_samples + samples,
        lost_residuals=changes.lost_residuals + (num_lost if any(info["has_residual"] for info in infos) else 0),
        steps_cut_short=changes.steps_cut_short + max(info["cut_short"] for info in infos),
    )


def _infos(new: Generation) -> dict[str, dict[str, Any]]:
    """What the members that were there before have entered with, by id."""
    return {each.description.id: each.info for each in new.members if each.after >= 0}


def _trails(new: Generation, number: int) -> list[list[list[int]]]:
    """The trails in the data of a number."""
    return [info["trails"][number] for info in _infos(new).values() if number < len(info["trails"])]
