"""How a rank's contribution is counted."""

import torch

from tutti.replica.samples import Contribution, SampleCounts, num_rows


def test_rows_of_the_first_tensor() -> None:
    assert num_rows((torch.ones(5, 2),)) == 5
    assert num_rows(({"mask": None, "ids": [torch.ones(3)]}, torch.ones(9))) == 3
    assert num_rows((torch.tensor(1.0),)) == 1
    assert num_rows(("text", 3)) == 1


def test_batches_without_shard_count_by_rows() -> None:
    it = Contribution(SampleCounts())
    it.forward((torch.ones(5, 2),), {})
    it.backward()
    it.backward()  # Of a second parameter: the same pass.
    it.forward((), {"x": torch.ones(2)})
    assert it.take() == 7


def test_where_nothing_new_was_counted_the_last_weight_holds() -> None:
    it = Contribution(SampleCounts())
    assert it.take() == 1
    it.forward((torch.ones(5),), {})
    assert [it.take(), it.take()] == [5, 5]


def test_a_drawn_batch_counts_once_and_only_if_trained_on() -> None:
    sample_counts = SampleCounts()
    it = Contribution(sample_counts)
    with torch.no_grad():
        sample_counts.record_batch(100)  # For validation.
    sample_counts.record_batch(8)
    it.forward((torch.ones(64, 8),), {})
    it.forward((torch.ones(64, 8),), {})
    it.backward()
    it.forward((torch.ones(64, 8),), {})  # The rest of the same batch, in a backward of its own.
    assert it.take() == 8
    sample_counts.record_batch(0)
    it.forward((torch.ones(64, 8),), {})
    assert it.take() == 0


def test_what_the_user_says_wins_and_adds_up() -> None:
    sample_counts = SampleCounts()
    it = Contribution(sample_counts)
    sample_counts.record_batch(8)
    it.forward((torch.ones(8),), {})
    it.add(100)
    it.add(20)
    assert it.take() == 120
    sample_counts.record_batch(4)
    it.forward((torch.ones(4),), {})
    assert it.take() == 4


def test_batches_drawn_ahead_count_by_rows() -> None:
    sample_counts = SampleCounts()
    it = Contribution(sample_counts)
    for size in (4, 4, 2):  # As a prefetcher would.
        sample_counts.record_batch(size)
    weights = []
    for rows in (4, 4, 2):
        it.forward((torch.ones(rows, 8),), {})
        weights.append(it.take())
    assert weights == [4, 4, 2]


def test_a_batch_from_elsewhere_counts_by_rows_after_shard_was_used() -> None:
    sample_counts = SampleCounts()
    it = Contribution(sample_counts)
    sample_counts.record_batch(8)
    it.forward((torch.ones(8),), {})
    assert it.take() == 8
    it.forward((torch.ones(3),), {})
    assert it.take() == 3
