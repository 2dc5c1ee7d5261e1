"""A coordinator in a process of its own that is killed, stopped or replaced, and ranks that are started by hand."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path

import pytest

import warm
from tutti.coordination.description import process_state, start_time

SCRIPTS = Path(__file__).parents[1] / "scripts"
PATIENCE_S = 2.0
WITHIN_S = 20.0


class Process:
    """A script in a warm interpreter, whose lines are read one by one. Its own number is that of the interpreter."""

    def __init__(self, script: str, *arguments: str, **variables: str) -> None:
        self._process = subprocess.Popen(
            [*warm.python(), str(SCRIPTS / script), *arguments],
            env={**os.environ, "TUTTI_PATIENCE": f"{PATIENCE_S:g}s", **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said = ""
        self.pid = 0

    def close(self) -> None:
        if self.pid and process_state(self.pid, start_time(self.pid)) != "ended":
            os.kill(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait(WITHIN_S)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def line(self, starts: str) -> list[str]:
        """Words of the next line that starts so. The time limit of the test ends this wait."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said += line
            if line.startswith(f"{starts} "):
                return line.split()
        raise AssertionError(f"no line '{starts}': {self.said}")

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> int:
        """Its status, after all that it said was read."""
        assert self._process.stdout is not None
        self.said += self._process.stdout.read()
        return self._process.wait(WITHIN_S)


class Run:
    """A coordinator, and ranks that were started by hand."""

    def __init__(self, workers: int, strategy: str, transport: str, fault: str = "") -> None:
        self._stack = ExitStack()
        self.secret = os.urandom(16).hex()
        self.port = 0
        self.serve()
        variables = {
            "TUTTI_COORDINATOR": f"127.0.0.1:{self.port}",
            "TUTTI_SECRET": self.secret,
            "TUTTI_TRANSPORT": transport,
            "WORLD_SIZE": str(workers),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "9",  # Nobody uses it.
        }
        self.ranks = [
            self._started("gated_training.py", strategy, fault, RANK=str(rank), LOCAL_RANK=str(rank), **variables)
            for rank in range(workers)
        ]
        for rank in self.ranks:
            rank.pid = int(rank.line("pid")[1])

    def _started(self, script: str, *arguments: str, **variables: str) -> Process:
        return self._stack.enter_context(closing(Process(script, *arguments, **variables)))

    def serve(self) -> None:
        """Start a coordinator: the second time, where the first was."""
        self.coordinator = self._started("coordinator.py", str(self.port), TUTTI_SECRET=self.secret)
        _, pid, port = self.coordinator.line("coordinator")
        self.coordinator.pid, self.port = int(pid), int(port)

    def kill_coordinator(self) -> None:
        os.kill(self.coordinator.pid, signal.SIGKILL)
        self.coordinator.end()

    def close(self) -> None:
        self._stack.close()


@contextmanager
def run(workers: int, strategy: str = "native", transport: str = "shared_memory", fault: str = "") -> Iterator[Run]:
    with closing(Run(workers, strategy, transport, fault)) as made:
        yield made


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
