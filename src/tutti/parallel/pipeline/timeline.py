"""Timelines of pipeline steps: when each rank ran each action, measured or computed by `simulate_schedule`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tutti.parallel.pipeline.schedules import Action, ActionKind


@dataclass(frozen=True)
class ActionSpan:
    """The time of one action on one rank."""

    rank: int
    """Rank along `pipe`."""
    kind: ActionKind
    """Which pass it was."""
    stage: int
    """Number of the stage."""
    microbatch: int
    """Number of the microbatch."""
    start_s: float
    """When its computation began, by the clock of the first rank."""
    stop_s: float
    """When its computation ended, by the clock of the first rank."""


@dataclass(frozen=True)
class PipelineTimeline:
    """One step of a pipeline, on all its ranks."""

    num_ranks: int
    """Number of ranks along `pipe`."""
    num_microbatches: int
    """Number of microbatches of the batch."""
    spans: tuple[ActionSpan, ...]
    """The actions of all ranks."""

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first action to the end of the last."""
        return max(span.stop_s for span in self.spans) - min(span.start_s for span in self.spans)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they wait for each other."""
        busy = sum(span.stop_s - span.start_s for span in self.spans)
        return 1 - busy / (self.num_ranks * self.seconds)

    @property
    def ideal_bubble(self) -> float:
        """The bubble of GPipe and 1F1B for stages of equal time, by formula."""
        return ideal_bubble(self.num_ranks, self.num_microbatches)


def ideal_bubble(num_ranks: int, num_microbatches: int) -> float:
    """Return (P - 1) / (M + P - 1): the bubble of GPipe and 1F1B for stages of equal time (Huang et al. 2019)."""
    return (num_ranks - 1) / (num_microbatches + num_ranks - 1)


def simulate_schedule(
    actions_by_rank: Sequence[Sequence[Action]], seconds: Callable[[Action], float], message_s: float = 0.0
) -> PipelineTimeline:
    """Compute the timeline of a schedule.

    Args:
        actions_by_rank: the actions of each rank, in order.
        seconds: the time of an action.
        message_s: the time of a message between stages.
    """
    num_stages = 1 + max(action.stage for actions in actions_by_rank for action in actions)
    done: dict[Action, float] = {}
    spans: list[ActionSpan] = []
    # Of each rank: the end of its last action in seconds, and the index of its next one.
    clocks, next_of = [0.0] * len(actions_by_rank), [0] * len(actions_by_rank)
    while any(number < len(actions) for number, actions in zip(next_of, actions_by_rank, strict=True)):
        progressed = False
        for rank, actions in enumerate(actions_by_rank):
            while next_of[rank] < len(actions):
                action = actions[next_of[rank]]
                dependencies = action.dependencies(num_stages)
                # This rank waits for another. Ranks are visited again until a whole round brings nothing: that would be
                # a deadlock.
                if not all(dependency in done for dependency in dependencies):
                    break
                # Only another stage's output has to travel; what the same stage made is on this rank.
                ready = [
                    done[dependency] + (message_s if dependency.stage != action.stage else 0.0)
                    for dependency in dependencies
                ]
                # As late as the rank's own previous action and its inputs, whichever ends last.
                start = max([clocks[rank], *ready])
                clocks[rank] = start + seconds(action)
                done[action] = done[_as_dependency(action)] = clocks[rank]
                spans.append(ActionSpan(rank, action.kind, action.stage, action.microbatch, start, clocks[rank]))
                next_of[rank] += 1
                progressed = True
        assert progressed, f"this schedule is a deadlock: {actions_by_rank}"
    return PipelineTimeline(len(actions_by_rank), 1 + max(span.microbatch for span in spans), tuple(spans))


def _as_dependency(action: Action) -> Action:
    """Return the action that others depend on: the first half of a backward pass stands for the whole of it."""
    return Action("B", action.stage, action.microbatch) if action.kind == "I" else action
