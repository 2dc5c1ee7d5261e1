"""Placement of ranks on hosts: this machine itself, or the network namespaces of a lab."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from tutti.cluster.hosts import LOOPBACK
from tutti.errors import ConfigError
from tutti.launch.lab import namespaces
from tutti.launch.supervisor_pipe import HOST


@dataclass(frozen=True)
class PlacementHost:
    """A host for workers: a network namespace, or this machine itself if it has none."""

    name: str | None = None
    namespace: str | None = None


@dataclass(frozen=True)
class ProcessPlacement:
    """Ranks on hosts, in blocks: the first `ranks_per_host` on the first host, and so on."""

    hosts: tuple[PlacementHost, ...]
    ranks_per_host: int
    store_host: PlacementHost = field(default_factory=PlacementHost)
    """The host of the store through which ranks meet."""
    address: str = LOOPBACK
    """Address of the store, as every host reaches it."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that workers on these hosts need."""

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ConfigError(f"workers must be 1 or more, got {self.num_workers}.")

    @property
    def num_workers(self) -> int:
        return len(self.hosts) * self.ranks_per_host

    def namespace(self, slot: int) -> str | None:
        """The network namespace of a slot's host; None on this machine itself."""
        return self._host_of(slot)[0].namespace

    def prefix(self, slot: int) -> list[str]:
        """What goes before a command to run it on the host of a slot."""
        namespace = self.namespace(slot)
        return [] if namespace is None else namespaces.prefix(namespace)

    def environment(self, slot: int, rank: int | None = None) -> dict[str, str]:
        """Environment variables that tell a worker which rank it is, under torchrun's names.

        Args:
            slot: its place. The first `num_workers` fill one host after the other; further ones are added in turn.
            rank: its number, if that is another one than the slot's.
        """
        host, local_rank = self._host_of(slot)
        name = host.name
        return {
            **self.variables,
            **({} if name is None else {HOST: name}),
            "RANK": str(slot if rank is None else rank),
            "WORLD_SIZE": str(self.num_workers),
            # Ranks fill one host after the other, as torchrun numbers them.
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "MASTER_ADDR": self.address,
        }

    def listen(self) -> socket.socket:
        """A listening socket for the store through which workers meet, on `address` only."""
        if self.store_host.namespace is None:
            return _listener(self.address)
        return namespaces.inside(self.store_host.namespace, lambda: _listener(self.address))

    def _host_of(self, slot: int) -> tuple[PlacementHost, int]:
        """Return the host of a slot, and the slot's number there."""
        if slot < self.num_workers:
            return self.hosts[slot // self.ranks_per_host], slot % self.ranks_per_host
        turn, host = divmod(slot - self.num_workers, len(self.hosts))
        return self.hosts[host], self.ranks_per_host + turn


def here(workers: int) -> ProcessPlacement:
    """All ranks on this machine."""
    return ProcessPlacement((PlacementHost(),), workers)


def _listener(address: str) -> socket.socket:
    """Listen on a free port of the address, in the network namespace of the calling thread."""
    listener = socket.socket()
    listener.bind((address, 0))
    listener.listen(4096)
    return listener
