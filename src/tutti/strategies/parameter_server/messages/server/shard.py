"""State of one shard on its server: values, ledger, waiting pulls, and snapshots that are being sent."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.strategies.parameter_server.ledger import Ledger
from tutti.strategies.parameter_server.messages.buffers import BufferPool
from tutti.strategies.parameter_server.shard_optimizer import ShardOptimizer
from tutti.strategies.parameter_server.shards import ParameterShard


@dataclass(eq=False)
class ShardSnapshot:
    """A copy of a shard's values at one version, which stays as it is while it is sent."""

    version: int
    buffer: Tensor
    num_readers: int = 0
    """Sends that have still to finish."""


class ServerShard:
    """A shard, and everything that its server knows of it."""

    def __init__(self, spec: ParameterShard, ledger: Ledger, optimizer: ShardOptimizer | None, like: Tensor) -> None:
        self.spec = spec
        """Which part of the model the shard is."""
        self.ledger = ledger
        self.optimizer = optimizer
        """Holds the values and steps them; None in a dry run, where there are only sizes."""
        self.buffers = BufferPool(spec.num_bytes, like)
        self.waiting_pulls: dict[int, int] = {}
        """The version that each waiting worker wants."""
        self.version = 0
        """Versions whose step is taken. While a joint step waits for norms, the ledger's version is ahead of it."""
        self.answered_version = -1
        """The ledger's version when waiting pulls were last checked."""
        self.staleness: dict[int, int] = {}
        """Staleness of each worker's last applied update."""
        self._snapshot: ShardSnapshot | None = None
        """The newest copy that was made for a send; older ones belong to the sends that read them."""

    def value_bytes(self) -> Tensor:
        """Return the values as bytes, not a copy; in a dry run, any buffer of that size."""
        return self.buffers.take() if self.optimizer is None else self.optimizer.values.view(torch.uint8)

    def acquire_snapshot(self) -> ShardSnapshot:
        """Return the present values for a send; `release_snapshot` must follow. Readers of one version share a copy."""
        old = self._snapshot
        if old is None or old.version != self.version:
            buffer = self.buffers.take()
            if self.optimizer is not None:
                # One copy per version, whatever the number of workers that pull it.
                buffer.copy_(self.optimizer.values.view(torch.uint8))
            self._snapshot = ShardSnapshot(self.version, buffer)
            # While the old one is still being sent, its last reader gives the buffer back (`release_snapshot`).
            if old is not None and not old.num_readers:
                self.buffers.give_back(old.buffer)
        assert self._snapshot is not None
        self._snapshot.num_readers += 1
        return self._snapshot

    def release_snapshot(self, snapshot: ShardSnapshot) -> None:
        """End a send. The buffer of an outdated snapshot is free once no send reads it; the newest one is kept."""
        snapshot.num_readers -= 1
        if not snapshot.num_readers and snapshot is not self._snapshot:
            self.buffers.give_back(snapshot.buffer)

    def discard_snapshot(self) -> None:
        """Make the next pull copy again: the values were replaced without a new version."""
        self._snapshot = None
