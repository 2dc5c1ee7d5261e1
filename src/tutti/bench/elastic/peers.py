"""The loss of a worker under Tutti, torchft and torchrun: how long until the next step, and what is lost.

torchft is an optional package, which is not among Tutti's extras: it is used if it can be imported. Each of its
workers is a replica group, and its lighthouse and time limits are set to react soon (`peer_training.lighthouse`).
torchrun starts all workers anew, which continue from a checkpoint. The runs are those of `peer_training`.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tutti.bench.checkpoints.training import NUM_SAMPLES
from tutti.bench.elastic.peer_training import EPOCHS, WORKERS, under_tutti
from tutti.launch.elastic_run import ElasticRun
from tutti.launch.local import supervise

_MODULE = "tutti.bench.elastic.peer_training"
_LIMIT_S = 120.0


@dataclass
class PeerOutcome:
    """What the loss of a worker costs under one system."""

    name: str
    seconds: list[float] = field(default_factory=list)
    """From each kill to the next step that all survivors, or those in their place, have completed."""
    unused: int = 0
    """Samples that no completed step has used, in the last run."""
    again: int = 0
    """Samples that completed steps have used more than once, those of a run before a restart included."""
    difference: float = float("nan")
    """Of parameters at the end from those of the run without a kill, relative to the largest."""
    problem: str = ""

    @property
    def median_s(self) -> float:
        """Median time of a loss."""
        return statistics.median(self.seconds) if self.seconds else float("nan")


def missing(name: str) -> str:
    """Return why a system cannot be measured here; empty if it can."""
    if name == "torchft" and find_spec("torchft") is None:
        return "torchft is not installed: pip install torchft, in an environment of its own"
    return ""


def measure(name: str, rounds: int) -> PeerOutcome:
    """Kill a worker in each of some runs, and compare the last one with a run without a kill."""
    outcome = PeerOutcome(name)
    with tempfile.TemporaryDirectory(prefix="tutti-peers-") as parent:
        folders = [Path(parent) / str(number) for number in range(rounds + 1)]
        for number, folder in enumerate(folders):
            folder.mkdir()
            outcome.problem = _run(name, folder, kill=number > 0)
            if outcome.problem:
                return outcome
            if number > 0:
                outcome.seconds.append(_seconds(folder))
        outcome.unused, outcome.again = _samples(folders[-1])
        wanted, got = (_ends(folder)[0] for folder in (folders[0], folders[-1]))
        outcome.difference = max(abs(a - b) for a, b in zip(wanted, got, strict=True)) / max(map(abs, wanted))
    return outcome


def _run(name: str, folder: Path, *, kill: bool) -> str:
    """Train under a system; return what went wrong."""
    if name == "tutti":
        elastic = ElasticRun(minimum=1, maximum=WORKERS, restarts=0)
        supervise(_tutti, (str(folder), kill), elastic, {"TUTTI_TRANSPORT": "sockets"}).run()
        return ""
    program = ["-m", _MODULE, name, str(folder), "kill" if kill else "none"]
    if name == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
        command += ["--max-restarts=2", *program]
        # In torch 2.13 workers that were started anew find the addresses of those before them in the shared store.
        variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return _wait({folder / "said": _started(command, variables, folder / "said")})
    with _lighthouse() as address:
        variables = {"TORCHFT_LIGHTHOUSE": address, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *program]
        files = [folder / f"said-{rank}" for rank in range(WORKERS)]
        return _wait(
            {file: _started(command, {**variables, "RANK": str(rank)}, file) for rank, file in enumerate(files)}
        )


def _tutti(folder: str, kill: bool) -> None:
    under_tutti(folder, kill=kill)


@contextmanager
def _lighthouse() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, "-m", _MODULE, "lighthouse"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def _started(command: list[str], variables: dict[str, str], said: Path) -> "subprocess.Popen[bytes]":
    with said.open("wb") as file:  # Not a pipe, which would fill up.
        return subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def _wait(processes: "dict[Path, subprocess.Popen[bytes]]") -> str:
    """Wait until all have ended; return what the first said that failed by itself. They are ended after the limit."""
    problem, deadline = "", time.monotonic() + _LIMIT_S
    try:
        for said, process in processes.items():
            status = process.wait(max(0.0, deadline - time.monotonic()))
            if status not in (0, -signal.SIGKILL):
                problem = problem or f"status {status}: {said.read_text()[-800:]}"
    except subprocess.TimeoutExpired:
        problem = f"it has not ended within {_LIMIT_S:g} s"
    finally:
        for process in processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()  # Ended by the signal.
    return problem


def _steps(folder: Path) -> dict[str, list[tuple[int, int, list[int], bool, float]]]:
    """The steps of each worker that came to an end, and of those that did not, by file."""
    return {
        path.stem.removeprefix("worker-"): [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob("worker-*.jsonl")
    }


def _ends(folder: Path) -> list[list[float]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("end-*.json"))]


def _seconds(folder: Path) -> float:
    """Return the time from the kill to the next step that all of those have completed who came to the end."""
    killed = float((folder / "killed").read_text())
    steps, ends = _steps(folder), [path.stem.removeprefix("end-") for path in folder.glob("end-*.json")]
    return max(min(at for *_, done, at in steps[end] if done and at > killed) for end in ends) - killed


def _samples(folder: Path) -> tuple[int, int]:
    """Return how many samples no completed step has used, and how many more than one."""
    used: Counter[tuple[int, int]] = Counter()
    for steps in _steps(folder).values():
        used.update((epoch, number) for _, epoch, numbers, done, _ in steps if done for number in numbers)
    return EPOCHS * NUM_SAMPLES - len(used), sum(count > 1 for count in used.values())
