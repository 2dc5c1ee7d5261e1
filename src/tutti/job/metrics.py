"""`Metrics`: the counters and times of a job on one rank."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Metrics:
    """Counters of a job on this rank, since `distribute`."""

    steps: int
    """Steps of the optimiser that this rank has taken, including those before a state that was loaded."""
    exchanges: int
    """Exchanges with other ranks, as the strategy counts them."""
    bytes_sent: int
    """Bytes that this rank sent in them."""
    seconds: float
    """Time since `distribute`; virtual time in a simulation."""
    waiting_s: float
    """The part of it in which this rank waited for other ranks."""
    strategy: dict[str, Any] = field(default_factory=dict)
    """Metrics of the strategy itself, by name. Each strategy has only those that apply to it:

    - "staleness" (parameter servers, peer updates): counts of this rank's updates, by the age in steps of the
      parameters they were computed from;
    - "version" (parameter servers): the steps the servers had taken when this rank last read;
    - "blocks" (averaging): the blocks that have ended;
    - "spectral_gap" (gossip): how fast replicas converge to their mean by mixing, from 0 to 1;
    - "skipped" (`AllReduce(skip_converged=...)`): the share of gradient elements that was not exchanged;
    - "planned" (`Auto`): the strategy at work, its predicted and its measured step.
    """

    @property
    def waiting_share(self) -> float:
        """Share of the time spent waiting for other ranks, from 0 to 1."""
        return self.waiting_s / self.seconds if self.seconds else 0.0
