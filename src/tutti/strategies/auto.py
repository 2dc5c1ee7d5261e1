"""Have the planner choose, from what training itself shows."""

from collections.abc import Iterator
from dataclasses import dataclass

from tutti.codecs import Codec
from tutti.cost import Placement, Profile
from tutti.errors import ConfigError
from tutti.replica import Replica
from tutti.strategies.base import Exchange, Strategy
from tutti.transports import Transport


@dataclass(frozen=True)
class Auto(Strategy):
    """All-reduce at first; when a few steps have been timed and the link measured, whatever the planner finds best.

    What it predicted is compared with what steps take, and if they differ for long, all ranks plan again and may
    change over between two steps.

    Args:
        lossy: whether it may choose what does not do exactly what one worker would.
    """

    lossy: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.lossy, bool):
            raise ConfigError(f"Auto: lossy must be True or False, got {self.lossy!r}.")

    def attach(self, replica: Replica, transport: Transport) -> Exchange:
        raise AssertionError("the planner attaches what it chooses: tutti.plan.auto")

    @property
    def exact(self) -> bool:
        return not self.lossy

    def candidates(self, profile: Profile, placement: Placement) -> Iterator[Strategy]:
        return iter(())  # It is the planner.

    def can_resume_from(self, text: str) -> bool:
        return text.partition(":")[0] == "auto"

    def __str__(self) -> str:
        return "auto:lossy=1" if self.lossy else "auto"


def read(options: dict[str, str], codec: Codec | None) -> Auto:
    """Make one from options at the command line."""
    if codec is not None:
        raise ConfigError("auto chooses codecs itself, if auto:lossy=1 lets it.")
    if options.keys() - {"lossy"} or options.get("lossy", "0") not in ("0", "1"):
        raise ConfigError("auto takes lossy=0 or lossy=1 and nothing else.")
    return Auto(options.get("lossy") == "1")
