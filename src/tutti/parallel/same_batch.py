"""`SameBatchCheck`: a check that ranks that hold one replica together are given the same batch."""

from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tutti.collectives import all_gather_json
from tutti.errors import ConfigError
from tutti.transports import Transport

MESH_REMEDY = (
    "call tutti.shard after distribute, when the world has one rank per replica, and seed all random generators."
)
"""The advice for different batches on a mesh."""


class SameBatchCheck:
    """Compares the first batch between ranks: a data loader that differs does so from the start."""

    def __init__(self, transport: Transport, remedy: str = MESH_REMEDY) -> None:
        """Compare between the ranks of `transport`, which hold one replica together."""
        self._remedy = remedy
        self._transport = transport
        self._compared = transport.size == 1

    def __call__(self, batch: Any) -> None:
        """Refuse, on all ranks, a batch that differs between them. Collective on the first call; free afterwards."""
        if self._compared:
            return
        fingerprints = [fingerprint(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        # All ranks compare the same list, so that all of them raise, and none is left waiting in the forward pass.
        by_rank = all_gather_json([self._transport.world_rank, *fingerprints], self._transport)
        first_rank, *first_fingerprints = by_rank[0]
        for rank, *fingerprints in by_rank:
            if fingerprints != first_fingerprints:
                raise ConfigError(
                    f"rank {self._transport.world_rank}: ranks {first_rank} and {rank} split one replica of the "
                    "model, and were given different batches. Both must draw the same samples from the same data: "
                    f"{self._remedy}"
                )
        self._compared = True


def fingerprint(tensor: Tensor) -> list[Any]:
    """Return dtype, shape and a hash of the values; tensors without data have no hash."""
    kind = [str(tensor.dtype), list(tensor.shape)]
    if tensor.is_meta:
        return kind
    values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    # 8 bytes suffice: the hash guards against accidents, not against attacks.
    return [*kind, blake2b(values.numpy().data, digest_size=8).hexdigest()]
