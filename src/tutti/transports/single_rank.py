"""The transport of a world of one rank: it opens nothing and sends nothing."""

from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor

from tutti.errors import ConfigError
from tutti.transports.base import DEFAULT_TIMEOUT, CompletedWork, Operation, Transport, Work


class SingleRankTransport(Transport):
    """One rank without peers. Collectives return at once; messages are refused."""

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT, world_rank: int = 0) -> None:
        self.rank, self.size, self.timeout, self.bytes_sent = 0, 1, timeout, 0
        self.world_ranks = (world_rank,)
        self.hosts = ("here",)

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        raise ConfigError(f"rank {self.world_rank}: there is no rank {dst} to send to in a world of one.")

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        raise ConfigError(f"rank {self.world_rank}: there is no rank {src} to receive from in a world of one.")

    def all_reduce(self, tensor: Tensor) -> Work:
        """Leave `tensor` as it is: the sum over one rank."""
        return CompletedWork()

    def channel(self, name: str, ranks: Sequence[int] | None = None) -> "SingleRankTransport":
        return SingleRankTransport(self.timeout, self.world_rank)

    def start(self, operation: Operation) -> Work:
        # Run to the end here: there is no peer whose message could be waited for.
        for work in operation:
            work.wait()
        return CompletedWork()

    def spawn(self, operation: Operation, *, deadline: bool = True) -> Work:
        return self.start(operation)

    def close(self) -> None:
        return None
