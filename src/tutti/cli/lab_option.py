"""The options `--workers` and `--lab`: workers are processes on this machine, or on the emulated hosts of a lab."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from tutti.errors import ConfigError

if TYPE_CHECKING:
    from tutti.launch.lab.lab import Lab


def open_lab(spec: str | None) -> "AbstractContextManager[Lab | None]":
    """Make the lab that `--lab` describes and remove it at the end; the context is None without `--lab`."""
    from tutti.launch.lab.lab import Lab, LabSpec

    return nullcontext() if spec is None else Lab(LabSpec.parse(spec))


def launch_arguments(workers: int, lab: "Lab | None") -> dict[str, Any]:
    """The keyword argument of `tutti.launch` that says where to start ranks."""
    return {"workers": workers} if lab is None else {"on": lab}


def describe_hosts(workers: int, lab: "Lab | str | None") -> str:
    """Where ranks run, for titles and progress lines. `lab` is a lab or its text."""
    if lab is None:
        return f"{workers} workers on loopback"
    return f"lab {lab if isinstance(lab, str) else lab.spec}"


def check_workers_or_lab(workers: int | str | None, lab: str | None) -> None:
    """Refuse `--workers` together with `--lab`, and a lab of one rank, which has no links."""
    from tutti.launch.lab.lab import LabSpec

    if lab is None:
        return
    if workers is not None:
        raise ConfigError("give --workers or --lab, not both: a lab has hosts times ranks workers.")
    # Checked before hosts are made, which takes root and seconds.
    if (spec := LabSpec.parse(lab)).num_workers < 2:
        raise ConfigError(f"a lab of '{spec}' has one rank, and links are between two. Ask for more hosts or ranks.")
