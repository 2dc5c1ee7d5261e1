"""Ranks without a launcher of Tutti's, as srun, mpirun and torchrun start them: rank 0 serves, and says who is late."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from started_by_hand import PATIENCE_S, Process


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def started(stack: ExitStack, workers: int, fault: str = "", patience: str = f"{PATIENCE_S:g}s") -> list[Process]:
    variables = {
        "TUTTI_PATIENCE": patience,
        "TUTTI_SECRET": os.urandom(16).hex(),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = []
    for rank in range(workers):
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = Process("gated_training.py", "native", fault, **numbers, **variables)
        ranks.append(stack.enter_context(closing(process)))
    for process in ranks:
        process.pid = int(process.line("pid")[1])
    return ranks


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def test_rank_0_prints_who_is_waited_for(stack: ExitStack) -> None:
    ranks = started(stack, 2)
    ranks[0].line("step")  # It waits for its input, and rank 1 for it.
    said = " ".join(ranks[0].line("tutti:"))
    assert said.startswith("tutti: rank 0 on "), said
    assert "of step 10 for " in said
    assert "rank 1 waits for it for " in said
    for _ in range(2):
        ranks[0].go()
    assert [rank.end() for rank in ranks] == [0, 0]
    assert "tutti: rank" not in ranks[1].said, "one rank says it for all"


def test_the_error_comes_with_what_was_found_before(stack: ExitStack) -> None:
    ranks = started(stack, 3, "stop", patience="60s")  # It is not evicted before it is killed here.
    ranks[0].line("step")
    ranks[0].go()
    while f"is stopped (process {ranks[1].pid}); ranks 0 and 2 wait for it for" not in ranks[0].said:
        ranks[0].line("tutti:")
    os.kill(ranks[1].pid, signal.SIGKILL)
    assert ranks[0].end() == 1
    assert "RankLost: rank 0: rank 1 is gone" in ranks[0].said
    # Stopped, or gone already, if the diagnosis was made once more after the loss.
    assert "tutti: shortly before it failed: rank 1 " in ranks[0].said
