"""Data of a world of ranks: `shard` gives each rank its part."""

from tutti.data.global_batches import GlobalBatches
from tutti.data.loader import ShardedLoader
from tutti.data.shard import shard
from tutti.data.worker_start import keep_worker

__all__ = ["GlobalBatches", "ShardedLoader", "keep_worker", "shard"]
