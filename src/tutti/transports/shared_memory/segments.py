"""Memory that all ranks of one host map: anonymous files, handed from rank to rank.

How it works
------------
`map_all` gives every rank the same number of bytes. Each rank creates an anonymous file (memfd), gives it to all others
(`handover`), and maps what it gets. The files are closed then. The mappings keep the memory.

Such memory never has a name, so nothing is left behind, not even by SIGKILL; and its size is not bound by /dev/shm,
which containers often make small.

Lifetime: a tensor keeps its mapping, and this rank's mapping keeps the `Segment`, which keeps the peers' mappings. So a
segment lives as long as the tensor that was handed out, and `SharedSegments` holds it only weakly.
"""

import mmap
import os
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from tutti.errors import ReplicaMismatch
from tutti.transports.membership import Membership
from tutti.transports.shared_memory.handover import exchange_files


class SharedMapping(mmap.mmap):
    """One rank's memory, mapped here. A tensor made on it keeps it alive."""

    segment: "Segment"
    """Set on this rank's own mapping, to keep the whole segment alive."""


class Segment:
    """The same number of bytes from every rank, all mapped here."""

    def __init__(self, number: int, mappings: list[SharedMapping], rank: int) -> None:
        """Join the mappings of all ranks; `number` is the same on all of them."""
        self.number = number
        local = mappings[rank]
        local.segment = self  # A tensor on `local` keeps the peers' mappings alive by this.
        self.peers = [mapping for mapping in mappings if mapping is not local]
        # By way of torch: an mmap does not reveal its address.
        self.bases = np.array([torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() for mapping in mappings])
        """The address of each rank's memory in this process."""
        self.start = int(self.bases[rank])
        self.stop = self.start + len(local)


class SharedSegments:
    """Allocates shared tensors, and finds the segment that a tensor lies in. All allocations are collective."""

    def __init__(self, membership: Membership, name: str) -> None:
        """Hand over files under `name`."""
        self._membership, self._name = membership, name
        self._num_allocated = 0  # The same on every rank, as all of them allocate in the same order.
        self._segments: WeakSet[Segment] = WeakSet()

    def __len__(self) -> int:
        return len(self._segments)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a tensor of this rank, at the same position of a segment that all ranks map."""
        number, mappings = self._map(numel, dtype)
        rank = self._membership.rank
        self._segments.add(Segment(number, mappings, rank))
        return torch.frombuffer(mappings[rank], dtype=dtype)[:numel]

    def with_page(self, page_bytes: int, num_bytes: int) -> tuple[memoryview, Tensor]:
        """Allocate memory that all ranks map once, and bytes of this rank as `empty` does, in one exchange of files."""
        number, mappings = self._map(page_bytes + num_bytes, torch.uint8)
        own = mappings[self._membership.rank]
        self._segments.add(Segment(number, mappings, self._membership.rank))
        # All ranks use rank 0's page; the pages of the others are never touched.
        return memoryview(mappings[0])[:page_bytes], torch.frombuffer(own, dtype=torch.uint8)[page_bytes:]

    def shared_tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate one tensor of zeros that all ranks map."""
        # All ranks use rank 0's memory. The other mappings are dropped here, and their memory is freed.
        return torch.frombuffer(self._map(numel, dtype)[1][0], dtype=dtype)[:numel]

    def per_rank_tensors(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Allocate a tensor of each rank; every rank maps all of them."""
        return [torch.frombuffer(mapping, dtype=dtype)[:numel] for mapping in self._map(numel, dtype)[1]]

    def find(self, address: int) -> Segment | None:
        """The segment in whose part of this rank `address` lies."""
        # Linear, which is fast enough: reductions keep the result per tensor (`_ReductionPlan`).
        for segment in self._segments:
            if segment.start <= address < segment.stop:
                return segment
        return None

    def _map(self, numel: int, dtype: torch.dtype) -> tuple[int, list[SharedMapping]]:
        """Map `numel` elements of every rank; return the number of the allocation, and the mappings."""
        number = self._num_allocated
        # A mapping cannot be empty.
        mappings = map_all(self._membership, f"{self._name}/{number}", max(1, numel) * dtype.itemsize)
        self._num_allocated += 1
        return number, mappings


def map_all(membership: Membership, name: str, num_bytes: int) -> list[SharedMapping]:
    """Create `num_bytes` of memory on every rank and map that of all ranks here, by rank. Collective."""
    # Closed on exec, which is the default: a program that a rank starts must not keep this memory.
    own = os.memfd_create("tutti")
    files: list[int] = []
    try:
        os.ftruncate(own, num_bytes)
        files = exchange_files(membership, name, own)
        return [_map(membership, rank, file, num_bytes) for rank, file in enumerate(files)]
    finally:
        for file in (own, *files):
            os.close(file)


def _map(membership: Membership, rank: int, file: int, num_bytes: int) -> SharedMapping:
    """Map the memory of a rank. Refuses a file of another length."""
    # mmap would accept a longer file, and ranks would disagree about what lies where.
    if os.fstat(file).st_size != num_bytes:
        raise ReplicaMismatch(
            f"rank {membership.world_rank}: asked for {num_bytes} bytes of shared memory where rank "
            f"{membership.peers[rank].rank} asked for {os.fstat(file).st_size}: the ranks' models differ."
        )
    return SharedMapping(file, num_bytes)
