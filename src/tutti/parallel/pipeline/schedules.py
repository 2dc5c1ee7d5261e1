"""What each rank of a pipeline does, in order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from tutti.errors import ConfigError
from tutti.parallel.pipeline.settings import ScheduleName

ActionKind = Literal["F", "B", "I", "W"]
"""Forward; backward; or backward in two halves: gradients of inputs, and those of weights."""


class StageMessage(NamedTuple):
    """What a stage makes of one microbatch: activations, which the next takes, or gradients, for the one before."""

    direction: Literal["forward", "backward"]
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Action:
    """One stage's work on one microbatch."""

    kind: ActionKind
    stage: int
    microbatch: int

    def input_message(self, num_stages: int) -> StageMessage | None:
        """What it needs of another stage."""
        if self.kind == "F":
            return StageMessage("forward", self.stage - 1, self.microbatch) if self.stage else None
        if self.kind == "W" or self.stage + 1 == num_stages:
            return None
        return StageMessage("backward", self.stage + 1, self.microbatch)

    def output_message(self, num_stages: int) -> StageMessage | None:
        """What another stage needs of it."""
        if self.kind == "F":
            return StageMessage("forward", self.stage, self.microbatch) if self.stage + 1 < num_stages else None
        return StageMessage("backward", self.stage, self.microbatch) if self.kind != "W" and self.stage else None

    def dependencies(self, num_stages: int) -> "list[Action]":
        """What must be done before, on whatever rank; of a backward pass any half that gives its inputs' gradients."""
        if self.kind == "F":
            return [Action("F", self.stage - 1, self.microbatch)] if self.stage else []
        if self.kind == "W":
            return [Action("I", self.stage, self.microbatch)]
        own = Action("F", self.stage, self.microbatch)
        return [own, Action("B", self.stage + 1, self.microbatch)] if self.stage + 1 < num_stages else [own]


def max_live_microbatches(actions: Sequence[Action], stage: int) -> int:
    """Of how many microbatches a stage keeps activations at a time."""
    changes = [1 if action.kind == "F" else -1 for action in actions if action.stage == stage and action.kind != "I"]
    return max(accumulate(changes), default=0)


def actions_by_rank(
    schedule: ScheduleName, num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> list[list[Action]]:
    """By rank, what it does. Stage s is on rank s modulo the number of ranks."""
    if schedule == "sequential":
        return [
            [Action(kind, rank, it) for it in range(num_microbatches) for kind in ("F", "B")]
            for rank in range(num_ranks)
        ]
    if schedule == "gpipe":
        return [
            [*_passes("F", rank, num_microbatches), *_passes("B", rank, num_microbatches)] for rank in range(num_ranks)
        ]
    if schedule == "1f1b":
        return [list(_one_by_one(rank, num_ranks, num_microbatches)) for rank in range(num_ranks)]
    return _from_torch(schedule, num_ranks, stages_per_rank, num_microbatches)


def _passes(kind: ActionKind, stage: int, num_microbatches: int) -> Iterator[Action]:
    return (Action(kind, stage, number) for number in range(num_microbatches))


def _one_by_one(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """As many forward passes as there are stages behind, then one backward for each forward, then the rest."""
    ahead = min(num_ranks - 1 - rank, num_microbatches)
    yield from _passes("F", rank, ahead)
    for number in range(num_microbatches):
        if number + ahead < num_microbatches:
            yield Action("F", rank, number + ahead)
        yield Action("B", rank, number)


def _from_torch(
    schedule: ScheduleName, num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> list[list[Action]]:
    from torch.distributed.pipelining import schedules  # Costs seconds.

    kinds: dict[str, Any] = {
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    }
    num_stages = num_ranks * stages_per_rank
    stages = [
        SimpleNamespace(
            num_stages=num_stages,
            group_size=num_ranks,
            group_rank=0,
            stage_index=index,
            is_first=index == 0,
            is_last=index == num_stages - 1,
            has_backward=True,
            submod=None,
        )
        for index in range(0, num_stages, num_ranks)
    ]
    try:
        made = kinds[schedule](stages, num_microbatches).pipeline_order
    except ValueError as error:
        raise ConfigError(f"schedule '{schedule}' on {num_ranks} ranks: {error}") from error
    return [[_action(each) for each in made[rank] if each is not None] for rank in range(num_ranks)]


def _action(action: Any) -> Action:
    kind: Any = str(
        action.computation_type.value if hasattr(action.computation_type, "value") else action.computation_type
    )
    assert kind in ("F", "B", "I", "W"), kind
    return Action(kind, action.stage_index, action.microbatch_index)
