"""The cost model's building blocks: a worker's measured step, where ranks are, and what messages and sums cost there.

Each strategy computes its own `CommunicationCost` from these (`Strategy.cost`); `tutti.plan` compares the results.
"""

from tutti.cost.bucket_loads import BucketLoad, bucket_loads, exposed_seconds
from tutti.cost.communication import CommunicationCost
from tutti.cost.encoding import coding_seconds, message_bytes
from tutti.cost.overhead import Overhead
from tutti.cost.placement import Placement
from tutti.cost.profile import Gradient, LayerProfile, Profile
from tutti.cost.sums import SumCost, all_reduce_cost, compressed_sum_cost

__all__ = [
    "BucketLoad",
    "CommunicationCost",
    "Gradient",
    "LayerProfile",
    "Overhead",
    "Placement",
    "Profile",
    "SumCost",
    "all_reduce_cost",
    "bucket_loads",
    "coding_seconds",
    "compressed_sum_cost",
    "exposed_seconds",
    "message_bytes",
]
