"""The data of a whole world of ranks, divided between them."""

from tutti.data.global_batches import GlobalBatches
from tutti.data.shard import shard

__all__ = ["GlobalBatches", "shard"]
