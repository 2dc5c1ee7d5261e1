"""Cuts of a model into stages are as good as the best of all cuts."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.errors import ConfigError
from tutti.parallel.pipeline.cut import (
    balanced_cut,
    balanced_cut_within,
    bytes_per_rank,
    check_layers_fit,
    check_ranks_fit,
    cut_from_counts,
)

Times = st.lists(st.floats(0, 100), min_size=1, max_size=9)


def _all_cuts(num_layers: int, num_stages: int) -> list[list[tuple[int, int]]]:
    inner = combinations(range(1, num_layers), num_stages - 1)
    return [list(pairwise([0, *ends, num_layers])) for ends in inner]


def _slowest(seconds: list[float], spans: list[tuple[int, int]]) -> float:
    return max(sum(seconds[start:stop]) for start, stop in spans)


@given(seconds=Times, num_stages=st.integers(1, 5))
def test_no_cut_is_better(seconds: list[float], num_stages: int) -> None:
    spans = balanced_cut(seconds, num_stages)
    cuts = _all_cuts(len(seconds), num_stages)
    if not cuts:
        assert spans is None
        return
    assert spans in cuts
    assert _slowest(seconds, spans) == pytest.approx(min(_slowest(seconds, cut) for cut in cuts))


@given(
    seconds=Times,
    memory=st.lists(st.lists(st.integers(0, 50), min_size=9, max_size=9), min_size=3, max_size=3),
    limit=st.integers(1, 120),
)
def test_memory_is_respected(seconds: list[float], memory: list[list[int]], limit: int) -> None:
    memory = [sizes[: len(seconds)] for sizes in memory]
    spans = balanced_cut(seconds, 3, memory, [limit] * 3)
    fitting = [cut for cut in _all_cuts(len(seconds), 3) if max(bytes_per_rank(cut, memory, 3)) <= limit]
    if not fitting:
        assert spans is None
        return
    assert spans in fitting
    assert _slowest(seconds, spans) == pytest.approx(min(_slowest(seconds, cut) for cut in fitting))


def test_a_cut_from_counts() -> None:
    assert cut_from_counts([2, 1, 3], 3, 6) == [(0, 2), (2, 3), (3, 6)]
    with pytest.raises(
        ConfigError, match=r"cut \[2, 2\] is of 2 stages and 4 layers; the mesh has 2 stages .* 5 layers"
    ):
        cut_from_counts([2, 2], 2, 5)


def test_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 stages need as many layers or more, and the model has 2 \(a, b\)"):
        check_layers_fit(["a", "b"], 3, [1, 1], None)
    with pytest.raises(ConfigError, match=r"a rank may take 1 KiB, and these layers alone need more: 'b' 2 KiB"):
        check_layers_fit(["a", "b"], 2, [1024, 2048], 1024)


def test_bytes_per_rank() -> None:
    spans, memory = cut_from_counts([1, 1, 2, 1], 4, 5), [[10] * 5, [20] * 5, [30] * 5, [40] * 5]
    assert bytes_per_rank(spans, memory, 2) == [10 + 60, 20 + 40]
    check_ranks_fit(spans, memory, 2, 70)
    with pytest.raises(ConfigError, match=r"a rank may take 65 B, and this cut needs 70 B on rank 0 of the pipeline"):
        check_ranks_fit(spans, memory, 2, 65)


@given(seconds=Times, sizes=st.lists(st.integers(1, 16), min_size=9, max_size=9), limit=st.integers(10, 60))
def test_ranks_of_two_stages_have_room_for_both(seconds: list[float], sizes: list[int], limit: int) -> None:
    memory = [sizes[: len(seconds)]] * 4
    found = balanced_cut_within(seconds, memory, 2, limit)
    fitting = [cut for cut in _all_cuts(len(seconds), 4) if max(bytes_per_rank(cut, memory, 2)) <= limit]
    assert found is None or found in fitting


def test_one_stage_of_a_rank_may_be_larger_than_the_other() -> None:
    assert balanced_cut_within([1.0] * 7, [[10, 12, 14, 6, 2, 16, 2]] * 4, 2, 34) is not None
