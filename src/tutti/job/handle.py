"""`Job`: the user's handle on a distributed model."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import isfinite
from typing import Any, Self

import torch
from torch import Tensor, nn

from tutti.errors import ConfigError, NonFiniteLoss, RankLost
from tutti.job.checkpoints.calls import Checkpoints, JobCheckpoints
from tutti.job.checks import LossKind, agree, follow
from tutti.job.membership import JobMembership, refuse_on_membership
from tutti.job.not_copied import NotCopied
from tutti.job.progress import JobProgress
from tutti.job.state import job_state, load_job_state
from tutti.job.synchronous_start import SynchronousStart
from tutti.job.values import CollectiveValues
from tutti.parallel.model_on_mesh import ModelOnMesh
from tutti.parallel.pipeline.step import Loss, PipelineStep
from tutti.parallel.saved_part import SavedPart
from tutti.replica import HookedReplica
from tutti.replica.hooks import explained
from tutti.strategies import Exchange, Strategy
from tutti.world import World, current_world, set_world

JOB_ATTRIBUTE = "_tutti_job"
"""The attribute of a distributed model that holds its job."""


class Job(CollectiveValues, JobCheckpoints, JobMembership, JobProgress, SynchronousStart, NotCopied):
    """The handle on a distributed model that `tutti.distribute` returns.

    Use it as a context manager, or call `finish` at the end. Methods marked "Collective" must be called by every rank.
    """

    def __init__(
        self,
        replica: HookedReplica,
        exchange: Exchange,
        strategy: Strategy,
        world: World,
        previous_world: World,
        model_on_mesh: ModelOnMesh | None = None,
    ) -> None:
        self.strategy = strategy
        self.world = world
        """The ranks that train: all but dedicated servers; on a mesh, those along the `data` axis."""
        self._model_on_mesh = model_on_mesh
        self._model = replica.model if model_on_mesh is None else model_on_mesh.model
        self._replica = replica
        self._exchange = exchange
        self._attached = strategy
        self._started_s = exchange.transport.now()
        self._finished = self._was_leader = False
        world.usage.exchanges.add(exchange)
        self._expected: dict[str, Any] = {}
        """What `expect` was given."""
        self._previous_world = previous_world
        """The world that `tutti.world()` returned before `distribute`; restored at the end."""
        # On a mesh the ranks of all rows save the model together.
        everyone = world if model_on_mesh is None else previous_world
        for each in (world, everyone):  # Opened by all ranks here, where they are together.
            calls = each.calls
            if each.elastic is None:  # Else the ranks change, and with them the memory that they share.
                calls.open()
        self._checkpoints = Checkpoints(self, everyone, replica, model_on_mesh)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward keeps gradients to this rank; the next one outside exchanges their sum."""
        return self._replica.no_sync()

    def contributed(self, num_samples: float) -> None:
        """Set the weight of this rank's next exchange, where rows of a batch are not the measure (tokens, for example).

        Call it before `backward`; in gradient accumulation, once per backward.
        """
        if not 0 <= num_samples < float("inf"):
            raise ConfigError(f"job.contributed needs a finite number of 0 or more, got {num_samples}.")
        self._replica.contribution.add(num_samples)

    def expect(self, *, loss: LossKind | None = None, same_batches: bool = False) -> None:
        """State what checks would otherwise question, before the first step. Collective.

        Args:
            loss: whether the loss is a "mean" or a "sum" over samples. Gradients of sums are added up over ranks.
            same_batches: True if ranks are given the same batches on purpose.
        """
        said = loss, same_batches
        self.world.collective(lambda: agree(self._replica, self.strategy, self.world, *said))
        follow(self._replica, self._exchange, self.world, *said)
        self._expected = {"loss": loss, "same_batches": same_batches}

    def watch(self, loss: Tensor) -> None:
        """Stop every rank, in this step's backward, if `loss` is not finite on this one."""
        # An error here alone would leave the others waiting, so it travels with this step's exchange.
        if not loss.is_meta and not _is_finite(loss.detach()):
            # Alone there is no exchange that could carry it.
            if self._exchange.transport.size == 1:
                rank = self._exchange.transport.world_rank
                raise NonFiniteLoss(rank, [rank], self._replica.steps)
            self._replica.contribution.add(float("nan"))  # A weight of NaN asks every rank to stop.

    def pipeline(self, loss: Loss) -> PipelineStep:
        """Return a step that replaces the forward and backward lines on a mesh: `value = pipeline(x, y)`. Collective.

        A batch goes through the stages in microbatches; `loss(output, y)` is a mean over samples.
        """
        if self._model_on_mesh is None:
            raise ConfigError("job.pipeline needs a mesh: tutti.distribute(..., mesh=tutti.Mesh(pipe=2), example=x).")
        return self._model_on_mesh.pipeline_step(loss, self._replica)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale gradients so that the norm of all of them is at most `max_norm`; return the norm before. Collective.

        As `torch.nn.utils.clip_grad_norm_`, which on a mesh would see this rank's part of the model only.
        """
        if self._model_on_mesh is not None:
            return self._model_on_mesh.clip_grad_norm(max_norm)
        return float(nn.utils.clip_grad_norm_(self._model.parameters(), max_norm))

    @contextmanager
    def consensus(self, *copies: nn.Module, optimizer: bool = True) -> Iterator[nn.Module]:
        """Hold the parameters and buffers that all ranks agree on in the model, to evaluate or save. Collective.

        `copies` are other modules that each rank keeps by itself, such as an average of the weights over steps: inside
        the context they hold their mean over ranks (`average`). On a mesh the model is whole inside the context; copies
        are not. The optimiser's state is there as well, where parameter servers have it or a mesh has split it; to
        evaluate, `optimizer=False` saves that transfer. Afterwards the rank's own values are restored.
        """
        split = self._model_on_mesh
        whole = nullcontext() if split is None else split.full_model(optimizer)
        with self._agreement(*copies, optimizer=optimizer), whole:
            yield self._model

    @contextmanager
    def _agreement(self, *copies: nn.Module, optimizer: bool) -> Iterator[None]:
        """As `consensus`, but on a mesh each rank holds its part of the model only. Collective."""
        # A second one would take the consensus for this rank's own values, and restore those at its end.
        _refuse_in_consensus(self._replica, "a second job.consensus()")
        with self.world.waiting(self._exchange):
            self.world.collective(lambda: self._exchange.consensus(optimizer))
        self._replica.in_consensus = True
        self._replica.activity.enter("evaluation")
        local: list[tuple[Tensor, Tensor]] = []
        try:
            self._confirm_losses()
            for copy in copies:
                local += self._average(copy)
            yield
        finally:
            # Also after an error inside: the rank must not train on from the consensus by accident.
            self._replica.in_consensus = False
            for tensor, values in local:
                tensor.copy_(values)
            self._exchange.restore_local()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Take no part in training inside this context, so that the others do not wait: to evaluate, for example.

        Afterwards this rank continues from the parameters that the others have. Parameter servers, peer updates and
        gossip allow it; other strategies refuse.
        """
        if not self._replica.starts_synchronously:
            self._attach_for_next_step()  # The others are about to, and wait for this rank.
        self._exchange.leave()  # Refuses if the strategy needs every rank; then nothing has changed.
        self._replica.away = True
        try:
            yield
        finally:
            self._replica.away = False
            self._exchange.join()

    def state_dict(self, *, everywhere: bool = True) -> dict[str, Any]:
        """Return what must be saved in addition to the states of model and optimiser to continue exactly. Collective.

        It is alike on every rank, so that any of them may save it. With `everywhere=False` it is complete on the leader
        alone, which saves the transfer to the others.
        """
        # Where ranks may be lost, none can count on what another one has alone.
        everywhere = everywhere or self.world.elastic is not None
        with self.world.waiting(self._exchange):
            state: dict[str, Any] = self.world.collective(lambda: self._own_state(everywhere), same_answer=True)
            if self._model_on_mesh is not None:
                state["exchange"] = self._model_on_mesh.gather_state(state["exchange"])
            return state

    def _own_state(self, everywhere: bool) -> dict[str, Any]:
        return job_state(
            self.strategy, self._replica, self._exchange, self.world.calls, self._model_on_mesh, everywhere
        )

    @contextmanager
    def _saved_part(self, *copies: nn.Module) -> Iterator[SavedPart | None]:
        """Hold what all ranks agree on, and yield what this rank saves of it; None if others save it. Collective.

        For `Checkpoints`. Where a mesh splits the model, no rank has the whole of it here.
        """
        with self.world.waiting(self._exchange):
            state = self.world.collective(lambda: self._own_state(everywhere=False))
        split = self._model_on_mesh
        if split is None or not split.mesh.is_split:
            with self.consensus(*copies) as model:
                optimizer = self._replica.optimizer
                saves = self.is_leader and state is not None  # None: who was to save it was lost with what it had.
                yield SavedPart(model.state_dict(), optimizer.state_dict(), state) if saves else None
        else:
            with self._agreement(*copies, optimizer=True):
                saves = self._exchange.is_leader  # Of the ranks that hold the same part, the first that is left.
                yield split.saved_part(self._replica.optimizer, state) if saves else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned; every rank loads it, before its first step. Collective.

        It may be of another strategy, number of ranks or mesh. What has a meaning here is converted; a warning says
        what is dropped, and what that means. Raises `ConfigError` for the state of another model.
        """
        self._attach_for_step_after(state.get("steps", self._replica.steps))
        with self.world.waiting(self._exchange):
            load_job_state(state, self.strategy, self._replica, self._exchange, self._model_on_mesh)

    def finish(self) -> None:
        """Complete exchanges, leave the agreed parameters in the model, and release it. Collective. Idempotent."""
        if not self._finished:
            _refuse_in_consensus(self._replica, "job.finish()")
            refuse_on_membership(self.world)
            if self.world.elastic is None:
                self._attach_for_next_step()  # Others may go on behind a synchronous start, and wait for this rank.
            self._was_leader = self.is_leader  # Asked while peers are still known.
            self._finished = True
            if self.world.elastic is not None and self.world.elastic.regrouping is not None:
                self.world.elastic.regrouping.arrived()
            try:
                with self.world.waiting(self._exchange):
                    self.world.collective(self._finish_exchange)
                if self._exchange.tolerates_loss:
                    self.world.confirm()  # Cut off, it would finish alone, and that model is not the job's.
                try:
                    self._checkpoints.close()
                finally:  # Also if a checkpoint could not be written: the other ranks wait for this one's part.
                    if self._model_on_mesh is not None:
                        self._model_on_mesh.close()
                if self.world.elastic is not None:
                    # One that has never joined the others says nothing about the end of the training.
                    member = self.world.elastic.member
                    member.depart(finished=member.generation is not None)
                else:
                    self.world.tolerate_loss(False)  # From here on a crash of this process is a failure again.
            finally:
                self._release()

    def _finish_exchange(self) -> None:
        try:
            self._exchange.finish()
        except RankLost as error:
            if self._replica.survives:
                raise
            raise explained(error, self._replica) from None
        if self._replica.checks is not None:
            self._replica.checks.finished()

    def _release(self) -> None:
        """Detach the model and close the job's transport. Not collective: it also ends a job that failed."""
        self._finished = True
        if self.world.elastic is not None:
            self.world.elastic.regrouping = None
        self._remove_start_hooks()
        if self._rate_scaling is not None:
            self._rate_scaling.close()
        self._checkpoints.abandon()
        self.world.usage.exchanges.discard(self._exchange)
        # In this order: background work stops, then gradients are copied out of shared memory, then it is unmapped.
        self._exchange.close()
        self._replica.detach()
        if self._replica.checks is not None:
            self._replica.checks.close()
        if self._replica.compute_clock is not None:
            self._replica.compute_clock.detach()
        self._exchange.transport.close()
        if self._model_on_mesh is not None:
            self._model_on_mesh.abandon()
            restore_world(self.world, self._previous_world)
        self.world.sample_counts.distributed.discard(self._model)
        delattr(self._model, JOB_ATTRIBUTE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        elif not self._finished:
            self._release()  # Not collective: the other ranks may not be coming.


def _is_finite(loss: Tensor) -> bool:
    # Of one value, a tenth of the time that `torch.isfinite` takes.
    return isfinite(loss.item()) if loss.numel() == 1 else bool(torch.isfinite(loss).all())


def _refuse_in_consensus(replica: HookedReplica, what: str) -> None:
    """Raise `ConfigError` for a call that cannot be made while the model holds what all ranks agree on."""
    if replica.in_consensus:
        raise ConfigError(f"{what} inside job.consensus(): end that first.")


def restore_world(current: World, previous: World) -> None:
    """Make `tutti.world()` return `previous` again, if it is `current` now."""
    if current is current_world():
        set_world(previous)
