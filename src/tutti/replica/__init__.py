"""The user's model and optimiser, as buckets of gradients that strategies exchange.

- `replica`: what strategies see of a replica. `hooks`, `backward`: a replica that trains, and its backward passes.
- `buckets`: gradients that travel together. `factors`: gradients as matrix products, caught before they are made.
- `gradient_marks`: whether gradients were changed after backward. `loss_scaling`: `GradScaler` on several ranks.
- `samples`: how many samples each rank contributed. `batchnorm`: batch normalisation over all ranks.
- `state`, `gathered`: equal starting states, and states gathered from all ranks to be saved.
- `owned_hooks`: hooks that a copy of a model does not take along.
- `weak_registry`: objects that hooks of the whole process serve.
- `comparison_schedule`: after which steps ranks compare what they hold.
"""

from tutti.replica.buckets import Bucket
from tutti.replica.factors import FactoredLayer
from tutti.replica.hooks import HookedReplica
from tutti.replica.replica import Replica
from tutti.replica.samples import SampleCounts

__all__ = ["Bucket", "FactoredLayer", "HookedReplica", "Replica", "SampleCounts"]
