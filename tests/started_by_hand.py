"""Ranks, and a coordinator in a process of its own, that a test starts one by one."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import warm
from tutti.coordination.description import process_state, start_time

SCRIPTS = Path(__file__).parent / "scripts"
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

    def __init__(self, workers: int, script: str, *arguments: str, **variables: str) -> None:
        self._stack = ExitStack()
        self.secret = os.urandom(16).hex()
        self.port = 0
        self.serve()
        variables = {
            **variables,
            "TUTTI_COORDINATOR": f"127.0.0.1:{self.port}",
            "TUTTI_SECRET": self.secret,
            "WORLD_SIZE": str(workers),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "9",  # Nobody uses it.
        }
        self.ranks = [
            self._started(script, *arguments, RANK=str(rank), LOCAL_RANK=str(rank), **variables)
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
    with closing(Run(workers, "gated_training.py", strategy, fault, TUTTI_TRANSPORT=transport)) as made:
        yield made
