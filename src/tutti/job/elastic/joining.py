"""A new worker comes to a job that has begun: it shows that it has the same model, and joins the others to train.

It joins where it is about to train, and not when its model is distributed: what a script prepares after that, such as
its loaders, is done while the others train (`ElasticJob.arrive`).
"""

import hashlib
import json
from contextlib import suppress
from math import inf
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tutti.errors import ConfigError, RankLost, ReplicaMismatch, TooFewWorkers
from tutti.job.elastic.regrouping import NOTHING, ElasticJob
from tutti.job.elastic.scalers import demand_scaler
from tutti.job.handle import JOB_ATTRIBUTE, Job
from tutti.parallel import Mesh
from tutti.parallel.branch import Branches
from tutti.replica import HookedReplica
from tutti.replica.batchnorm import SyncedBatchNorm
from tutti.replica.state import layout
from tutti.simulation.compute_clock import ComputeClock
from tutti.strategies import Exchange, Strategy
from tutti.world import World


def elastic_mistakes(model: nn.Module, strategy: Strategy, mesh: Mesh | None, world: World) -> list[str]:
    """Return why a job cannot go on with other workers than it began with; nothing if it can."""
    mistakes = []
    fixed = "Give a fixed number of workers, and checkpoints to continue from (job.checkpoint)."
    if mesh is not None and mesh.is_split:
        mistakes.append(f"a mesh that splits the model needs all of its workers. {fixed}")
    if strategy.num_dedicated_servers:
        mistakes.append(
            f"'{strategy}' has dedicated servers, whose loss cannot be survived. Leave servers= out: then the workers "
            f"serve. Or: {fixed[0].lower()}{fixed[1:]}"
        )
    if any(isinstance(module, Branches) for module in model.modules()):
        mistakes.append(f"the branches of a model are divided between its workers, and need all of them. {fixed}")
    assert world.elastic is not None
    if any(isinstance(module, SyncedBatchNorm) for module in model.modules()):
        mistakes.append(f"tutti.sync_batchnorm joins the workers that are there when it is called, for good. {fixed}")
    if world.elastic.regrouping is not None or world.elastic.member.has_departed:
        mistakes.append(f"one model can be distributed in a run whose workers come and go. {fixed}")
    return mistakes


def survive_losses(job: Job) -> ElasticJob:
    """Let a job go on when ranks are lost or come."""
    world, replica = job.world, job._replica
    elastic = world.elastic
    assert elastic is not None
    made = ElasticJob(job, world, elastic)
    elastic.regrouping = made
    replica.survives = True
    replica.on_void = made.void_step.begin
    job._exchange.on_exchange = made.on_exchange
    demand_scaler(job)
    job._checkpoints._watch()  # A rank that is asked to stop leaves, also where no checkpoints are written.
    # Who comes later compares it with its own. All ranks propose the same.
    own = _signature(job.model, replica.optimizer, job.strategy)
    elastic.member.member.propose(_signature_key(world), json.dumps(own))
    return made


def join(model: nn.Module, optimizer: Optimizer, strategy: Strategy, world: World, mistakes: list[str]) -> Job:
    """Make the job of a rank that comes to one which has begun, and joins it when it begins to train."""
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    elastic = world.elastic
    assert elastic is not None
    # Ended by the first rank that has distributed its model, or by the end of the job.
    found = elastic.member.member.values([_signature_key(world)], inf, elastic.member.check)
    assert found is not None
    _compare(json.loads(found[0]), _signature(model, optimizer, strategy), world)
    replica = HookedReplica(model, optimizer, world.sample_counts)
    world.usage.num_jobs += 1
    if world.transport.cluster is not None:
        # Before a strategy is attached: hooks run in the order of registration.
        replica.compute_clock = ComputeClock(world.transport)
        replica.compute_clock.listen(model, optimizer)
    # Of a rank alone, until it is among the others.
    exchange = NotJoined(replica, world.transport)
    replica.listen(exchange, to="steps")
    job = Job(replica, exchange, strategy, world, world)
    setattr(model, JOB_ATTRIBUTE, job)
    world.sample_counts.distributed.add(model)
    survive_losses(job)
    elastic.is_new, elastic.has_joined = False, True
    return job


def begin_anew(world: World) -> None:
    """Go on to the next generation after a loss, on a rank that has not distributed its model yet.

    Raises `RankLost` where other ranks have: they may be in a call already that this one does not know of. Another
    worker takes its place, and takes over their state.
    """
    elastic = world.elastic
    assert elastic is not None
    rank = world.transport.world_rank
    while True:
        world.transport.close()
        elastic.connections.disconnect()
        new = elastic.member.enter({**NOTHING, "undistributed": 1})
        assert new is not None
        if new.too_few:
            raise TooFewWorkers(
                f"rank {rank}: {len(new.members)} workers are left before the training, and this run needs "
                f"{elastic.member.limits.minimum}. Start it again."
            )
        if not all(each.info.get("undistributed") for each in new.members):
            raise RankLost(
                f"rank {rank}: a worker was lost in tutti.distribute, which some others have completed and this one "
                "has not. The others go on without it."
            )
        with suppress(RankLost):  # Another one.
            transport = elastic.connections.connect(new)
            world.renew(transport.rank, transport.size, transport)
            return


class NotJoined(Exchange):
    """That of a rank that has not joined the others yet. Its steps would be in nobody's model, so they are refused."""

    def before_step(self) -> None:
        raise ConfigError(
            f"rank {self.transport.world_rank}: this worker trains before it has joined the others. Workers change "
            "between batches, so train on those of what tutti.shard returned."
        )


def _signature_key(world: World) -> str:
    assert world.elastic is not None
    return f"{world.elastic.member.name}/job"


def _signature(model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> dict[str, Any]:
    """Return what must be the same on all workers of a job."""
    found = layout(model)
    digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()[:12]
    groups = [len(group["params"]) for group in optimizer.param_groups]
    return {
        "strategy": str(strategy),
        "model": f"{type(model).__name__} with {len(found)} tensors ({digest})",
        "optimiser": f"{type(optimizer).__name__} with groups of {groups} parameters",
    }


def _compare(theirs: dict[str, Any], ours: dict[str, Any], world: World) -> None:
    """Raise `ReplicaMismatch` if this worker has something else than those that it comes to."""
    for what, value in ours.items():
        if theirs[what] != value:
            raise ReplicaMismatch(
                f"rank {world.transport.world_rank}: this worker cannot join the job, whose {what} is {theirs[what]}, "
                f"and its own is {value}. Start it with the same script and options."
            )
