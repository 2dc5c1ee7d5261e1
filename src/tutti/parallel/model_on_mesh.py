"""`ModelOnMesh`: a model split over the ranks of a mesh, of which each rank holds a part.

How it works
------------
Every rank starts with the same whole model. Along `pipe` it is cut into stages (`StagedModel`), of which a rank keeps
its own. Along `tensor` the layers of these stages are sharded (`ShardedModel`). What remains is `local_module`.
Strategies work on that alone, over `data_transport`, between the ranks that hold the same part: for them each is an
ordinary replica. Ranks that hold one replica together, along `tensor` and `pipe`, share `_replica_transport`.

The order of splitting matters, and is undone in reverse: stages first, since shards belong to the layers of a stage;
`full_model` and `close` gather shards first, then stages.

All transports are channels of the world's, made and closed here. Everything but `abandon` is collective. If making it
fails on one rank, that rank abandons what it has made, which closes its channels and so ends the waits of its peers.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.codecs import Cast
from tutti.errors import ConfigError
from tutti.parallel.branch import Branches
from tutti.parallel.evaluation_check import EvaluationCheck
from tutti.parallel.groups import broadcast, device_mesh, process_group
from tutti.parallel.load_refusal import LoadRefusal
from tutti.parallel.mesh import Axis, Mesh
from tutti.parallel.pipeline.layers import StageModule
from tutti.parallel.pipeline.measure import LayerCost
from tutti.parallel.pipeline.plan import PipelinePlan
from tutti.parallel.pipeline.schedules import actions_by_rank
from tutti.parallel.pipeline.stage_links import StageLinks, open_links
from tutti.parallel.pipeline.staged_model import StagedModel
from tutti.parallel.pipeline.step import Loss, PipelineStep
from tutti.parallel.replica_gradients import ReplicaGradients
from tutti.parallel.same_batch import SameBatchCheck
from tutti.parallel.same_copies import SameCopiesCheck
from tutti.parallel.saved_part import SavedPart, model_part, optimizer_part
from tutti.parallel.split_state import SplitNames
from tutti.parallel.tensor.plan import TensorPlan, nothing_split_mistakes, tensor_plan
from tutti.replica import HookedReplica
from tutti.replica.batchnorm import SyncedBatchNorm
from tutti.simulation import operator_clock
from tutti.strategies import Strategy
from tutti.transports import SharesMemory, SingleRankTransport, Transport

if TYPE_CHECKING:
    from tutti.parallel.tensor.sharded_model import ShardedModel

_WHOLE_TENSOR_OPTIMIZERS = {
    "Adafactor", "LAMB", "LARS", "Lamb", "Lars", "Muon", "SOAP", "Shampoo", "SparseAdam",
}  # fmt: skip
"""Optimisers, torch's and others', that are not element-wise, so that they would be wrong along `tensor`."""


class ModelOnMesh:
    """Splits `model`, which is the same on all ranks at first, over a mesh. Collective.

    Args:
        transport: between all ranks of the world.
        example: one batch of inputs, on which layers are timed if there is a pipeline.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, mesh: Mesh, transport: Transport, example: Any = None
    ) -> None:
        self.model, self.mesh = model, mesh
        coordinates = mesh.coordinates(transport.rank)
        self.is_replica_leader = coordinates["tensor"] == coordinates["pipe"] == 0
        """Whether this rank is the first of those that hold a replica together."""
        # Opened before anything is split, on all ranks in the same order: to open a channel is collective.
        self._axis_transports = {axis: _axis_transport(mesh, axis, transport) for axis in mesh.shape}
        replica_ranks = mesh.replica_ranks(transport.rank)
        self._replica_transport = (
            transport.channel("replica", replica_ranks)
            if len(replica_ranks) > 1
            else SingleRankTransport(transport.timeout, transport.world_rank)
        )
        """Between the ranks that hold a replica together."""
        # Messages between threads that write checkpoints. Where the transport shares memory, the plain one beneath it.
        plain = transport.inner if isinstance(transport, SharesMemory) else transport
        self.parts_transport = plain.channel("checkpoint parts", replica_ranks) if mesh.is_split else None
        """Between the ranks that save a replica together; None if each rank has the whole model."""
        self.data_transport = self._axis_transports["data"]
        """Between the ranks that hold the same part of the model."""
        self._device = next(model.parameters()).device
        # Left in reverse order: the device mesh goes before the process group that it refers to.
        self._resources = ExitStack()
        self._staged: StagedModel | None = None
        self._links: StageLinks | None = None
        self._sharded: list[ShardedModel] = []
        self._check_copies: SameCopiesCheck | None = None
        try:
            self._split(optimizer, transport, example)
        except BaseException:
            self.abandon()  # Closes this rank's channels, so that no peer waits for it.
            raise

    def _split(self, optimizer: Optimizer, transport: Transport, example: Any) -> None:
        model, mesh = self.model, self.mesh
        # In virtual time the operators of the model must move the modelled clock.
        if transport.cluster is not None:
            self._resources.enter_context(operator_clock.counting(transport))
        # Before the cut into stages: the plan looks at pairs of layers and at names in the whole model.
        plan = tensor_plan(model, mesh.tensor, mesh.split)
        styles = {module: plan.style_of(name) for name, module in model.named_modules()}
        # Stages first: shards belong to the layers of a stage.
        if mesh.pipe > 1:
            pipe_transport = self._axis_transports["pipe"]
            self._staged = StagedModel(model, optimizer, mesh.pipeline, pipe_transport, transport, example)
        # Keyed by the stage's number, which names parameters alike on the ranks along `data` and `tensor`.
        stages = {str(number): stage for number, stage in self._local_stages.items()}
        self.local_module = model if self._staged is None else nn.ModuleDict(stages)
        """The part of the model that this rank holds, on which strategies work."""
        if mesh.tensor > 1:
            # Imports torch's compiler, which is slow.
            from tutti.parallel.tensor.sharded_model import ShardedModel, implicit_replication

            group = self._resources.enter_context(process_group(self._axis_transports["tensor"]))
            devices = self._resources.enter_context(device_mesh(group, self._device.type))
            check = self._forward_check(group, transport)
            self._sharded = [
                ShardedModel(stage, styles, devices, optimizer, check) for stage in self._local_stages.values()
            ]
            self._resources.enter_context(implicit_replication())
            _share_random_state(group, self._device)
            self._normalise_along_data()
            if transport.cluster is None and self._device.type != "meta":
                self._check_copies = SameCopiesCheck(
                    self.local_module, optimizer, group, self._axis_transports["tensor"], self._is_sharded
                )
                self._resources.callback(self._check_copies.close)
                if mesh.data == 1:  # Otherwise a strategy that is not synchronous may let copies differ for a while.
                    self._check_copies.compare_in_steps()
        split_transports = {axis: self._axis_transports[axis] for axis in ("tensor", "pipe")}
        self._gradients = ReplicaGradients(self.local_module, optimizer, split_transports, self._is_sharded)
        self._resources.callback(self._gradients.close)
        if mesh.is_split:
            refusal = LoadRefusal(model, optimizer, transport.world_rank)
            self._resources.callback(refusal.close)

    def _forward_check(self, group: dist.ProcessGroup, transport: Transport) -> Callable[[Any], None]:
        """Return what compares a forward pass, given its inputs, between the ranks along `tensor`."""
        # In a pipeline `PipelineStep` compares batches, which only the first stage would see here.
        if self.mesh.pipe > 1:
            return lambda inputs: None
        check_batch = SameBatchCheck(self._replica_transport)
        if transport.cluster is not None or self._device.type == "meta":
            return check_batch
        check_evaluation = EvaluationCheck(group, self._device)

        def check(inputs: Any) -> None:
            check_batch(inputs)
            check_evaluation()

        return check

    def _normalise_along_data(self) -> None:
        """Let `SyncedBatchNorm` layers count each sample once: ranks along `tensor` have the same ones."""
        for module in self.model.modules():
            if isinstance(module, SyncedBatchNorm):
                self._resources.callback(module.use(self.data_transport))

    @property
    def _local_stages(self) -> dict[int, nn.Module]:
        """The stages of this rank by number; the whole model is stage 0 if there is no pipeline."""
        return dict(self._staged.local_stages) if self._staged is not None else {0: self.model}

    def pipeline_step(self, loss: Loss, replica: HookedReplica) -> PipelineStep:
        """Return a function that takes a batch through all stages, forward and backward. Collective."""
        plan = self._staged.plan if self._staged is not None else self._single_stage_plan()
        stages = self._local_stages
        if self._staged is None:
            stages = {0: StageModule([("model", self.model)])}
        # Kept for a second step function, with another loss, say: opening links is collective and allocates their
        # slots.
        self._links = self._links or open_links(plan, self._axis_transports["pipe"], self._device)
        return PipelineStep(plan, stages, self._links, replica, loss, SameBatchCheck(self._replica_transport))

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale all gradients of a replica such that their norm is at most `max_norm`; return the norm. Collective."""
        return self._gradients.clip_norm(max_norm)

    def _is_sharded(self, parameter: nn.Parameter) -> bool:
        """Whether ranks along `tensor` hold different parts of a parameter."""
        return any(sharded.is_sharded(parameter) for sharded in self._sharded)

    @contextmanager
    def full_model(self, optimizer: bool, keep_changes: bool = False) -> Iterator[None]:
        """Within it every rank has the whole model, and the state of the `optimizer` if asked. Collective.

        With `keep_changes` what is loaded in it, the same on every rank, is split again at its end.
        """
        with ExitStack() as stack:
            # Shards first: stages then send full parameters. ExitStack undoes them in reverse.
            for sharded in self._sharded:
                stack.enter_context(sharded.full_model(optimizer, keep_changes))
            if self._staged is not None:
                stack.enter_context(self._staged.full_model(optimizer))
            yield

    def gather_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of the whole model, from those of all ranks that hold a replica together. Collective."""
        return self._split_names.gather(state, self._replica_transport)

    def saved_part(self, optimizer: Optimizer, state: dict[str, Any]) -> SavedPart:
        """Return what this rank saves of the model, the optimiser and a job's state. Not collective.

        Every value is saved by one rank of a replica, and every shard by the rank that has it.
        """
        part = {"exchange": self._split_names.part(state["exchange"])}
        shards = {p: shard for sharded in self._sharded for p, shard in sharded.shards.items()}
        first_copy = self._axis_transports["tensor"].rank == 0

        def owns(tensor: Tensor) -> bool:
            stage = self._staged is None or self._staged.owns(tensor)
            return stage and (first_copy or tensor in shards)

        return SavedPart(
            model=model_part(self.model, owns, shards, self.is_replica_leader),
            optimizer=optimizer_part(optimizer, owns, shards, self.is_replica_leader),
            job={**state, **part} if self.is_replica_leader else part,
        )

    def local_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a state of the whole model, saved on any mesh or on none."""
        if not self.mesh.is_split:
            return state
        part: dict[str, Any] = self._split_names.cut(state)
        return part

    @property
    def trained_shapes(self) -> dict[str, list[int]]:
        """The shapes of all trained parameters of the whole model, in the order of names."""
        shapes = {} if self._staged is None else self._staged.shapes
        full = {p: shard.shape for sharded in self._sharded for p, shard in sharded.shards.items()}
        trained = sorted((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
        return {name: list(full.get(p, shapes.get(p, p.shape))) for name, p in trained}

    @property
    def _split_names(self) -> SplitNames:
        shards = {p: shard for sharded in self._sharded for p, shard in sharded.shards.items()}
        return SplitNames(self.model, self.local_module, shards)

    def close(self) -> None:
        """Give every rank the whole model, and release it. Collective."""
        if self._check_copies is not None:
            self._check_copies()
        for sharded in self._sharded:
            sharded.close()
        if self._staged is not None:
            self._staged.close()
        self._release()

    def abandon(self) -> None:
        """Release the model as it is. Not collective."""
        for sharded in self._sharded:
            sharded.abandon()
        if self._staged is not None:
            self._staged.abandon()
        self._release()

    def _release(self) -> None:
        self._resources.close()  # Process groups first: they use channels of the axis transports.
        for transport in (*self._axis_transports.values(), self._replica_transport, self.parts_transport):
            if transport is not None:
                transport.close()

    def _single_stage_plan(self) -> PipelinePlan:
        """Return the plan of a pipeline step without a pipeline: microbatches whose gradients are accumulated."""
        # The default of `StagedModel`, twice the ranks along `pipe`, of which there is one here.
        num_microbatches = self.mesh.pipeline.microbatches or 2
        # Costs serve to cut a model and to size messages, and there are neither.
        cost = LayerCost("model", 0.0, 0.0, 0, 0, ())
        return PipelinePlan(actions_by_rank("gpipe", 1, 1, num_microbatches), [cost], num_microbatches)


def mesh_mistakes(
    model: nn.Module, optimizer: Optimizer, mesh: Mesh, strategy: Strategy, num_ranks: int, example: Any = None
) -> list[str]:
    """Return what is wrong with splitting `model` over `mesh`, as far as can be seen without doing it."""
    mistakes = [*mesh.mistakes(num_ranks), *_optimizer_mistakes(optimizer, mesh)]
    # What needs the whole model on every rank.
    if mesh.is_split and any(isinstance(module, Branches) for module in model.modules()):
        mistakes.append("Branches need the whole model on every rank: use them without tensor and pipe.")
    if strategy.needs_whole_model and mesh.is_split:
        mistakes.append(
            f"strategy '{strategy}' needs the whole model on every rank, and a rank of this mesh has a part of it: "
            "choose another strategy."
        )
    if mesh.pipe > 1 and any(isinstance(module, SyncedBatchNorm) for module in model.modules()):
        mistakes.append(
            "sync_batchnorm normalises over all ranks, and a stage of a pipeline is on some of them: do not use it."
        )
    if mesh.pipe > 1 and example is None:
        mistakes.append(
            "a mesh with pipe above 1 needs an example, on which layers are timed to cut the model: pass one batch of "
            "the pipeline's inputs, distribute(..., example=x)."
        )
    if mesh.tensor > 1:
        try:
            plan = tensor_plan(model, mesh.tensor, mesh.split)
        except ConfigError as error:
            return [*mistakes, str(error)]
        mistakes += nothing_split_mistakes(plan)
        if mesh.data > 1:
            mistakes += _diverging_copies_mistakes(model, plan, strategy)
    return mistakes


def _optimizer_mistakes(optimizer: Optimizer, mesh: Mesh) -> list[str]:
    """Refuse optimisers that look at more than one element of a parameter at a time."""
    # By name, not by class: many of these are in packages that need not be installed.
    if mesh.tensor == 1 or not any(base.__name__ in _WHOLE_TENSOR_OPTIMIZERS for base in type(optimizer).__mro__):
        return []
    return [
        f"{type(optimizer).__name__} looks at whole parameters, and a rank has parts of them with "
        f"tensor={mesh.tensor}: use SGD, Adam, AdamW or another element-wise optimiser, or do not use tensor."
    ]


def _diverging_copies_mistakes(model: nn.Module, plan: TensorPlan, strategy: Strategy) -> list[str]:
    """Refuse strategies under which the copies of a replicated layer would come to differ along `tensor`.

    Each rank along `tensor` exchanges its copy with other ranks than its neighbours do. A sum is the same whatever else
    is exchanged. But a codec's result may depend on the other gradients, and an asynchronous one on the order of
    arrival.
    """
    codec = getattr(strategy, "codec", None)
    if strategy.synchronous and (codec is None or isinstance(codec, Cast)):
        return []
    # Smaller parameters are sent exactly, so that their copies stay alike. Without synchronous steps none do.
    exact_below = getattr(strategy, "exact_below", 0) if strategy.synchronous else 0
    compressed = [
        layer.name
        for layer in plan.layers
        if layer.style == "replicate"
        and any(p.numel() >= exact_below for p in model.get_submodule(layer.name).parameters(recurse=False))
    ]
    if not compressed:
        return []
    return [
        f"'{strategy}' would let copies of replicated layers differ between ranks ({', '.join(compressed[:3])}): use "
        "an exact strategy along data, or one whose codec is a cast."
    ]


def _axis_transport(mesh: Mesh, axis: Axis, transport: Transport) -> Transport:
    """Return the transport between the ranks that differ from this one on `axis` alone. Collective."""
    # A simulated rank needs the virtual clock, so it has a channel also where it is alone.
    if mesh.shape[axis] == 1 and transport.cluster is None:
        return SingleRankTransport(transport.timeout, transport.world_rank)
    return transport.channel(axis, mesh.ranks_along(axis, transport.rank))


def _share_random_state(group: Any, device: torch.device) -> None:
    """Give all ranks along `tensor` the random state of the first, so that dropout draws the same. Collective."""
    # torch warns because it does not keep the CPU generators of the ranks equal. That is done here.
    warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support on cpu")
    state = torch.get_rng_state()
    broadcast(state, 0, group)
    torch.set_rng_state(state)
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device)
        broadcast(state, 0, group)
        torch.cuda.set_rng_state(state, device)
