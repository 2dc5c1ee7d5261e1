"""Pipeline schedules: the order in which each rank runs the forward and backward passes of its microbatches.

Sequential, GPipe (Huang et al. 2019) and 1F1B (Narayanan et al. 2019) are made here. Interleaved 1F1B (Narayanan et al.
2021) and zero-bubble (Qi et al. 2023) are read from torch's own schedules.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from tutti.errors import ConfigError
from tutti.parallel.pipeline.settings import ScheduleName

ActionKind = Literal["F", "B", "I", "W"]
"""Forward pass; backward pass; or its two halves: gradients of inputs (I), and gradients of weights (W)."""


class StageMessage(NamedTuple):
    """The output of a stage for one microbatch: activations for the next stage, or gradients for the one before."""

    direction: Literal["forward", "backward"]
    """Forward for activations, backward for gradients."""
    stage: int
    """The stage that sends it."""
    microbatch: int
    """The number of the microbatch in its batch."""


@dataclass(frozen=True)
class Action:
    """One pass of one stage over one microbatch."""

    kind: ActionKind
    """Which pass it is."""
    stage: int
    """Number of the stage, from 0 on."""
    microbatch: int
    """Number of the microbatch in its batch, from 0 on."""

    def input_message(self, num_stages: int) -> StageMessage | None:
        """Return the message that the action needs from another stage, if any."""
        if self.kind == "F":
            return StageMessage("forward", self.stage - 1, self.microbatch) if self.stage else None
        if self.kind == "W" or self.stage + 1 == num_stages:
            return None
        return StageMessage("backward", self.stage + 1, self.microbatch)

    def output_message(self, num_stages: int) -> StageMessage | None:
        """Return the message that the action makes for another stage, if any."""
        if self.kind == "F":
            return StageMessage("forward", self.stage, self.microbatch) if self.stage + 1 < num_stages else None
        return StageMessage("backward", self.stage, self.microbatch) if self.kind != "W" and self.stage else None

    def dependencies(self, num_stages: int) -> "list[Action]":
        """Return the actions that must be done before this one, on any rank.

        A dependency on a backward pass ("B") is met by its first half ("I") too, which makes the gradients of inputs.
        """
        if self.kind == "F":
            return [Action("F", self.stage - 1, self.microbatch)] if self.stage else []
        if self.kind == "W":
            return [Action("I", self.stage, self.microbatch)]
        forward = Action("F", self.stage, self.microbatch)
        return [forward, Action("B", self.stage + 1, self.microbatch)] if self.stage + 1 < num_stages else [forward]


def max_live_microbatches(actions: Sequence[Action], stage: int) -> int:
    """Return the largest number of microbatches whose activations a stage keeps at a time."""
    # "I" frees nothing: the weights' gradients still need the activations.
    changes = [1 if action.kind == "F" else -1 for action in actions if action.stage == stage and action.kind != "I"]
    return max(accumulate(changes), default=0)


def actions_by_rank(
    schedule: ScheduleName, num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> list[list[Action]]:
    """Return the actions of each rank, in order. Stage s is on rank s modulo the number of ranks."""
    if schedule == "sequential":
        return [
            [Action(kind, rank, microbatch) for microbatch in range(num_microbatches) for kind in ("F", "B")]
            for rank in range(num_ranks)
        ]
    if schedule == "gpipe":
        return [
            [*_passes("F", rank, num_microbatches), *_passes("B", rank, num_microbatches)] for rank in range(num_ranks)
        ]
    if schedule == "1f1b":
        return [list(_one_forward_one_backward(rank, num_ranks, num_microbatches)) for rank in range(num_ranks)]
    return _from_torch(schedule, num_ranks, stages_per_rank, num_microbatches)


def _passes(kind: ActionKind, stage: int, num_microbatches: int) -> Iterator[Action]:
    """Yield one kind of pass over all microbatches."""
    return (Action(kind, stage, microbatch) for microbatch in range(num_microbatches))


def _one_forward_one_backward(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """Yield a warm-up of one forward pass per later stage, then forward and backward in alternation, then the rest."""
    # The last rank has none: its first backward pass follows its first forward pass. A rank k places before it needs k
    # more microbatches under way until the gradient of its first one has come back.
    num_warmup = min(num_ranks - 1 - rank, num_microbatches)
    yield from _passes("F", rank, num_warmup)
    # Steady state: one new microbatch begins and the oldest one ends, so at most `num_warmup` + 1 are live. When none
    # is left to begin, the remaining backward passes follow.
    for microbatch in range(num_microbatches):
        if microbatch + num_warmup < num_microbatches:
            yield Action("F", rank, microbatch + num_warmup)
        yield Action("B", rank, microbatch)


def _from_torch(
    schedule: ScheduleName, num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> list[list[Action]]:
    """Read the order of one of torch's schedules, made for stand-ins of its stages."""
    from torch.distributed.pipelining import schedules  # Takes seconds to import.

    classes: dict[str, Any] = {
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    }
    num_stages = num_ranks * stages_per_rank
    # The attributes of torch's PipelineStage that its schedules read. The order of all ranks is the same on each.
    stages = [
        SimpleNamespace(
            num_stages=num_stages,
            group_size=num_ranks,
            # Only the stages of the first rank are given; the classes derive the order of all ranks from the sizes.
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
        order = classes[schedule](stages, num_microbatches).pipeline_order
    except ValueError as error:
        raise ConfigError(f"schedule '{schedule}' on {num_ranks} ranks: {error}") from error
    # None in torch's order is a time slot in which a rank waits.
    return [[_from_torch_action(action) for action in order[rank] if action is not None] for rank in range(num_ranks)]


def _from_torch_action(action: Any) -> Action:
    """Return one of torch's actions as ours."""
    # Depending on its version, torch's enum of computations has letters as values, or prints as them.
    kind: Any = getattr(action.computation_type, "value", None)
    if not isinstance(kind, str):
        kind = str(action.computation_type)
    assert kind in ("F", "B", "I", "W"), kind
    return Action(kind, action.stage_index, action.microbatch_index)
