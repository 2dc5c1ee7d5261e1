"""Faults on the hosts of a lab, as `tutti bench faults --lab` injects them: who is named, why, and who goes on."""

import ctypes
import time
from contextlib import closing

import pytest
import torch

import tutti
from tutti.bench import faults
from tutti.bench.fault_kinds import FaultCase
from tutti.collectives import native
from tutti.launch import control_plane
from tutti.launch.host_observer import TAKES_PART
from tutti.launch.lab.lab import missing

pytestmark = [pytest.mark.xdist_group("labs"), pytest.mark.skipif(missing() is not None, reason=str(missing()))]

LAB = "hosts=3,rate=1gbit"


@pytest.mark.parametrize(
    "planned",
    [
        [("killed", "ring", 1), ("stopped", "ring", 2), ("link cut", "bmuf:every=4", 0)],
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


def hold_the_interpreters_lock(holders: list[int]) -> tuple[float, float]:
    """Take part in two sums, between which some ranks neither compute nor report."""
    with closing(tutti.init()) as world:
        for observer in control_plane._observers.values():
            assert observer.end.recv(1) == TAKES_PART
        native(torch.ones(1), world.transport)
        started = time.monotonic()
        if world.rank in holders:
            ctypes.PyDLL(None).usleep(3_000_000)  # Unlike CDLL, PyDLL keeps the lock during the call.
        total = torch.ones(1)
        native(total, world.transport)
        return float(total), time.monotonic() - started


@pytest.mark.parametrize(("ranks_per_host", "holders"), [(1, [1]), (2, [0, 1, 2, 3])])
def test_a_rank_that_holds_the_interpreters_lock_is_not_evicted(
    ranks_per_host: int, holders: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUTTI_PATIENCE", "1s")
    with tutti.lab(2, "1gbit", ranks_per_host=ranks_per_host) as lab:
        results = tutti.launch(hold_the_interpreters_lock, holders, on=lab)
    assert [total for total, _ in results] == [2.0 * ranks_per_host] * (2 * ranks_per_host)
    assert min(seconds for _, seconds in results) > 2.5
