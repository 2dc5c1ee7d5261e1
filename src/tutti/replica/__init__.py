"""The user's model and optimiser, seen as buckets."""

from tutti.replica.buckets import Bucket
from tutti.replica.factors import FactoredLayer
from tutti.replica.hooks import HookedReplica
from tutti.replica.replica import Replica
from tutti.replica.samples import SampleCounts

__all__ = ["Bucket", "FactoredLayer", "HookedReplica", "Replica", "SampleCounts"]
