"""A coordinator in a process of its own that is killed, stopped or replaced, and ranks that are started by hand."""

import os
import re
import signal
import time
from functools import cache

import pytest

from started_by_hand import PATIENCE_S, Run, run


def digests(job: Run) -> set[str]:
    """What all ranks end with, after the gate at step 20."""
    found = {rank.line("digest")[1] for rank in job.ranks}
    assert [rank.end() for rank in job.ranks] == [0] * len(job.ranks), job.ranks[0].said
    return found


@cache
def undisturbed(transport: str) -> str:
    with run(2, transport=transport) as job:
        for step in (10, 20):
            assert job.ranks[0].line("step") == ["step", str(step)]
            job.ranks[0].go()
        [digest] = digests(job)
        return digest


each_transport = pytest.mark.parametrize("transport", ["shared_memory", "sockets"])


@each_transport
def test_killed_and_replaced(transport: str) -> None:
    expected = undisturbed(transport)
    with run(2, transport=transport) as job:
        job.ranks[0].line("step")
        job.kill_coordinator()
        job.ranks[0].go()
        job.ranks[0].line("step")  # Ten steps without a coordinator.
        job.serve()
        job.ranks[0].go()
        assert digests(job) == {expected}


@each_transport
def test_stopped_for_longer_than_the_patience(transport: str) -> None:
    expected = undisturbed(transport)
    with run(2, transport=transport) as job:
        job.ranks[0].line("step")
        os.kill(job.coordinator.pid, signal.SIGSTOP)
        job.ranks[0].go()
        job.ranks[0].line("step")
        time.sleep(PATIENCE_S + 1)  # The fault itself: so long it does not answer, and hears nobody.
        os.kill(job.coordinator.pid, signal.SIGCONT)
        job.ranks[0].go()
        assert digests(job) == {expected}


@each_transport
def test_a_rank_is_killed_while_there_is_no_coordinator(transport: str) -> None:
    with run(3, transport=transport) as job:
        job.ranks[0].line("step")
        job.kill_coordinator()
        os.kill(job.ranks[2].pid, signal.SIGKILL)
        job.ranks[2].end()
        job.ranks[0].go()
        for rank in job.ranks[:2]:
            assert rank.end() == 1, rank.said
            # Who fails second may name the first as well: nobody can announce now that it only follows another.
            found = re.search(r"RankLost: rank \d: .*rank 2 is gone: its process \d+ on \S+ has ended", rank.said)
            assert found, rank.said


def test_an_evicted_rank_that_comes_back_ends_with_an_error() -> None:
    with run(3, fault="stop") as job:
        job.ranks[0].line("step")
        job.ranks[0].go()
        for rank in (job.ranks[0], job.ranks[2]):
            assert rank.end() == 1, rank.said
            assert "rank 1 is gone" in rank.said
            assert "it is stopped" in rank.said
        os.kill(job.ranks[1].pid, signal.SIGCONT)
        assert job.ranks[1].end() == 1, job.ranks[1].said
        assert "the job goes on without it" in job.ranks[1].said
        assert "it is stopped" in job.ranks[1].said
