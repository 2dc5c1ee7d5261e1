"""The judgement of the bench of elastic runs: which samples were used, by the records of workers."""

from pathlib import Path

import pytest

from tutti.bench.elastic import records
from tutti.bench.elastic.records import StepRecord, misused


@pytest.fixture(autouse=True)
def six_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "NUM_SAMPLES", 6)


def write(folder: Path, number: int, *steps: tuple[int, int, list[int]] | None) -> None:
    """Write down the steps of a worker: generation, step and samples of each, or None if the one before was void."""
    with StepRecord(folder, number) as record:
        for each in steps:
            if each is None:
                record.void()
            else:
                generation, step, samples = each
                record.step(generation, step, 0, samples)


@pytest.mark.parametrize(
    ("again", "found"),
    [([1, 2, 3, 4, 5], (0, 0)), ([1, 2, 3, 4], (1, 0)), ([0, 1, 2, 3, 4, 5], (0, 1))],
)
def test_of_steps_together_the_last_try_counts(again: list[int], found: tuple[int, int], tmp_path: Path) -> None:
    write(tmp_path, 0, (0, 0, [0]), (0, 1, [1, 2]), None, (1, 1, again))
    write(tmp_path, 1, (0, 1, [3, 4]))
    assert misused(tmp_path, 1, "together", {0}) == found


@pytest.mark.parametrize(
    ("rest", "found"),
    [
        ([], (1, 0)),  # What was begun last is in nobody's model.
        ([5], (0, 0)),
        ([3, 4, 5], (0, 0)),
        ([2, 3, 4, 5], (0, 1)),
        ([1, 3, 4, 5], (0, 1)),
        ([4, 5], (0, 0)),
    ],
)
def test_of_steps_alone_the_first_ones_of_a_lost_worker_count(
    rest: list[int], found: tuple[int, int], tmp_path: Path
) -> None:
    write(tmp_path, 0, (0, 0, [0, 1]), (0, 1, [2]), (1, 2, rest))
    write(tmp_path, 1, (0, 0, [3]), (0, 1, [4]))
    assert misused(tmp_path, 1, "alone", {0}) == found


def test_of_local_steps_some_come_again_and_none_is_missing(tmp_path: Path) -> None:
    write(tmp_path, 0, (0, 0, [0, 1]), (0, 1, [2]), (1, 2, [3, 4]))
    write(tmp_path, 1, (0, 0, [3]), (0, 1, [4]))
    assert misused(tmp_path, 1, "block", {0}) == (1, 0)
