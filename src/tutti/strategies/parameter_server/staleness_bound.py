"""`staleness_bound`: how stale the parameters may be that one worker reads for its next step."""

from tutti.replica import Replica
from tutti.strategies.parameter_server.consistency import Consistency


def staleness_bound(consistency: Consistency, replica: Replica) -> int | None:
    """Return the largest staleness of a read, in versions; None under a counting consistency.

    It is 0 while the training starts synchronously. Servers make the same versions under `BSP` and `SSP`, which differ
    only in the version that a worker waits for. So each worker applies the bound by itself, to what it asks for and to
    what it waits for, and workers need not agree on the step in which it changes. Nobody waits for ever: a version is
    due once all members have pushed for it, whatever they have read, and the slowest worker waits for no other.

    The bound never falls during training, so a pull that was asked for under an earlier bound is new enough.
    """
    bound = consistency.bound
    return 0 if bound and replica.starts_synchronously else bound
