"""`Auto`: the strategy that has the planner choose, from measurements of the first training steps."""

from collections.abc import Iterator
from dataclasses import dataclass

from tutti.codecs import Codec
from tutti.cost import Placement, Profile
from tutti.errors import ConfigError
from tutti.plan.auto.exchange import AutoExchange
from tutti.replica import HookedReplica, Replica
from tutti.strategies import AllReduce, Exchange, Strategy
from tutti.strategies.compatibility import Support
from tutti.transports import Transport


@dataclass(frozen=True)
class Auto(Strategy):
    """Start with all-reduce; after a few timed steps and a measurement of the link, use what the planner finds best.

    The prediction is compared with the measured steps. If they differ for long, all ranks plan again, and may change
    their strategy between two steps.

    Args:
        lossy: whether strategies that change the result may be chosen (compression, local steps).
    """

    lossy: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.lossy, bool):
            raise ConfigError(f"Auto: lossy must be True or False, got {self.lossy!r}.")

    def attach(self, replica: Replica, transport: Transport) -> Exchange:
        if transport.size == 1:
            return AllReduce().attach(replica, transport)
        if not isinstance(replica, HookedReplica):
            raise ConfigError(
                "auto times the steps of a model that trains, and this is a dry run: name the strategy to try."
            )
        return AutoExchange(replica, transport, self.lossy)

    @property
    def needs_whole_model(self) -> bool:
        return True  # It times the layers of the whole model.

    @property
    def exact(self) -> bool:
        return not self.lossy

    @property
    def steps_by_mean_gradient(self) -> bool:
        return True  # Every candidate but those of local steps does.

    def support(self, technique: str) -> Support:
        return AllReduce().support(technique)  # It may choose one.

    def candidates(self, profile: Profile, placement: Placement) -> Iterator[Strategy]:
        return iter(())  # It is the planner.

    def __str__(self) -> str:
        return "auto:lossy=1" if self.lossy else "auto"


def read(options: dict[str, str], codec: Codec | None) -> Auto:
    """Make the strategy from its options at the command line."""
    if codec is not None:
        raise ConfigError("auto chooses codecs itself, if auto:lossy=1 lets it.")
    if options.keys() - {"lossy"} or options.get("lossy", "0") not in ("0", "1"):
        raise ConfigError("auto takes lossy=0 or lossy=1 and nothing else.")
    return Auto(options.get("lossy") == "1")
