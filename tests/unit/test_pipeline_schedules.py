"""Pipeline schedules: the order of actions, and the bubble by simulation."""

import pytest

from tutti.errors import ConfigError
from tutti.parallel import Pipeline
from tutti.parallel.pipeline.schedules import Action, actions_by_rank, max_live_microbatches
from tutti.parallel.pipeline.settings import SCHEDULES, ScheduleName
from tutti.parallel.pipeline.timeline import ActionSpan, PipelineTimeline, ideal_bubble, simulate_schedule


def _seconds(action: Action) -> float:
    return {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}[action.kind]


def _stages_per_rank(schedule: ScheduleName) -> int:
    return Pipeline(schedule=schedule).num_stages_per_rank


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (2, 2), (2, 8), (3, 6), (4, 8)])
def test_every_action_is_done_once_without_deadlock(
    schedule: ScheduleName, num_ranks: int, num_microbatches: int
) -> None:
    """The simulation fails on a deadlock."""
    stages = _stages_per_rank(schedule)
    orders = actions_by_rank(schedule, num_ranks, stages, num_microbatches)
    done = [action for actions in orders for action in actions]
    assert len(done) == len(set(done))
    backward = {(action.stage, action.microbatch) for action in done if action.kind in ("B", "I")}
    forward = {(action.stage, action.microbatch) for action in done if action.kind == "F"}
    wanted = {(stage, number) for stage in range(num_ranks * stages) for number in range(num_microbatches)}
    assert forward == backward == wanted
    assert {(action.stage, action.microbatch) for action in done if action.kind == "I"} == {
        (action.stage, action.microbatch) for action in done if action.kind == "W"
    }
    assert all(action.stage % num_ranks == rank for rank, actions in enumerate(orders) for action in actions)
    simulate_schedule(orders, _seconds)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_follows_the_formula(schedule: ScheduleName) -> None:
    for num_ranks, num_microbatches in [(2, 2), (2, 8), (4, 8), (4, 32)]:
        timeline = simulate_schedule(actions_by_rank(schedule, num_ranks, 1, num_microbatches), _seconds)
        assert timeline.bubble == pytest.approx(ideal_bubble(num_ranks, num_microbatches))
        assert timeline.ideal_bubble == ideal_bubble(num_ranks, num_microbatches)


def test_bubbles_of_other_schedules() -> None:
    bubbles = {
        name: simulate_schedule(actions_by_rank(name, 4, _stages_per_rank(name), 8), _seconds).bubble
        for name in SCHEDULES
    }
    assert bubbles["sequential"] == pytest.approx(3 / 4)  # One rank of four works at a time.
    assert bubbles["interleaved"] < bubbles["1f1b"]
    assert bubbles["zero-bubble"] < bubbles["1f1b"]


def test_1f1b_keeps_few_microbatches() -> None:
    def most_kept(actions: list[Action]) -> int:
        kept = [sum(1 if action.kind == "F" else -1 for action in actions[: end + 1]) for end in range(len(actions))]
        return max(kept)

    assert [most_kept(actions) for actions in actions_by_rank("1f1b", 4, 1, 16)] == [4, 3, 2, 1]
    assert [most_kept(actions) for actions in actions_by_rank("gpipe", 4, 1, 16)] == [16] * 4


def test_messages_take_time() -> None:
    without = simulate_schedule(actions_by_rank("gpipe", 2, 1, 4), _seconds)
    with_them = simulate_schedule(actions_by_rank("gpipe", 2, 1, 4), _seconds, message_s=0.5)
    assert with_them.seconds == pytest.approx(without.seconds + 1.0)  # The first to come, and the last to go back.


def test_a_timeline() -> None:
    spans = (ActionSpan(0, "F", 0, 0, 10.0, 11.0), ActionSpan(1, "F", 1, 0, 11.0, 13.0))
    timeline = PipelineTimeline(2, 1, spans)
    assert timeline.seconds == 3.0
    assert timeline.bubble == pytest.approx(0.5)


REFUSED = {
    "a schedule nobody knows": ({"schedule": "2f2b"}, r"schedule '2f2b' is not one of sequential, gpipe"),
    "no microbatch": ({"microbatches": 0}, r"microbatches must be a whole number, 1 or more, got 0"),
    "an empty stage": ({"cut": [2, 0]}, r"every stage of the cut needs 1 layer or more, got \[2, 0\]"),
    "stages that cannot be": ({"stages_per_rank": 2}, r"'1f1b' has 1 stage per rank, got stages_per_rank=2"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Pipeline(**given)  # type: ignore[arg-type]


def test_microbatches_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule 'interleaved' on 2 ranks: .* microbatches"):
        actions_by_rank("interleaved", 2, 2, 5)


def test_live_microbatches() -> None:
    for schedule, wanted in {"sequential": [1, 1, 1], "gpipe": [6, 6, 6], "1f1b": [3, 2, 1]}.items():
        orders = actions_by_rank(schedule, 3, 1, 6)  # type: ignore[arg-type]
        assert [max_live_microbatches(orders[stage], stage) for stage in range(3)] == wanted
