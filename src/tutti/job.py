"""`distribute`: the one line that makes a training script a distributed one."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.collectives import LinkMeasurement, measure_links
from tutti.errors import ConfigError, NonFiniteLoss
from tutti.events import EXCHANGE, PULL, EventLog
from tutti.parallel import Mesh
from tutti.parallel.arrangement import Arrangement, mistakes_on_mesh
from tutti.parallel.branch import Branches
from tutti.parallel.pipeline.step import Loss, PipelineStep
from tutti.replica import HookedReplica
from tutti.replica.batchnorm import synced
from tutti.replica.state import check_alike, take_from_rank_0
from tutti.simulation.compute_clock import ComputeClock
from tutti.strategies import AllReduce, Exchange, Strategy, as_strategy
from tutti.transports import for_devices
from tutti.world import World, set_world
from tutti.world import current_world as current_world_if_any
from tutti.world import world as current_world

_MARK = "_tutti_job"


@dataclass(frozen=True)
class Metrics:
    """How a job is going, on this rank."""

    steps: int
    exchanges: int
    bytes_sent: int
    seconds: float
    waiting_s: float
    strategy: dict[str, Any] = field(default_factory=dict)
    """What the strategy itself reports, by name. Each has only what applies to it:

    - "staleness" (parameter servers, peer updates): counts of this rank's updates, by the age in steps of the
      parameters they were computed from;
    - "version" (parameter servers): the steps the servers had taken when this rank last read;
    - "blocks" (averaging): the blocks that have ended;
    - "spectral_gap" (gossip): how fast replicas converge to their mean by mixing, from 0 to 1;
    - "skipped" (`AllReduce(skip_converged=...)`): the share of gradient elements that was not exchanged;
    - "planned" (`Auto`): the strategy at work, its predicted and its measured step.
    """

    @property
    def waiting_share(self) -> float:
        """The part of the time spent waiting for other ranks."""
        return self.waiting_s / self.seconds if self.seconds else 0.0


class Job:
    """The user's handle on a distributed model. Use as a context manager, or call `finish`."""

    def __init__(
        self,
        replica: HookedReplica,
        exchange: Exchange,
        strategy: Strategy,
        world: World,
        compute_clock: ComputeClock | None = None,
        arrangement: Arrangement | None = None,
    ) -> None:
        self.strategy = strategy
        self.world = world
        """The ranks that train: all of them, but for servers; on a mesh, those along `data`."""
        self._compute_clock = compute_clock
        self._arrangement = arrangement
        self._model = replica.model if arrangement is None else arrangement.model
        self._replica = replica
        self._exchange = exchange
        self._started_s = exchange.transport.now()
        self._finished = self._was_leader = False
        self._before = world
        """What `tutti.world()` was, to be so again."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, backward keeps gradients to this rank; the next one outside exchanges their sum."""
        return self._replica.no_sync()

    def contributed(self, num_samples: float) -> None:
        """Say how much this rank's next exchange weighs, where rows of a batch are not the measure (tokens, say).

        Call it before `backward`; in accumulation, once per backward.
        """
        if not 0 <= num_samples < float("inf"):
            raise ConfigError(f"contributed needs 0 or more, got {num_samples}.")
        self._replica.contribution.say(num_samples)

    def watch(self, loss: Tensor) -> None:
        """Stop every rank, in this step's backward, if `loss` is not finite on this one."""
        if not loss.is_meta and not torch.isfinite(loss.detach()).all():
            if self._exchange.transport.size == 1:
                raise NonFiniteLoss(0, [0], self._replica.steps)
            self._replica.contribution.say(float("nan"))

    def pipeline(self, loss: Loss) -> PipelineStep:
        """What replaces the forward and backward lines on a mesh: `value = pipeline(x, y)`. Collective.

        A batch goes through the stages in microbatches; `loss(output, y)` is a mean over samples.
        """
        if self._arrangement is None:
            raise ConfigError("job.pipeline needs a mesh: tutti.distribute(..., mesh=tutti.Mesh(pipe=2), example=x).")
        return self._arrangement.pipeline(loss, self._replica)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale gradients so that the norm of all of them is at most `max_norm`; returns what it was.

        As `torch.nn.utils.clip_grad_norm_`, which on a mesh would see this rank's part of the model only. Collective.
        """
        if self._arrangement is not None:
            return self._arrangement.clip_grad_norm(max_norm)
        return float(nn.utils.clip_grad_norm_(self._model.parameters(), max_norm))

    @contextmanager
    def consensus(self, *, optimizer: bool = True) -> Iterator[nn.Module]:
        """Within it, the model holds the parameters and buffers all ranks agree on, to evaluate or save. Collective.

        On a mesh it is whole then, and so is the optimiser's memory, unless `optimizer` is False: to evaluate, say.
        """
        self._refuse_agreeing("a second job.consensus()")
        self._exchange.consensus()
        self._replica.agreeing = True
        try:
            with nullcontext() if self._arrangement is None else self._arrangement.whole(optimizer):
                yield self._model
        finally:
            self._replica.agreeing = False
            self._exchange.restore_local()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Within it this rank takes no part and the others do not wait for it: to evaluate, say.

        Afterwards it goes on from what the others have. For parameter servers, peers' updates and gossip only.
        """
        self._exchange.leave()
        self._replica.away = True
        try:
            yield
        finally:
            self._replica.away = False
            self._exchange.join()

    @property
    def metrics(self) -> Metrics:
        totals = self._exchange.events.totals
        total = totals[EXCHANGE]
        return Metrics(
            steps=self._replica.steps,
            exchanges=total.count,
            bytes_sent=total.num_bytes,
            seconds=self._exchange.transport.now() - self._started_s,
            waiting_s=total.seconds + totals[PULL].seconds,
            strategy=self._exchange.metrics(),
        )

    @property
    def steps(self) -> int:
        """How many this rank has taken."""
        return self._replica.steps

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first of those that are left: the one to report, save or evaluate."""
        first = self._arrangement is None or self._arrangement.first
        return self._was_leader if self._finished else first and self._exchange.is_leader

    @property
    def events(self) -> EventLog:
        return self._exchange.events

    def state_dict(self) -> dict[str, Any]:
        """What must be saved beside the model's and the optimiser's own state to go on exactly, alike on every rank.

        Collective: every rank calls it, and one may save it for all.
        """
        own = self._exchange.state_dict()
        return {
            "strategy": str(self.strategy),
            "steps": self._replica.steps,
            "exchange": own if self._arrangement is None else self._arrangement.gathered(own),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if missing := {"strategy", "steps", "exchange"} - state.keys():
            raise ConfigError(
                f"this is no state of a job: it has no {', '.join(sorted(missing))}. "
                "Give what job.state_dict() returned."
            )
        if not self.strategy.can_resume_from(state["strategy"]):
            raise ConfigError(
                f"this state was saved under strategy '{state['strategy']}' and cannot be used under "
                f"'{self.strategy}'. Load the model and the optimiser alone, before distribute, or use that strategy."
            )
        self._replica.steps = state["steps"]
        own = state["exchange"]
        if self._arrangement is not None:
            own = self._arrangement.own(own)
        elif not any(own.get("parts", [own])):
            own = {}
        elif "parts" in own:
            raise ConfigError(
                f"this state was saved of {own['of']}, and this model is not split. Use the same mesh, or load "
                "the model and the optimiser alone, before distribute."
            )
        self._exchange.load_state_dict(own)

    def finish(self) -> None:
        """Complete what is under way, agree on the model and let it go. Collective. Idempotent."""
        if not self._finished:
            self._refuse_agreeing("job.finish()")
            self._was_leader = self.is_leader
            self._finished = True
            try:
                self._exchange.finish()
                if self._arrangement is not None:
                    self._arrangement.close()
                self.world.tolerate_loss(False)
            finally:
                self._let_go()

    def _refuse_agreeing(self, what: str) -> None:
        if self._replica.agreeing:
            raise ConfigError(f"{what} inside job.consensus(): end that first.")

    def _let_go(self) -> None:
        self._finished = True
        self._exchange.close()
        self._replica.detach()
        if self._compute_clock is not None:
            self._compute_clock.detach()
        self._exchange.transport.close()
        if self._arrangement is not None:
            self._arrangement.abandon()
            _world_again(self.world, self._before)
        delattr(self._model, _MARK)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # A copy of a distributed model, for an average of weights say, is not distributed.

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        elif not self._finished:
            self._let_go()  # Not collective: the other ranks may not be coming.


def distribute(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy | str | None = None,
    *,
    world: World | None = None,
    mesh: Mesh | None = None,
    example: Any = None,
) -> Job:
    """Keep `model` in step with the same model on every other rank. Collective.

    The training loop stays as it was: after `loss.backward()` each `p.grad` is the mean over all
    ranks, weighted by the samples each contributed. Parameters, buffers and optimiser state start
    as rank 0's.

    Args:
        model: built the same on every rank; its device decides how tensors travel.
        optimizer: holds every trainable parameter of `model`.
        strategy: how replicas are synchronised: an object such as `tutti.BlockMomentum(every=16)`, or the text that
            names it at the command line, "bmuf:every=16"; `AllReduce()` by default, `tutti run --strategy` first.
        world: where to run; the one `tutti.init` made by default.
        mesh: how ranks split the model too; `strategy` is then between those that have the same part of it, and the
            world afterwards is theirs: make `tutti.data.shard` after it.
        example: with a pipeline, one batch of what the model takes.

    On a rank that only serves (`ParameterServer(servers=...)`) this does not return: it serves until the others have
    finished, and ends the program there, or the function that `tutti.launch` runs. On the others, the world is then
    that of the ranks that train: make `tutti.data.shard` after it.
    """
    if not isinstance(mesh, Mesh | None):
        raise ConfigError(f"mesh must be a tutti.Mesh(data=..., tensor=..., pipe=...), got {mesh!r}.")
    world = world or current_world()
    strategy, mistakes = _chosen(strategy, world)
    mistakes += _mistakes(model, optimizer, strategy)
    if world.transport.cluster is not None and any(p.is_cuda for p in model.parameters()):
        mistakes.append("a simulated rank cannot train on a GPU, whose backward passes share one thread: use the CPU.")
    mistakes += strategy.mistakes(optimizer, world.size if mesh is None else mesh.data)
    if mesh is not None:
        mistakes += mistakes_on_mesh(model, optimizer, mesh, strategy, world.size, example)
    check_alike(model, optimizer, f"{strategy!r}{'' if mesh is None else f' on {mesh}'}", mistakes, world.transport)
    take_from_rank_0(model, optimizer, world.transport)
    before, arrangement = world, None
    if mesh is not None:
        arrangement = Arrangement(model, optimizer, mesh, world.transport, example)
        world = _along_data(world, arrangement)
    try:
        return _started(model, optimizer, strategy, world, before, arrangement)
    except BaseException:
        if arrangement is not None:
            arrangement.abandon()
            _world_again(world, before)
        raise


def _started(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy,
    world: World,
    before: World,
    arrangement: Arrangement | None,
) -> Job:
    """Start exchanging between the ranks of `world`; `before` is what it was. Collective."""
    replica = HookedReplica(model if arrangement is None else arrangement.part, optimizer, world.sample_counts)
    transport = for_devices(world.transport, replica.device_types)
    channel = transport.channel("job")
    if world.rank >= world.size - strategy.num_dedicated_servers:
        strategy.serve(replica, channel)
        channel.close()
        raise SystemExit(0)
    trains = _without(world, strategy.num_dedicated_servers)
    compute_clock = ComputeClock(channel) if channel.cluster is not None and arrangement is None else None
    if compute_clock is not None:
        compute_clock.listen(model, optimizer)
        replica.compute_clock = compute_clock
    exchange = strategy.attach(replica, channel)
    job = Job(replica, exchange, strategy, trains, compute_clock, arrangement)
    job._before = before
    setattr(model, _MARK, job)
    for module in model.modules():
        if isinstance(module, Branches):
            module.distributed = True
    world.tolerate_loss(exchange.tolerates_loss)
    return job


def _without(world: World, num_servers: int) -> World:
    """The world of those who train, which is everybody's but for servers, the last ranks. Collective among them."""
    if not num_servers:
        return world
    size = world.size - num_servers
    trains = replace(world, size=size, transport=world.transport.channel("workers", range(size)), leave=world.close)
    world.sample_counts.num_training_ranks = size
    if world is current_world_if_any():
        set_world(trains)
    return trains


def _along_data(world: World, arrangement: Arrangement) -> World:
    """The world of the ranks that have the same part of the model."""
    row = arrangement.data
    along = replace(world, rank=row.rank, size=row.size, transport=row, leave=world.close)
    if world is current_world_if_any():
        set_world(along)
    return along


def _world_again(now: World, before: World) -> None:
    """Have `tutti.world()` be what it was before a mesh."""
    if now is current_world_if_any():
        set_world(before)


def sync_batchnorm(model: nn.Module, *, world: World | None = None) -> nn.Module:
    """Make every BatchNorm layer of `model` normalise over all ranks' samples together; returns the model.

    Call it before `distribute`. The result is what one machine with the whole batch would compute,
    also where ranks have different numbers of samples. Collective.
    """
    world = world or current_world()
    return synced(model, world.transport, world.sample_counts)


def measure_link(*, world: World | None = None) -> LinkMeasurement:
    """Latency and rate between the ranks, by messages to and fro. Collective; takes a second or a few.

    Returns what all ranks agree on: a fit for every pair, `.link` for the slowest, and how well they fit.
    """
    return measure_links((world or current_world()).transport)


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


def _mistakes(model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> list[str]:
    mistakes = []
    if getattr(model, _MARK, None) is not None:
        mistakes.append("this model is distributed already; call finish() on its job before distributing it again.")
    if any(isinstance(module, Branches) for module in model.modules()) and not isinstance(strategy, AllReduce):
        mistakes.append(
            f"a model with Branches needs the gradients of all ranks in every step, which {strategy} does not give it: "
            "use tutti.AllReduce(...)."
        )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        mistakes.append("the model has no trainable parameter: nothing to distribute.")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if strays := [name for name, p in trained.items() if id(p) not in held]:
        mistakes.append(
            f"the optimiser does not hold {_some(strays)}. Give it all trainable parameters, or set "
            "requires_grad=False on those that should not change."
        )
    return mistakes


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
