"""`Metrics`: the counters and times of a job on one rank."""

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Changes:
    """What changes of the ranks have cost a job, as far as this rank has taken part in them."""

    generations: int = 0
    """Times that ranks have changed."""
    lost_ranks: int = 0
    """Ranks that were lost, or have left."""
    voided_steps: int = 0
    """Steps of this rank that a loss has ended. Their samples were used by a later step."""
    seconds: float = 0.0
    """Time that the changes took on this rank."""
    lost_samples: int = 0
    """The most samples that are in the model in part only, or not at all: of steps that a rank was lost in, or that it
    had passed on to some ranks only. No sample is used twice."""
    lost_residuals: int = 0
    """Lost ranks whose codec had not sent all of their gradients yet."""
    steps_cut_short: int = 0
    """Steps of servers in shared memory that a lost rank had begun: they count as taken, as far as it came."""

    def with_void_step(self, is_void: bool) -> "Changes":
        """Return these with a void step more, if there was one."""
        return replace(self, voided_steps=self.voided_steps + is_void)


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

    changes: Changes = Changes()
    """What changes of the ranks have cost; all 0 where the ranks stay the same."""

    @property
    def waiting_share(self) -> float:
        """Share of the time spent waiting for other ranks, from 0 to 1."""
        return self.waiting_s / self.seconds if self.seconds else 0.0
