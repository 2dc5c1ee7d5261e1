"""`distribute`: attach a strategy to a model and its optimiser, on every rank."""

from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tutti.collectives import LinkMeasurement, measure_links
from tutti.errors import ConfigError, RankLost
from tutti.job.attach import watch_training
from tutti.job.checkpoints import signals
from tutti.job.compatibility import support
from tutti.job.elastic.joining import begin_anew, elastic_mistakes, join, survive_losses
from tutti.job.handle import JOB_ATTRIBUTE, Job, restore_world
from tutti.parallel import Mesh
from tutti.parallel.branch import Branches
from tutti.parallel.model_on_mesh import ModelOnMesh, mesh_mistakes
from tutti.replica import HookedReplica
from tutti.replica.batchnorm import synced
from tutti.replica.state import check_alike, take_from_rank_0
from tutti.simulation.compute_clock import ComputeClock
from tutti.strategies import AllReduce, Exchange, Strategy, as_strategy
from tutti.strategies.compatibility import COMMON, refusals
from tutti.transports import Transport, for_devices
from tutti.world import World, current_world, set_world
from tutti.world import world as initialised_world


def distribute(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy | str | None = None,
    *,
    world: World | None = None,
    mesh: Mesh | None = None,
    example: Any = None,
) -> Job:
    """Synchronise `model` with the same model on every other rank. Collective.

    The training loop stays as it was: after `loss.backward()` each `p.grad` is the mean over all
    ranks, weighted by the samples each contributed. Parameters, buffers and optimiser state start
    as rank 0's.

    Args:
        model: built the same on every rank; its device decides which transport its tensors use.
        optimizer: holds every trainable parameter of `model`.
        strategy: how replicas are synchronised: an object such as `tutti.BlockMomentum(every=16)`, or the text that
            names it at the command line, "bmuf:every=16"; `AllReduce()` by default, `tutti run --strategy` first.
        world: the ranks to train with; the world that `tutti.init` made by default.
        mesh: how ranks split the model too; `strategy` is then between those that have the same part of it, and the
            world afterwards is theirs: make `tutti.shard` after it.
        example: with a pipeline, one batch of what the model takes.

    On a rank that only serves (`ParameterServer(servers=...)`) this does not return: it serves until the others have
    finished, and ends the program there, or the function that `tutti.launch` runs. On the others, the world is then
    that of the ranks that train: make `tutti.shard` after it.
    """
    if not isinstance(mesh, Mesh | None):
        raise ConfigError(f"mesh must be a tutti.Mesh(data=..., tensor=..., pipe=...), got {mesh!r}.")
    world = world or initialised_world()
    # Mistakes are collected, not raised: every rank has to reach `check_alike`, which raises them on all ranks alike.
    strategy, mistakes = _chosen(strategy, world)
    mistakes += _mistakes(model, optimizer, strategy, mesh, world)
    mistakes += strategy.mistakes(optimizer, world.size if mesh is None else mesh.data)
    if world.elastic is not None and world.elastic.is_new:
        return join(model, optimizer, strategy, world, mistakes)
    if mesh is not None:
        mistakes += mesh_mistakes(model, optimizer, mesh, strategy, world.size, example)
    while True:
        try:
            # Another model may be distributed already, and ranks that train it may wait for this one.
            with world.waiting():
                # Ranks compare models, optimisers and strategies, and all of them raise if one has a mistake.
                described = f"{strategy!r}{'' if mesh is None else f' on {mesh}'}"
                check_alike(model, optimizer, described, mistakes, world.transport)
                # Before a mesh splits the model: until then all ranks have the same tensors.
                take_from_rank_0(model, optimizer, world.transport)
                return _split_and_start(model, optimizer, strategy, world, mesh, example)
        except RankLost:
            if world.elastic is None or getattr(model, JOB_ATTRIBUTE, None) is not None:
                raise
            begin_anew(world)


def _split_and_start(
    model: nn.Module, optimizer: Optimizer, strategy: Strategy, world: World, mesh: Mesh | None, example: Any
) -> Job:
    """Split the model by the mesh, if there is one, and attach the strategy. Collective."""
    # From here on `world` is that of the ranks that have the same part of the model.
    previous_world, model_on_mesh = world, None
    if mesh is not None:
        model_on_mesh = ModelOnMesh(model, optimizer, mesh, world.transport, example)
        world = _along_data(world, model_on_mesh)
    try:
        return _start(model, optimizer, strategy, world, previous_world, model_on_mesh)
    except BaseException:  # Whatever it is: the transports of the mesh must be closed.
        if model_on_mesh is not None:
            model_on_mesh.abandon()
            restore_world(world, previous_world)
        raise


def _start(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy,
    world: World,
    previous_world: World,
    model_on_mesh: ModelOnMesh | None,
) -> Job:
    """Attach the strategy to the model between the ranks of `world`. Collective.

    `previous_world` is the world of all ranks, which `Job` restores at its end.
    """
    replica = HookedReplica(
        model if model_on_mesh is None else model_on_mesh.local_module, optimizer, world.sample_counts
    )
    replica.activity = world.transport.activity
    world.usage.num_jobs += 1
    # The device decides: tensors on a GPU cannot lie in shared memory.
    transport = for_devices(world.transport, replica.device_types)
    channel = transport.channel("job")
    # Dedicated servers are the last ranks, so that workers have the ranks 0 to N - 1.
    if world.rank >= world.size - strategy.num_dedicated_servers:
        _serve(strategy, replica, channel, world)
        channel.close()
        # The script has nothing to do here: it ends as if it had come to its end, which launchers take for success.
        raise SystemExit(0)
    trains = _without_servers(world, strategy.num_dedicated_servers)
    # On a mesh `ModelOnMesh` counts operators instead: ranks compute different parts of the model.
    compute_clock = ComputeClock(channel) if channel.cluster is not None and model_on_mesh is None else None
    if compute_clock is not None:
        # Before `attach`: hooks run in the order of registration, and time must pass before a gradient is handed over.
        compute_clock.listen(model, optimizer)
        replica.compute_clock = compute_clock
    exchange = _attach(replica, channel, strategy, trains)
    job = Job(replica, exchange, strategy, trains, previous_world, model_on_mesh)
    # A second `distribute` finds it there, and refuses.
    setattr(model, JOB_ATTRIBUTE, job)
    world.sample_counts.distributed.add(model)
    for module in model.modules():
        if isinstance(module, Branches):  # Its backward refuses to run undistributed: gradients would be partial.
            module.distributed = True
    world.tolerate_loss(exchange.tolerates_loss or world.elastic is not None)
    if world.elastic is not None:
        survive_losses(job)
    return job


def _attach(replica: HookedReplica, channel: Transport, strategy: Strategy, world: World) -> Exchange:
    """Attach the strategy, and check what the user does from now on. Collective; not done at all if a rank is lost."""
    exchange: Exchange | None = None
    replica.survives = world.elastic is not None  # Strategies may prepare for a loss.
    try:
        exchange = strategy.attach(replica, channel)
        if world.elastic is not None and exchange.elastic_mistake:
            raise ConfigError(exchange.elastic_mistake)  # On all ranks alike.
        watch_training(replica, exchange, strategy, world)
        return exchange
    except RankLost:  # Those that are left may attach it again.
        if exchange is not None:
            exchange.close()
        replica.detach()
        raise


def _serve(strategy: Strategy, replica: HookedReplica, channel: Transport, world: World) -> None:
    """Serve until all workers have finished."""
    if channel.cluster is not None:  # A simulation, whose ranks are threads.
        strategy.serve(replica, channel)
        return
    # Schedulers ask all ranks to stop: workers need their servers until the last checkpoint is taken.
    signals.watch(replica, world.checkpoints.grace_s)
    try:
        strategy.serve(replica, channel)
    finally:
        signals.unwatch(replica)


def _without_servers(world: World, num_servers: int) -> World:
    """Return the world without the dedicated servers, which are its last ranks. Collective among the others."""
    if not num_servers:
        return world
    size = world.size - num_servers
    # Closing the workers' world closes that of all ranks too.
    trains = replace(world, size=size, transport=world.transport.channel("workers", range(size)), leave=world.close)
    world.sample_counts.num_training_ranks = size
    if world is current_world():
        set_world(trains)
    return trains


def _along_data(world: World, model_on_mesh: ModelOnMesh) -> World:
    """Return the world of the ranks along the `data` axis, which have the same part of the model."""
    row = model_on_mesh.data_transport
    along = replace(world, rank=row.rank, size=row.size, transport=row, leave=world.close)
    if world is current_world():
        set_world(along)
    return along


def sync_batchnorm(model: nn.Module, *, world: World | None = None) -> nn.Module:
    """Make every BatchNorm layer of `model` normalise over all ranks' samples together; returns the model.

    Call it before `distribute`. The result is what one machine with the whole batch would compute,
    also where ranks have different numbers of samples. Collective.
    """
    world = world or initialised_world()
    return synced(model, world.transport, world.sample_counts)


def measure_link(*, world: World | None = None) -> LinkMeasurement:
    """Measure latency and rate between the ranks by messages to and fro. Collective; takes a few seconds.

    Returns the same on every rank: a fit for every pair, `.link` for the slowest pair, and how well they fit.
    """
    return measure_links((world or initialised_world()).transport)


def _chosen(strategy: Strategy | str | None, world: World) -> tuple[Strategy, list[str]]:
    """Return the strategy to use, and what is wrong with the one that was given.

    A bad text is not raised here: every rank has to come to `check_alike`, or the others would wait for this one.
    """
    if world.strategy is not None:
        return world.strategy, []
    try:
        return AllReduce() if strategy is None else as_strategy(strategy), []
    except ConfigError as error:
        return AllReduce(), [str(error)]


def _mistakes(model: nn.Module, optimizer: Optimizer, strategy: Strategy, mesh: Mesh | None, world: World) -> list[str]:
    """Return everything that is wrong with what `distribute` was given."""
    mistakes = refusals(lambda technique: support(technique, strategy, mesh), model, optimizer)
    if world.elastic is not None:
        mistakes += elastic_mistakes(model, strategy, mesh, world)
    elif world.transport.cluster is None and strategy.mistake_in_fixed_world:
        mistakes.append(strategy.mistake_in_fixed_world)
    if world.size > 1 and world.transport.cluster is None and any(p.is_meta for p in model.parameters()):
        mistakes.append("the model is on the meta device, without values: build it on a real one, or simulate it.")
    if world.transport.cluster is not None and any(p.is_cuda for p in model.parameters()):
        mistakes.append("a simulated rank cannot train on a GPU, whose backward passes share one thread: use the CPU.")
    if getattr(model, JOB_ATTRIBUTE, None) is not None:
        mistakes.append("this model is distributed already; call finish() on its job before distributing it again.")
    if any(isinstance(module, Branches) for module in model.modules()) and not strategy.averages_gradients:
        mistakes.append(
            f"a model with Branches needs the gradients of all ranks in every step, which {strategy} does not give it: "
            "use tutti.AllReduce(...) or tutti.Poseidon()."
        )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        mistakes.append("the model has no trainable parameter: nothing to distribute.")
    # By identity, because `==` on tensors compares values.
    in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if missing := [name for name, p in trained.items() if id(p) not in in_optimizer]:
        mistakes.append(
            f"the optimiser does not hold {_some(missing)}. {COMMON['several optimisers'].text} Or set "
            "requires_grad=False on those that should not change."
        )
    return mistakes


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
