"""Workers that are lost while the coordinator is gone, or that is killed while they agree who goes on."""

import os
import re
import signal
import time
from contextlib import closing
from functools import cache

import pytest

from started_by_hand import Run

# On one host a loss is known in a moment; the ranks then have agreed after some 20 ms.
DELAYS_S = (0.0, 0.005, 0.01, 0.02, 0.05)


def elastic_run(workers: int, transport: str = "sockets", strategy: str = "ring", *words: str) -> Run:
    return Run(
        workers, "elastic_training.py", strategy, *words, TUTTI_TRANSPORT=transport, TUTTI_ELASTIC=f"1:{workers}"
    )


def ends(run: Run, *ranks: int) -> set[tuple[str, ...]]:
    """Steps, size of the world, and parameters, as these ranks say them."""
    found = {tuple(run.ranks[rank].line("end")[1:]) for rank in ranks}
    assert [run.ranks[rank].end() for rank in ranks] == [0] * len(ranks)
    return found


def lose(run: Run, rank: int) -> None:
    os.kill(run.ranks[rank].pid, signal.SIGKILL)
    run.ranks[rank].end()


@cache
def undisturbed() -> tuple[str, ...]:
    with closing(elastic_run(3)) as run:
        run.ranks[0].line("step")
        run.ranks[0].go()
        [(steps, size, norm)] = ends(run, 0, 1, 2)
        assert size == "3"
        return steps, norm


@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
def test_a_worker_is_lost_while_there_is_no_coordinator(transport: str) -> None:
    with closing(elastic_run(3, transport)) as run:
        run.ranks[0].line("step")
        run.kill_coordinator()
        lose(run, 2)
        run.ranks[0].go()
        run.serve()
        assert ends(run, 0, 1) == {(undisturbed()[0], "2", undisturbed()[1])}


@pytest.mark.parametrize("delay_s", DELAYS_S)
def test_the_coordinator_is_killed_while_members_agree(delay_s: float) -> None:
    with closing(elastic_run(3)) as run:
        run.ranks[0].line("step")
        lose(run, 1)
        run.ranks[0].go()
        time.sleep(delay_s)  # The fault itself: it comes at another moment of the agreement.
        run.kill_coordinator()
        run.serve()
        assert ends(run, 0, 2) == {(undisturbed()[0], "2", undisturbed()[1])}


def test_the_coordinator_is_killed_again_and_again() -> None:
    with closing(elastic_run(4)) as run:
        run.ranks[0].line("step")
        lose(run, 3)
        run.ranks[0].go()
        for _ in range(3):
            run.kill_coordinator()
            run.serve()
        [(steps, size, _)] = ends(run, 0, 1, 2)
        assert size == "3"
        assert int(steps) > 10


@pytest.mark.parametrize("anew", [False, True], ids=["same coordinator", "another coordinator"])
def test_a_worker_of_an_old_generation_does_not_return(anew: bool) -> None:
    """It was stopped for longer than the patience, so the others have gone on as another generation."""
    with closing(elastic_run(3, "sockets", "ring", "gated")) as run:
        run.ranks[0].line("step")
        os.kill(run.ranks[2].pid, signal.SIGSTOP)
        run.ranks[0].go()
        run.ranks[0].line("changed")
        if anew:
            run.kill_coordinator()
            run.serve()
        os.kill(run.ranks[2].pid, signal.SIGCONT)
        assert run.ranks[2].end() == 1, run.ranks[2].said
        assert re.search("RankLost: rank 2: .*(goes|have gone) on without it", run.ranks[2].said), run.ranks[2].said
        run.ranks[0].go()
        assert ends(run, 0, 1) == {(undisturbed()[0], "2", undisturbed()[1])}
