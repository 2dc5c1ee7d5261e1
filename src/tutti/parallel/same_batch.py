"""Whether ranks that have one replica together are given the same batch."""

from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tutti.collectives import all_gather_json
from tutti.errors import ConfigError
from tutti.transports import Transport

MESH_REMEDY = "make tutti.data.shard after distribute, when the world is that of replicas, and seed what is random."


class SameBatchCheck:
    """Compares the first batch that ranks are given: whoever draws others does so from the start."""

    def __init__(self, transport: Transport, remedy: str = MESH_REMEDY) -> None:
        """Compare between the ranks of `transport`, which have one replica together."""
        self._remedy = remedy
        self._transport = transport
        self._compared = transport.size == 1

    def __call__(self, batch: Any) -> None:
        """Refuse, on all ranks, a batch that differs between them. Collective, the first time."""
        if self._compared:
            return
        mine = [self._transport.world_rank, *(_told(each) for each in tree_leaves(batch) if isinstance(each, Tensor))]
        everyone = all_gather_json(mine, self._transport)
        for other, *theirs in everyone:
            if theirs != everyone[0][1:]:
                raise ConfigError(
                    f"rank {self._transport.world_rank}: ranks {everyone[0][0]} and {other} split one replica of the "
                    "model, and were given different batches. Both must draw the same samples from the same data: "
                    f"{self._remedy}"
                )
        self._compared = True


def _told(tensor: Tensor) -> list[Any]:
    """A tensor in few words."""
    kind = [str(tensor.dtype), list(tensor.shape)]
    if tensor.is_meta:
        return kind
    values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return [*kind, blake2b(values.numpy().data, digest_size=8).hexdigest()]
