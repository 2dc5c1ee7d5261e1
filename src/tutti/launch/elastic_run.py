"""`ElasticRun`: how the workers of a run may come and go, as `tutti run` and `tutti.launch` are told."""

from dataclasses import dataclass, replace

from tutti.errors import ConfigError
from tutti.launch.chaos import Chaos
from tutti.launch.control_settings import parse_worker_range

RESTARTS = 10
"""How many workers are started in place of lost ones, unless the user says otherwise."""


@dataclass(frozen=True, kw_only=True)
class ElasticRun:
    """The fewest and the most workers, and what happens to lost ones."""

    minimum: int
    maximum: int
    start: int | None = None
    """How many workers to start; None for the most. Others may join later, from other hosts for example."""
    restarts: int = RESTARTS
    """How many workers are started in place of lost ones."""
    chaos: Chaos | None = None
    """Failures to cause on purpose."""
    listen: str | None = None
    """The address on which launchers of other hosts reach the run; None if none can."""

    def __post_init__(self) -> None:
        mistakes = []
        if self.restarts < 0:
            mistakes.append(f"restarts must be 0 or more, got {self.restarts}.")
        if not 1 <= self.num_started <= self.maximum:
            mistakes.append(f"start must be from 1 to {self.maximum}, the maximum of workers, got {self.start}.")
        if mistakes:
            raise ConfigError(" ".join(mistakes))

    @property
    def num_started(self) -> int:
        """Number of workers that are started."""
        return self.maximum if self.start is None else self.start


Workers = int | str | tuple[int, int] | ElasticRun | None
"""A number of workers, or the fewest and the most: 4, (2, 8), or a text such as "4" or "2:8"; None for the default."""


def parse_workers(workers: Workers, name: str) -> int | ElasticRun | None:
    """Return a number of workers, or how they may come and go. Raises `ConfigError` for anything else.

    Args:
        workers: as given by the user.
        name: of the argument, for messages.
    """
    if workers is None or isinstance(workers, ElasticRun):
        return workers
    text = ":".join(map(str, workers)) if isinstance(workers, tuple | list) else str(workers).strip()
    if text.removeprefix("-").isdecimal():
        return int(text)
    minimum, maximum = parse_worker_range(text, name)
    return ElasticRun(minimum=minimum, maximum=maximum)


def with_chaos(workers: int | str | tuple[int, int] | ElasticRun, chaos: str | Chaos | None) -> int | ElasticRun:
    """Return a number of workers, or how they may come and go, with failures that are caused on purpose.

    Where failures are given, a plain number stands for 1 worker up to that many.
    """
    found = parse_workers(workers, "workers")
    assert found is not None
    if chaos is None:
        return found
    if not isinstance(found, ElasticRun):
        if found < 2:
            raise ConfigError(f"chaos needs 2 workers or more, of which some may be lost, got {found}.")
        found = ElasticRun(minimum=1, maximum=found)
    return replace(found, chaos=Chaos.parse(chaos) if isinstance(chaos, str) else chaos)
