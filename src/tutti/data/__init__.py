"""The data of a whole world of ranks, divided between them."""

from tutti.data.shard import shard

__all__ = ["shard"]
