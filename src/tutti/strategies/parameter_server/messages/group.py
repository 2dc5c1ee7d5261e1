"""Set-up of a group of workers and servers: opens their channel and cuts the model into shards."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tutti.replica import Replica
from tutti.replica.buckets import is_dense
from tutti.strategies.parameter_server.messages.config import ServerGroupConfig
from tutti.strategies.parameter_server.messages.server import Server
from tutti.strategies.parameter_server.messages.wire import RequestFormat
from tutti.strategies.parameter_server.optimizer_options import OptimizerOptions
from tutti.strategies.parameter_server.shard_optimizer import needs_whole_parameters
from tutti.strategies.parameter_server.shards import ParameterShard, cut_into_shards
from tutti.transports import SharesMemory, Transport

if TYPE_CHECKING:
    from tutti.strategies.parameter_server.strategy import ParameterServer


@dataclass
class ServerGroup:
    """The channel, settings and shards of a group, the same on every rank."""

    transport: Transport
    """A channel of its own for pushes and pulls."""
    config: ServerGroupConfig
    shards: list[ParameterShard]
    """All shards of the model."""

    def start_server(self, replica: Replica) -> Server:
        """Start the server of this rank. It is over at once if no shard is assigned to it."""
        rank, servers = self.transport.rank, self.config.servers
        local_shards = [shard for shard in self.shards if servers[shard.server] == rank]
        # Servers without a shard take no part in norms or orders, so the others must not wait for them.
        other_servers = sorted({servers[shard.server] for shard in self.shards} - {rank})
        copied = [shard for shard in self.shards if self.config.copy_of(shard) == rank]
        server = Server(local_shards, replica, self.transport, self.config, other_servers, copied)
        server.start()
        return server


def join_group(replica: Replica, transport: Transport, strategy: "ParameterServer") -> ServerGroup:
    """Open the group's channel and cut the model into shards. Collective; the same on every rank."""
    # Messages only: where the transport shares memory, the plain transport beneath it is used.
    plain = transport.inner if isinstance(transport, SharesMemory) else transport
    channel = plain.channel("servers")
    workers, servers = strategy.roles(transport.size)
    num_copies = copies_of_shards(strategy, elastic=replica.survives)
    compress = strategy.codec is not None
    replica.allocate(plain, strategy.bucket_bytes, strategy.exact_below if compress else 0)
    replica.arrange([slot.name for slot in replica.slots])
    dense = all(is_dense(slot.tensor) for slot in replica.slots)
    # A segment is a range in memory order, which a tensor with gaps in its memory does not have.
    keep_whole = needs_whole_parameters(replica.optimizer) or not dense
    shards = cut_into_shards(replica.buckets, len(servers), keep_whole, compress)
    max_segments = max((len(shard.segments) for shard in shards), default=0)
    request_format = RequestFormat(len(OptimizerOptions(replica.optimizer)), max_segments)
    config = ServerGroupConfig(
        strategy.consistency,
        strategy.codec,
        strategy.clip,
        tuple(workers),
        tuple(servers),
        request_format,
        strategy.factors,
        _copy_offset([plain.hosts[server] for server in servers]) if num_copies > 1 and len(servers) > 1 else None,
        # Elsewhere, servers go on with the workers that are left, or the run ends.
        replica.survives and num_copies > 1 and strategy.consistency.bound == 0,
    )
    return ServerGroup(channel, config, shards)


def copies_of_shards(strategy: "ParameterServer", *, elastic: bool) -> int:
    """Return on how many servers each shard is, in a run whose workers may come and go or in another one.

    `BSP` promises the result of the undisturbed run there, which is not possible without a copy.
    """
    if strategy.copies is not None:
        return strategy.copies
    return 2 if elastic and strategy.consistency.bound == 0 else 1


def _copy_offset(hosts: list[str]) -> int:
    """Return how many places behind a server its copies are, so that as many as possible are on other hosts."""
    num_servers = len(hosts)

    def on_same_host(offset: int) -> int:
        return sum(host == hosts[(position + offset) % num_servers] for position, host in enumerate(hosts))

    return min(range(1, num_servers), key=lambda offset: (on_same_host(offset), offset))
