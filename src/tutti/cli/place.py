"""Where a measurement runs: some processes here, or a lab."""

from tutti.errors import ConfigError
from tutti.launch.lab import LabSpec


def check_one_place(workers: int | None, lab: str | None) -> None:
    """Refuse both at once, and a lab with nobody to talk to."""
    if lab is None:
        return
    if workers is not None:
        raise ConfigError("give --workers or --lab, not both: a lab has hosts times ranks workers.")
    if (spec := LabSpec.parse(lab)).num_workers < 2:
        raise ConfigError(f"a lab of '{spec}' has one rank, and links are between two. Ask for more hosts or ranks.")
