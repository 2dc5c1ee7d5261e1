"""Where workers run: as processes here, or in a lab."""

from contextlib import AbstractContextManager, nullcontext

from tutti.errors import ConfigError
from tutti.launch.lab.lab import Lab, LabSpec


def lab_if_any(text: str | None) -> AbstractContextManager[Lab | None]:
    """The lab that `--lab` describes, for as long as the context lasts; None without one."""
    return nullcontext() if text is None else Lab(LabSpec.parse(text))


def described(workers: int, lab: Lab | None) -> str:
    return f"{workers} workers on loopback" if lab is None else f"lab {lab.spec}"


def check_one_place(workers: int | str | None, lab: str | None) -> None:
    """Refuse both at once, and a lab with nobody to talk to."""
    if lab is None:
        return
    if workers is not None:
        raise ConfigError("give --workers or --lab, not both: a lab has hosts times ranks workers.")
    if (spec := LabSpec.parse(lab)).num_workers < 2:
        raise ConfigError(f"a lab of '{spec}' has one rank, and links are between two. Ask for more hosts or ranks.")


def numbers_of_workers(text: str, least: int, such_as: str) -> list[int]:
    """From a text with commas between them."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise ConfigError(
            f"--workers takes numbers of {least} or more with commas between, such as {such_as}; got '{text}'."
        )
    return numbers
