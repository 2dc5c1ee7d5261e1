"""Faults on the hosts of a lab, as `tutti bench faults --lab` injects them: who is named, why, and who goes on."""

import pytest

from tutti.bench import faults
from tutti.bench.fault_kinds import FaultCase
from tutti.launch.lab.lab import missing

pytestmark = [pytest.mark.xdist_group("labs"), pytest.mark.skipif(missing() is not None, reason=str(missing()))]

LAB = "hosts=3,rate=1gbit"


@pytest.mark.parametrize(
    "planned",
    [
        [("killed", "ring", 1), ("link cut", "bmuf:every=4", 0)],
        [("link cut", "gossip", 0), ("killed", "gossip", 2)],  # After a cut link the host is back.
    ],
)
def test_faults_of_a_rank_on_another_host(planned: list[tuple[str, str, int]]) -> None:
    chosen = [FaultCase(kind, strategy, "sockets", victim, 15, steps=40, lab=LAB) for kind, strategy, victim in planned]
    outcomes = faults.measure(chosen)
    assert [(each.kind, each.strategy) for each in outcomes] == [(each.kind, each.strategy) for each in chosen]
    for outcome in outcomes:
        assert outcome.rank_right, outcome
        assert outcome.cause_right, outcome
        assert outcome.ended_right, outcome
        assert outcome.left == 0, outcome
        assert outcome.seconds is not None
        assert outcome.seconds < (2.0 if outcome.kind == "killed" else faults.PATIENCE_S + 3.0), outcome
