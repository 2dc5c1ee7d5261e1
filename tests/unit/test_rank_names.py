"""What ranks are called in pictures."""

from tutti.cluster import PRESETS, Cluster
from tutti.report.simulation import rank_names


def test_plain_numbers_where_a_host_has_one_rank() -> None:
    assert rank_names(Cluster(), 2) == {0: "0", 1: "1"}


def test_hosts_that_have_names_or_several_ranks() -> None:
    assert rank_names(PRESETS["africa-wan"], 4)[2] == "2, lagos"
    assert rank_names(Cluster(ranks_per_host=2), 3) == {0: "0, host0", 1: "1, host0", 2: "2, host1"}


def test_slow_ranks_are_named_among_many() -> None:
    names = rank_names(Cluster(slow={5: 2.0}), 64)
    assert names[5] == "5, 2× slower"
    assert len(names) <= 17
    assert 4 not in names, "no room beside it"
