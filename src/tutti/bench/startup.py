"""Start-up time: the commands a user waits for, beside torchrun."""

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
_LOOK_S = 0.01

TRAINS = """import torch, tutti
world = tutti.init()
model = torch.nn.Linear(10, 10)
optimizer = torch.optim.Adam(model.parameters())
with tutti.distribute(model, optimizer):
    model(torch.ones(4, 10)).sum().backward()
    optimizer.step()
world.close()
"""
"""A script that makes one step."""


@dataclass(frozen=True)
class StartupReport:
    """Seconds from the start of each command to what it is measured by, the median of all rounds."""

    workers: int
    rounds: int
    seconds: dict[str, float]

    @property
    def times_torchrun(self) -> float:
        """What `tutti run` takes with an empty script, relative to torchrun."""
        return self.seconds["tutti run, empty script"] / self.seconds["torchrun, empty script"]

    def as_dict(self) -> dict[str, Any]:
        """All fields and the ratio, for JSON."""
        return {**asdict(self), "times_torchrun": self.times_torchrun}


def measure(workers: int, rounds: int, show: Callable[[str], None] = lambda text: None) -> StartupReport:
    """Time every command `rounds` times, interleaved, so that a machine that gets busier slows all of them."""
    with tempfile.TemporaryDirectory(prefix="tutti-startup-") as name:
        folder = Path(name)
        (folder / "empty.py").write_text("")
        (folder / "trains.py").write_text(TRAINS)
        commands = _commands(workers, folder)
        seconds: dict[str, list[float]] = {command: [] for command in commands}
        for number in range(rounds):
            for command, run in commands.items():
                show(f"round {number + 1} of {rounds}: {command}")
                seconds[command].append(run())
    return StartupReport(workers, rounds, {command: statistics.median(times) for command, times in seconds.items()})


def _commands(workers: int, folder: Path) -> dict[str, Callable[[], float]]:
    tutti = [sys.executable, "-m", "tutti"]
    run = [*tutti, "run", "--workers", str(workers)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    empty, trains = str(folder / "empty.py"), str(folder / "trains.py")
    return {
        "tutti --help": lambda: _to_its_end([*tutti, "--help"], folder),
        "torchrun, empty script": lambda: _to_its_end([*torchrun, empty], folder),
        "tutti run, empty script": lambda: _to_its_end([*run, empty], folder),
        "tutti run, one step": lambda: _to_its_end([*run, trains], folder),
        "tutti run, one step, spawned": lambda: _to_its_end([*run, trains], folder, **{START: "spawn"}),
        "torchrun, one step": lambda: _to_its_end([*torchrun, trains], folder),
        "tutti train digits, first step": lambda: _to_first_step([*tutti, "train", "digits"], folder),
    }


def _to_its_end(command: list[str], folder: Path, **variables: str) -> float:
    start_s = time.perf_counter()
    ended = subprocess.run(
        command, cwd=folder, env=_environment(**variables), capture_output=True, timeout=_LIMIT_S, check=False
    )
    seconds = time.perf_counter() - start_s
    if ended.returncode:
        output = (ended.stdout + ended.stderr).decode(errors="replace").strip()
        raise ConfigError(f"{' '.join(command)} failed with status {ended.returncode}: {output}")
    return seconds


def _to_first_step(command: list[str], folder: Path) -> float:
    """Until the first step is in the record of the run, which is then stopped."""
    name = f"startup-{time.monotonic_ns()}"
    record = folder / "runs" / name / "metrics.jsonl"
    start_s = time.perf_counter()
    process = subprocess.Popen(
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
            time.sleep(_LOOK_S)
        return time.perf_counter() - start_s
    finally:
        process.terminate()
        process.wait()


def _environment(**variables: str) -> dict[str, str]:
    """This process's environment without what its own launcher may have left in it."""
    inherited = {name: value for name, value in os.environ.items() if name != START}
    return {**inherited, "OMP_NUM_THREADS": "1", **variables}
