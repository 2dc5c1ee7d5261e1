"""Workers of elastic runs are killed while the others train: the runs end where they would have ended."""

import pytest

from tutti.bench.elastic.kills import ElasticSubject, losses


@pytest.mark.parametrize(
    "subject",
    [
        ElasticSubject("native", "shared_memory", exact=True),
        ElasticSubject("ring", "sockets", exact=True),
        ElasticSubject("poseidon", "sockets", exact=True),
        ElasticSubject("onebit:exact_below=0", "sockets"),
        ElasticSubject("topk:0.1", "shared_memory"),
    ],
    ids=lambda subject: subject.strategy,
)
def test_kills_change_nothing(subject: ElasticSubject) -> None:
    (outcome,) = losses(3, 7, [subject])
    assert outcome.problems == []
    assert outcome.kills >= 3
    assert (outcome.misused, outcome.different) == (0, 0)
