"""Ends of a worker before the end of the training: it was asked to stop, or too few others are left."""

from typing import TYPE_CHECKING, NoReturn

from tutti.coordination.elastic_member import Generation
from tutti.errors import TooFewWorkers
from tutti.world import Elasticity

if TYPE_CHECKING:
    from tutti.job.handle import Job


def leave(job: "Job", elastic: Elasticity, *, alone: bool) -> NoReturn:
    """End this process, which was asked to stop. If all ranks were, save the state first, which is collective."""
    elastic.connections.leave()
    if alone:
        job._release()
        raise SystemExit(0)
    job._checkpoints.save_last()  # Ends the process as well, if checkpoints are written.
    raise SystemExit(128 + elastic.requested())


def stop_for_too_few(job: "Job", elastic: Elasticity, generation: Generation) -> NoReturn:
    """Save the state, which is collective, and end: too few workers are left."""
    saved, minimum = None, elastic.member.limits.minimum
    try:
        if job._replica.in_consensus:  # A checkpoint has one of its own.
            job._replica.in_consensus = False
            job._exchange.restore_local()
        saved = job._checkpoints.save_last()
    finally:
        state = f"The state is saved in {saved}: start again to continue." if saved else "No checkpoint was saved."
        raise TooFewWorkers(
            f"rank {job.world.transport.world_rank}: {len(generation.members)} workers are left, and this run needs "
            f"{minimum}. {state}"
        )
