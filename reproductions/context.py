"""The settings that every reproduction receives, and a description of the machine it runs on."""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True, kw_only=True)
class ReproductionContext:
    """Where a reproduction finds its data and writes its results, and how much of it to run."""

    folder: Path
    """Folder that receives `results.json`, `report.md` and the figures."""
    data: Path | None = None
    """Folder with the datasets."""
    quick: bool = False
    """Run a small form that takes a minute or two."""
    rate: str = "100mbit"
    """Rate of the lab's links."""
    progress: Callable[[str], None] = field(default=print)
    """Receives one line of text whenever a part begins or ends."""


def machine() -> str:
    """Return processor, number of cores, operating system and torch version in one line."""
    num_cores = len(os.sched_getaffinity(0))
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    system = f"{platform.system()} {platform.release().partition('-')[0]}"
    return f"{num_cores} cores of {names[0] if names else platform.machine()}, {system}, torch {torch.__version__}"
