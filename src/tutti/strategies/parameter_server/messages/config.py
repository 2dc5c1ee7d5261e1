"""Configuration that the workers and servers of one group agree on."""

from dataclasses import dataclass

from tutti.codecs import Codec
from tutti.strategies.parameter_server.consistency import Consistency
from tutti.strategies.parameter_server.messages.wire import RequestFormat
from tutti.strategies.parameter_server.shards import ParameterShard


@dataclass(frozen=True)
class ServerGroupConfig:
    """Settings of a group of workers and servers; each rank derives the same ones from the strategy and the model."""

    consistency: Consistency
    codec: Codec | None
    """Compresses pushed gradients."""
    clip: float | None
    """Largest norm of a gradient that the optimiser gets."""
    workers: tuple[int, ...]
    """Ranks that train."""
    servers: tuple[int, ...]
    """Ranks that serve; `ParameterShard.server` is a position in it."""
    request_format: RequestFormat
    factors: bool = False
    """Whether gradients of linear layers are pushed as their factors, where those are smaller."""
    copy_offset: int | None = None
    """The copy of a shard is on the server this many places behind its own, cyclically; None without copies."""
    exact: bool = False
    """Whether a step counts on all workers or on none, so that a loss changes no result."""

    @property
    def needs_all_workers(self) -> bool:
        """Whether every step waits for all workers, so that none can take leave."""
        return self.clips_means or self.exact

    def server_of(self, shard: ParameterShard) -> int:
        """Return the rank that takes the pushes of a shard."""
        return self.servers[shard.server]

    def copy_of(self, shard: ParameterShard) -> int | None:
        """Return the rank that has the copy of a shard, and replies with its values; None if there is no copy."""
        if self.copy_offset is None:
            return None
        return self.servers[(shard.server + self.copy_offset) % len(self.servers)]

    @property
    def clips_means(self) -> bool:
        """Whether the mean over workers is clipped, so that all shards of all servers are stepped together."""
        return self.clip is not None and self.consistency.bound is not None

    def max_push_bytes(self, shard: ParameterShard) -> int:
        """Return the most bytes that a worker may push of a shard."""
        if self.codec is None or shard.groups is None:
            return shard.num_bytes
        # Generous, because `packet_bytes` is an estimate for sparse codecs; a bound against malformed headers only.
        return 2 * self.codec.packet_bytes(shard.numel, shard.groups) + shard.num_bytes
