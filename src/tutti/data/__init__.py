"""Data of a world of ranks: `shard` gives each rank its part."""

from tutti.data.shard import shard

__all__ = ["shard"]
