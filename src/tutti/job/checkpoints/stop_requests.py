"""Requests to stop that all ranks of a world follow together."""

from tutti.job.checkpoints.signals import requested
from tutti.world import World


def stop_requested(world: World) -> int:
    """Return the number of the signal that asks all ranks to stop; 0 if none does.

    A rank of an elastic world may be asked alone. It leaves between two batches then (`tutti.job.elastic`), and the
    others go on. Only when all leave is it a request to all.
    """
    elastic = world.elastic
    if elastic is not None and elastic.data and not elastic.member.all_leave:
        return 0
    return requested() if elastic is None else elastic.requested()
