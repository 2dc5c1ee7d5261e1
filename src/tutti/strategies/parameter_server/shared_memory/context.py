"""State of one shared-memory worker that its parts share: its private view of each bucket, and all shared memory."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tutti.events import EventLog
from tutti.replica import Replica
from tutti.strategies.parameter_server.consistency import Consistency
from tutti.strategies.parameter_server.shared_memory.counters import ShardCounters
from tutti.strategies.parameter_server.shared_memory.parameters import SharedParameters
from tutti.strategies.parameter_server.shared_memory.push_buffers import PushBuffers
from tutti.strategies.parameter_server.shared_memory.worker_registry import WorkerRegistry

if TYPE_CHECKING:
    from tutti.strategies.parameter_server.strategy import ParameterServer
    from tutti.transports.shared_memory.transport import SharedMemoryTransport


@dataclass
class LocalBucket:
    """The versions of a bucket that this worker's model holds. Private memory."""

    base_versions: list[int]
    """Version of each shard, as read last."""
    clock: int = 0
    """Number of this worker's pushes, skipped iterations included."""
    version: int = 0
    """The lowest of `base_versions`."""
    is_stale: bool = False
    """Whether the shared values may be newer than the model's: set by a push, cleared by a read."""


@dataclass(frozen=True, eq=False)
class SharedMemoryContext:
    """Shared and private state of one worker, for its parts."""

    replica: Replica
    transport: "SharedMemoryTransport"
    strategy: "ParameterServer"
    registry: WorkerRegistry
    counters: ShardCounters
    parameters: SharedParameters
    pushes: PushBuffers
    buckets: list[LocalBucket]
    events: EventLog
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of updates by staleness; only the first shard is counted, so that each iteration counts once."""

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def consistency(self) -> Consistency:
        return self.strategy.consistency


def applies_own_updates(consistency: Consistency) -> bool:
    """Whether every update is a version of its own, so that each worker applies its updates itself."""
    # `Async` and `SoftSync(1)`: a version needs no second worker, so no gradient has to be stored for others to read.
    return consistency.bound is None and consistency.quorum == 1


def steps_jointly(strategy: "ParameterServer") -> bool:
    """Whether all shards are stepped together: for the norm of the whole gradient, or to hold the same updates."""
    consistency = strategy.consistency
    return strategy.clips_means or (consistency.bound is None and consistency.quorum > 1)
