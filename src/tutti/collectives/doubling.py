"""Recursive-doubling all-reduce: the fewest rounds, each of the whole tensor (Thakur, Rabenseifner & Gropp 2005).

In round k each rank exchanges everything with the partner whose number differs in bit k. With 4 ranks, `01` being the
sum over ranks 0 and 1:

```
            rank 0     rank 1     rank 2     rank 3
start       0          1          2          3
round 1     01         01         23         23          0 ↔ 1, 2 ↔ 3
round 2     0123       0123       0123       0123        0 ↔ 2, 1 ↔ 3
```

A number of ranks that is no power of two is folded first (`PowerOfTwoFold`). It is the best algorithm for short
tensors, where latency is all that counts.
"""

import math

from torch import Tensor

from tutti.cluster import Link
from tutti.collectives.steps import PowerOfTwoFold, buffer_like, exchange
from tutti.transports.base import Operation, Transport


def recursive_doubling(flat: Tensor, transport: Transport) -> Operation:
    """Sum `flat` over ranks, in place: exchange with a partner at distance 1, 2, 4, ...

    Both partners add the same two numbers, and a + b has the bits of b + a. So both have the same bits after every
    round, and all ranks have them at the end.
    """
    fold = PowerOfTwoFold(transport)
    yield from fold.fold(flat, transport)
    if not fold.outer:
        # One buffer serves all rounds: it is added before the next receive is posted.
        received = buffer_like(flat)
        distance = 1
        while distance < fold.num_inner:
            yield from exchange(flat, received, transport.rank ^ distance, transport)
            flat += received
            distance *= 2
    yield from fold.unfold(flat, transport)


def recursive_doubling_cost(num_ranks: int, num_bytes: float, link: Link) -> float:
    """⌊log₂ P⌋ (α + n β) seconds, one exchange of all n bytes per round.

    If P is not a power of two, folding and unfolding add 2 (α + n β).
    """
    rounds = math.floor(math.log2(num_ranks))
    return (rounds + 2 * (num_ranks != 1 << rounds)) * link.seconds(num_bytes)
