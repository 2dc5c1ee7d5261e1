"""Hosts, links and speeds: one model for cost formulas, the lab, the simulator and measurements.

- `cluster`: `Cluster`, made of `hosts` (`Host`, `Tier`), `link` (`Link`) and `compute` (`Compute`, `Jitter`, `Pauses`).
- `check`: validates what a cluster is given. `files`: TOML files. `presets`: clusters by name.
- `quantities`: rates, times, durations and sizes as texts. `mistakes`: several mistakes in one error.
"""

from tutti.cluster.cluster import Cluster
from tutti.cluster.compute import Compute, Jitter, Pauses
from tutti.cluster.hosts import Host, Tier
from tutti.cluster.link import Link
from tutti.cluster.presets import PRESETS
from tutti.cluster.quantities import (
    Duration,
    format_rate,
    format_size,
    format_speed,
    format_time,
    parse_duration,
    parse_rate,
    parse_size,
    parse_speed,
    parse_time,
)

__all__ = [
    "PRESETS",
    "Cluster",
    "Compute",
    "Duration",
    "Host",
    "Jitter",
    "Link",
    "Pauses",
    "Tier",
    "format_rate",
    "format_size",
    "format_speed",
    "format_time",
    "parse_duration",
    "parse_rate",
    "parse_size",
    "parse_speed",
    "parse_time",
]
