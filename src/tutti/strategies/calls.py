"""Collective calls of a job, numbered, and the error for ranks that are in different ones."""

from collections.abc import Sequence

from tutti.collectives.mean import FIRST_CALL
from tutti.errors import ConfigError
from tutti.transports import Transport

CONSENSUS, FINISH = 0, 1

_NAMES = ("job.consensus()", "job.finish()")


def different_calls_error(weights: Sequence[float], transport: Transport, steps: int) -> ConfigError:
    """Return the error that says where each rank is: in a call, or in a backward pass, which has another weight."""
    # A rank in a call gives `FIRST_CALL` minus the call's number in place of its weight (see `collectives.mean`).
    calls = {_NAMES[int(FIRST_CALL - weight)] for weight in weights if weight <= FIRST_CALL}
    where = [
        f"rank {other} is in {_NAMES[int(FIRST_CALL - weight)]} after step {steps}"
        if weight <= FIRST_CALL
        else f"rank {other} began the backward pass of step {steps + 1}"
        for other, weight in zip(transport.world_ranks, weights, strict=True)
    ]
    return ConfigError(
        f"rank {transport.world_rank}: {', '.join(where)}. Every rank must enter {' and '.join(sorted(calls))} after "
        "the same step; tutti.shard gives all ranks the same number of batches."
    )
