"""What every reproduction is given."""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a reproduction finds its data and leaves its results, and how much of it to do."""

    folder: Path
    data: Path | None = None
    quick: bool = False
    rate: str = "100mbit"
    """Of the lab's links."""
    say: Callable[[str], None] = field(default=print)
    """Progress, a line at a time."""


def machine() -> str:
    """What this was measured on, in a few words."""
    cores = len(os.sched_getaffinity(0))
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    system = f"{platform.system()} {platform.release().partition('-')[0]}"
    return f"{cores} cores of {names[0] if names else platform.machine()}, {system}, torch {torch.__version__}"
