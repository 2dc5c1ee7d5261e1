"""The contract between a strategy, which is a description, and an exchange, which is it at work."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from tutti.errors import ConfigError
from tutti.events import EventLog
from tutti.replica import Bucket, FactoredLayer, Replica
from tutti.transports import Transport


@dataclass(frozen=True)
class Planned:
    """What a planner chose, and whether it was right."""

    chosen: str
    predicted_s: float | None
    """What a step should take; None before there is a plan."""
    step_s: float | None
    """What a step takes, of late."""
    settled: bool
    """Whether nothing is being watched or tried out."""


class Exchange(ABC):
    """A strategy at work on one replica: answers to the events of training.

    It asks the transport for the time and waits for nothing except through the transport, so that it
    runs under virtual time unchanged.
    """

    def __init__(self, replica: Replica, transport: Transport) -> None:
        self.replica = replica
        self.transport = transport
        self.events = EventLog()

    def backward_started(self, weight: float) -> None:
        """The first gradient of a backward pass is there; it counts for `weight` samples."""
        return None

    def bucket_ready(self, bucket: Bucket) -> None:
        """All gradients of `bucket` are in its memory. Called in the order of the buckets' indices."""
        return None

    def factors_ready(self, layer: FactoredLayer) -> None:
        """All factors of the gradient of `layer` are there. In any order, for those that were set apart."""
        return None

    def backward_done(self) -> None:
        """Backward is over; what is in the buckets when this returns becomes `p.grad`."""
        return None

    @abstractmethod
    def before_step(self) -> None:
        """The optimiser is about to step."""

    @abstractmethod
    def after_step(self) -> None:
        """The optimiser has stepped."""

    @abstractmethod
    def consensus(self) -> None:
        """Bring the model's parameters and buffers to what all ranks agree on. Collective."""

    @abstractmethod
    def dissent(self) -> None:
        """Give back what `consensus` took away: this rank's own parameters."""

    @abstractmethod
    def finish(self) -> None:
        """Complete what is under way and leave the model in agreement. Collective."""

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensor data that this rank has sent, or made others read."""
        return self.transport.bytes_sent

    @property
    def staleness(self) -> dict[int, int]:
        """How many of this rank's updates were computed from parameters so many steps old: none but fresh ones."""
        return {}

    @property
    def version(self) -> int:
        """How many steps servers had taken when this rank last read."""
        return 0

    @property
    def spectral_gap(self) -> float | None:
        """How fast what ranks have comes together by mixing with neighbours, from 0 to 1; None where none mix."""
        return None

    @property
    def planned(self) -> Planned | None:
        """What is at work, where that is the planner's choice."""
        return None

    @property
    def skipped(self) -> float:
        """The part of all gradients that was left out, since their parameters had stopped moving."""
        return 0.0

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of those that are left."""
        return self.transport.rank == 0

    @property
    def tolerates_loss(self) -> bool:
        """Whether the other ranks go on when this one is lost."""
        return False

    def leave(self) -> None:
        """Take no part until `join`, and let the others go on."""
        raise ConfigError(
            f"rank {self.transport.rank}: under this strategy every rank takes part in every step. Parameter "
            "servers, peers' updates and gossip let a worker go away for a while."
        )

    def join(self) -> None:
        """Take part again."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the model. Not collective. Idempotent."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What must be saved, beside model and optimiser, to go on exactly."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state, f"{type(self).__name__} keeps no state, got {sorted(state)}"


class Strategy(ABC):
    """A description of how replicas stay together: frozen, comparable, printed as the text that makes it."""

    @abstractmethod
    def attach(self, replica: Replica, transport: Transport) -> Exchange:
        """Start working on `replica`. Collective."""

    def check_size(self, size: int) -> None:
        """Raise `ConfigError` if it cannot be used by so many ranks."""
        return None

    def mistakes(self, optimizer: Optimizer, size: int) -> list[str]:
        """What is wrong with using it with this optimiser on so many ranks."""
        try:
            self.check_size(size)
        except ConfigError as error:
            return [str(error)]
        return []

    def goes_on_from(self, text: str) -> bool:
        """Whether this can go on from what was saved under the strategy of that text."""
        return text == str(self)

    @property
    def lockstep(self) -> bool:
        """Whether all ranks take the same steps together, so that they can do other things together between them."""
        return True

    @property
    def in_step(self) -> bool:
        """Whether every step is of all ranks, so that one which is away (`job.away()`) leaves something out."""
        return self.lockstep

    @property
    def num_serving(self) -> int:
        """How many ranks, the last ones, do not train but serve the others."""
        return 0

    def serve(self, replica: Replica, transport: Transport) -> None:
        """Do what such a rank does, until nobody is left to serve. Collective with the others' `attach`."""
        raise AssertionError(f"{type(self).__name__} has no servers")

    @abstractmethod
    def __str__(self) -> str: ...
