"""`tutti bench startup`: the time that commands take to start, beside torchrun."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tutti.errors import ConfigError
from tutti.launch.start import START

_LIMIT_S = 300.0
"""Seconds after which a command counts as hung."""
_POLL_S = 0.01
"""Seconds between two looks at a run's metrics: the resolution of that measurement."""

TRAINS = """import torch, tutti
world = tutti.init()
model = torch.nn.Linear(10, 10)
optimizer = torch.optim.Adam(model.parameters())
with tutti.distribute(model, optimizer):
    model(torch.randn(4, 10) + world.rank).square().mean().backward()
    optimizer.step()
world.close()
"""
"""A script that makes one step."""


@dataclass(frozen=True)
class StartupReport:
    """Start-up times of every command."""

    workers: int
    rounds: int
    seconds: dict[str, float]
    """Median seconds by command: until it has ended, or until its first step."""

    @property
    def times_torchrun(self) -> float:
        """Time of `tutti run` with an empty script, relative to torchrun."""
        return self.seconds["tutti run, empty script"] / self.seconds["torchrun, empty script"]

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and the ratio as JSON types."""
        return {**asdict(self), "times_torchrun": self.times_torchrun}


def measure(workers: int, rounds: int, show: Callable[[str], None] = lambda text: None) -> StartupReport:
    """Time every command `rounds` times, interleaved, so that a machine that gets busier slows all of them."""
    with tempfile.TemporaryDirectory(prefix="tutti-startup-") as name:
        folder = Path(name)
        (folder / "empty.py").write_text("")
        (folder / "trains.py").write_text(TRAINS)
        commands = _commands(workers, folder)
        seconds: dict[str, list[float]] = {command: [] for command in commands}
        # The first round may read files from disk; the median ignores it.
        for number in range(rounds):
            for command, run in commands.items():
                show(f"round {number + 1} of {rounds}: {command}")
                seconds[command].append(run())
    return StartupReport(workers, rounds, {command: statistics.median(times) for command, times in seconds.items()})


def _commands(workers: int, folder: Path) -> dict[str, Callable[[], float]]:
    """Return functions that run a command once and return its seconds, by the title of the command's row."""
    tutti = [sys.executable, "-m", "tutti"]
    run = [*tutti, "run", "--workers", str(workers)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    empty, trains = str(folder / "empty.py"), str(folder / "trains.py")
    return {
        "tutti --help": lambda: _seconds_to_end([*tutti, "--help"], folder),
        "torchrun, empty script": lambda: _seconds_to_end([*torchrun, empty], folder),
        "tutti run, empty script": lambda: _seconds_to_end([*run, empty], folder),
        "tutti run, one step": lambda: _seconds_to_end([*run, trains], folder),
        # Without the fork server: what forking workers saves.
        "tutti run, one step, spawned": lambda: _seconds_to_end([*run, trains], folder, **{START: "spawn"}),
        "torchrun, one step": lambda: _seconds_to_end([*torchrun, trains], folder),
        "tutti train digits, first step": lambda: _seconds_to_first_step([*tutti, "train", "digits"], folder),
    }


def _seconds_to_end(command: list[str], folder: Path, **variables: str) -> float:
    """Run a command to its end, and return its seconds. Raises `ConfigError` with its output if it fails."""
    start_s = time.perf_counter()
    ended = subprocess.run(
        command, cwd=folder, env=_environment(**variables), capture_output=True, timeout=_LIMIT_S, check=False
    )
    seconds = time.perf_counter() - start_s
    if ended.returncode:
        output = (ended.stdout + ended.stderr).decode(errors="replace").strip()
        raise ConfigError(f"{' '.join(command)} failed with status {ended.returncode}: {output}")
    return seconds


def _seconds_to_first_step(command: list[str], folder: Path) -> float:
    """Start a training run, return the seconds until its first step is in its metrics, and stop it."""
    # A name of its own: metrics of an earlier round would end the wait at once.
    name = f"startup-{time.monotonic_ns()}"
    record = folder / "runs" / name / "metrics.jsonl"
    start_s = time.perf_counter()
    process = subprocess.Popen(
        # So many epochs that the run does not end before it is stopped.
        [*command, "--epochs", "10000", "--name", name],
        cwd=folder,
        env=_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not (record.exists() and record.stat().st_size):
            if process.poll() is not None or time.perf_counter() - start_s > _LIMIT_S:
                raise ConfigError(f"{' '.join(command)} made no step; run it to see why.")
            time.sleep(_POLL_S)
        return time.perf_counter() - start_s
    finally:
        process.terminate()
        # Ended by SIGTERM, upon which a launcher stops its workers within its grace.
        process.wait()


def _environment(**variables: str) -> dict[str, str]:
    """Return this process's environment, without the start method that its launcher may have set, and with `variables`.

    One thread for each worker is what torchrun sets, so that Tutti gets it too.
    """
    inherited = {name: value for name, value in os.environ.items() if name != START}
    return {**inherited, "OMP_NUM_THREADS": "1", **variables}
