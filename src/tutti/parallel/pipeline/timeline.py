"""Who worked on what, when: of a real step, or of one simulate_schedule by a clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tutti.parallel.pipeline.schedules import Action, ActionKind


@dataclass(frozen=True)
class ActionSpan:
    """One rank's work on one microbatch."""

    rank: int
    kind: ActionKind
    stage: int
    microbatch: int
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class PipelineTimeline:
    """One step of a pipeline, on all its ranks."""

    num_ranks: int
    num_microbatches: int
    spans: tuple[ActionSpan, ...]

    @property
    def seconds(self) -> float:
        return max(span.stop_s for span in self.spans) - min(span.start_s for span in self.spans)

    @property
    def bubble(self) -> float:
        """The part of the ranks' time in which they wait for each other."""
        busy = sum(span.stop_s - span.start_s for span in self.spans)
        return 1 - busy / (self.num_ranks * self.seconds)

    @property
    def ideal_bubble(self) -> float:
        """(P - 1) / (M + P - 1), which GPipe and 1F1B have where stages take the same time (Huang 2019)."""
        return ideal_bubble(self.num_ranks, self.num_microbatches)


def ideal_bubble(num_ranks: int, num_microbatches: int) -> float:
    return (num_ranks - 1) / (num_microbatches + num_ranks - 1)


def simulate_schedule(
    orders: Sequence[Sequence[Action]], seconds: Callable[[Action], float], message_s: float = 0.0
) -> PipelineTimeline:
    """What ranks would do and when, if each piece of work took so long and each message `message_s`."""
    num_stages = 1 + max(action.stage for actions in orders for action in actions)
    done: dict[Action, float] = {}
    spans: list[ActionSpan] = []
    clocks, next_of = [0.0] * len(orders), [0] * len(orders)
    while any(number < len(actions) for number, actions in zip(next_of, orders, strict=True)):
        moved = False
        for rank, actions in enumerate(orders):
            while next_of[rank] < len(actions):
                action = actions[next_of[rank]]
                needed = action.dependencies(num_stages)
                if not all(it in done for it in needed):
                    break
                ready = [done[it] + (message_s if it.stage != action.stage else 0.0) for it in needed]
                start = max([clocks[rank], *ready])
                clocks[rank] = start + seconds(action)
                done[action] = done[_as_needed(action)] = clocks[rank]
                spans.append(ActionSpan(rank, action.kind, action.stage, action.microbatch, start, clocks[rank]))
                next_of[rank] += 1
                moved = True
        assert moved, f"this order waits for itself: {orders}"
    return PipelineTimeline(len(orders), 1 + max(span.microbatch for span in spans), tuple(spans))


def _as_needed(action: Action) -> Action:
    """What others wait for: a backward pass whose inputs' gradients are there is as good as a whole one."""
    return Action("B", action.stage, action.microbatch) if action.kind == "I" else action
