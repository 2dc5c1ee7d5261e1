"""Workers of elastic runs are killed while the others train: the runs end where they would have ended."""

from tutti.bench.elastic.kills import QUICK, losses


def test_kills_change_nothing() -> None:
    outcomes = losses(3, 7, QUICK)
    assert [each.problems for each in outcomes] == [[], []]
    assert sum(each.kills for each in outcomes) >= 3
    assert all(0 < second < 30 for each in outcomes for second in each.seconds)
