"""The contract between a strategy, which is a description, and an exchange, which is it at work."""

from abc import ABC, abstractmethod
from typing import Any

from tutti.events import EventLog
from tutti.replica import Bucket, Replica
from tutti.transports import Transport


class Exchange(ABC):
    """A strategy at work on one replica: answers to the events of training.

    It asks the transport for the time and waits for nothing except through the transport, so that it
    runs under virtual time unchanged.
    """

    def __init__(self, replica: Replica, transport: Transport) -> None:
        self.replica = replica
        self.transport = transport
        self.events = EventLog()

    @abstractmethod
    def backward_started(self, weight: float) -> None:
        """The first gradient of a backward pass is there; it counts for `weight` samples."""

    @abstractmethod
    def bucket_ready(self, bucket: Bucket) -> None:
        """All gradients of `bucket` are in its memory. Called in the order of the buckets' indices."""

    @abstractmethod
    def backward_done(self) -> None:
        """Backward is over; what is in the buckets when this returns becomes `p.grad`."""

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

    @abstractmethod
    def __str__(self) -> str: ...
