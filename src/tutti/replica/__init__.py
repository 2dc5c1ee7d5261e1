"""The user's model and optimiser, seen as buckets."""

from tutti.replica.buckets import Bucket
from tutti.replica.hooks import Replica
from tutti.replica.samples import Draws

__all__ = ["Bucket", "Draws", "Replica"]
