"""The rate at which a large state is written, beside `dd` with fsync to the same disk."""

import statistics
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tutti.bench.checkpoints.files import size_ratio
from tutti.collectives import all_gather_json
from tutti.errors import ConfigError
from tutti.job import distribute
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe

_BLOCK_BYTES = 8 * 2**20
_VALUES_PER_PARAMETER = 3
"""Adam keeps two values for each parameter."""
_NUM_LAYERS = 5


@dataclass(frozen=True, kw_only=True)
class WriteRates:
    """Bytes per second; medians."""

    state_bytes: int
    checkpoint: float
    dd: float
    size_ratio: float

    @property
    def share(self) -> float:
        """Rate of checkpoints, relative to `dd`."""
        return self.checkpoint / self.dd

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and the share as JSON types."""
        return {**asdict(self), "share": self.share}


def measure(folder: str, state_bytes: int, rounds: int) -> dict[str, Any]:
    """Write checkpoints and files of zeros in turn, and return `WriteRates` as a dict. Collective."""
    world, supervisor = init(), SupervisorPipe()
    torch.manual_seed(0)
    width = round((state_bytes / 4 / _VALUES_PER_PARAMETER / _NUM_LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(_NUM_LAYERS)))
    optimizer = torch.optim.Adam(model.parameters())
    job = distribute(model, optimizer, world=world)
    model(torch.full((1, width), 1.0 + world.rank)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    rates: dict[str, list[float]] = {"checkpoint": [], "dd": []}
    ratio, size = 0.0, 0
    for number in range(rounds + 1):
        supervisor.progress(doing=f"writing: round {number} of {rounds}")
        job.checkpoint(folder, keep=1)
        if world.rank == 0:
            (writer,) = job._checkpoints._writers.values()
            checkpoint = writer.flush()
            assert checkpoint is not None
            ratio, size = size_ratio(checkpoint), sum(path.stat().st_size for path in checkpoint.iterdir())
            dd_s = _dd(Path(folder) / "zeros", size)
            if number:  # The first allocates memory.
                rates["checkpoint"].append(size / writer.seconds)
                rates["dd"].append(size / dd_s)
        all_gather_json(0, world.transport)  # The others are idle until the files are written.
    job.finish()
    medians = {name: statistics.median(values or [1.0]) for name, values in rates.items()}
    return WriteRates(state_bytes=size, size_ratio=ratio, **medians).as_dict()


def _dd(path: Path, size: int) -> float:
    """Write zeros with `dd`, as many blocks as `size` has, and return the seconds that it took for `size` bytes."""
    blocks = max(1, round(size / _BLOCK_BYTES))
    command = ["dd", "if=/dev/zero", f"of={path}", f"bs={_BLOCK_BYTES}", f"count={blocks}", "conv=fsync"]
    start_s = time.perf_counter()
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError("the rate of writing is compared with that of dd, which is not installed here.") from None
    seconds = time.perf_counter() - start_s
    path.unlink(missing_ok=True)
    if ended.returncode:
        raise ConfigError(f"{' '.join(command)} failed: {ended.stderr.strip()}")
    return seconds * size / (blocks * _BLOCK_BYTES)
