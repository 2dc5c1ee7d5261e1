"""A model on a mesh: what of it this rank has, and how to have it whole again."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.codecs import Cast
from tutti.collectives import native, run
from tutti.errors import ConfigError
from tutti.parallel.branch import Branches
from tutti.parallel.groups import broadcast, device_mesh, process_group
from tutti.parallel.mesh import Axis, Mesh
from tutti.parallel.pipeline.layers import StageModule
from tutti.parallel.pipeline.measure import LayerCost
from tutti.parallel.pipeline.plan import PipelinePlan
from tutti.parallel.pipeline.schedules import actions_by_rank
from tutti.parallel.pipeline.stage_links import StageLinks, open_links
from tutti.parallel.pipeline.staged_model import StagedModel
from tutti.parallel.pipeline.step import Loss, PipelineStep
from tutti.parallel.same_batch import SameBatchCheck
from tutti.parallel.tensor.plan import TensorPlan, nothing_split_mistakes, tensor_plan
from tutti.replica import HookedReplica
from tutti.replica.batchnorm import SyncedBatchNorm
from tutti.replica.gathered import gather_state as gather_objects
from tutti.simulation import operator_clock
from tutti.strategies import Strategy
from tutti.transports import SingleRankTransport, Transport

if TYPE_CHECKING:
    from tutti.parallel.tensor.sharded_model import ShardedModel

_WHOLE_TENSOR_OPTIMIZERS: dict[str, tuple[Axis, ...]] = {
    **dict.fromkeys(
        ("Adafactor", "LAMB", "LARS", "Lamb", "Lars", "Muon", "SOAP", "Shampoo", "SparseAdam"), ("tensor",)
    ),
    "LBFGS": ("tensor", "pipe"),
}
"""Optimisers, torch's and others', that do not take each number by itself, and along which axes they would have to."""

_PARTS = "tensor={tensor} x pipe={pipe}"


class ModelOnMesh:
    """Splits `model` as the mesh says, which starts equal on all ranks. Collective."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, mesh: Mesh, transport: Transport, example: Any = None
    ) -> None:
        self.model, self.mesh = model, mesh
        place = mesh.coordinates(transport.rank)
        self.is_replica_leader = place["tensor"] == place["pipe"] == 0
        """Whether this rank is the first of those that have a replica together."""
        self._axis_transports = {axis: _axis_transport(mesh, axis, transport) for axis in mesh.shape}
        together = mesh.replica_ranks(transport.rank)
        self._replica_transport = (
            transport.channel("replica", together)
            if len(together) > 1
            else SingleRankTransport(transport.timeout, transport.world_rank)
        )
        """Between the ranks that have a replica together."""
        self.data_transport = self._axis_transports["data"]
        """Between this rank and those that have the same part of the model."""
        self._device = next(model.parameters()).device
        self._resources = ExitStack()
        self._stages: StagedModel | None = None
        self._links: StageLinks | None = None
        self._splits: list[ShardedModel] = []
        try:
            self._split_model(optimizer, transport, example)
        except BaseException:
            self.abandon()
            raise

    def _split_model(self, optimizer: Optimizer, transport: Transport, example: Any) -> None:
        model, mesh = self.model, self.mesh
        if transport.cluster is not None:
            self._resources.enter_context(operator_clock.counting(transport))
        plan = tensor_plan(model, mesh.tensor, mesh.split)
        styles = {module: plan.style_of(name) for name, module in model.named_modules()}
        if mesh.pipe > 1:
            self._stages = StagedModel(
                model, optimizer, mesh.pipeline, self._axis_transports["pipe"], transport, example
            )
        self.local_module = (
            model if self._stages is None else nn.ModuleDict({str(it): each for it, each in self._local_parts.items()})
        )
        """What this rank has: what strategies work on."""
        if mesh.tensor > 1:
            from tutti.parallel.tensor.sharded_model import (  # Costs a compiler's import.
                ShardedModel,
                implicit_replication,
            )

            group = self._resources.enter_context(process_group(self._axis_transports["tensor"]))
            devices = self._resources.enter_context(device_mesh(group, self._device.type))
            same = SameBatchCheck(self._replica_transport) if mesh.pipe == 1 else None
            self._splits = [ShardedModel(each, styles, devices, optimizer, same) for each in self._local_parts.values()]
            self._resources.enter_context(implicit_replication())
            _share_random_state(group, self._device)

    @property
    def _local_parts(self) -> dict[int, nn.Module]:
        return dict(self._stages.local_stages) if self._stages is not None else {0: self.model}

    def pipeline_step(self, loss: Loss, replica: HookedReplica) -> PipelineStep:
        """What takes a batch through all stages. Collective."""
        plan = self._stages.plan if self._stages is not None else self._one_stage()
        stages: dict[int, nn.Module] = (
            self._local_parts if self._stages is not None else {0: StageModule([("model", self.model)])}
        )
        self._links = self._links or open_links(plan, self._axis_transports["pipe"], self._device)
        return PipelineStep(plan, stages, self._links, replica, loss, SameBatchCheck(self._replica_transport))

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale gradients so that the norm of all, on all ranks, is at most `max_norm`. Collective."""
        gradients = {it: it.grad for it in self.local_module.parameters() if it.grad is not None}
        first = self._axis_transports["tensor"].rank == 0
        counted = [grad for it, grad in gradients.items() if first or any(each.is_sharded(it) for each in self._splits)]
        square = torch.zeros(1, dtype=torch.float64)
        for grad in counted:
            square += grad.double().square().sum().cpu()
        for axis in ("tensor", "pipe"):
            if self._axis_transports[axis].size > 1:
                run(native.steps(square, self._axis_transports[axis]))
        norm = float(square.sqrt())
        for grad in gradients.values():
            grad.mul_(min(1.0, max_norm / (norm + 1e-6)))
        return norm

    @contextmanager
    def full_model(self, optimizer: bool) -> Iterator[None]:
        """Within it every rank has the whole model, and if asked the `optimizer`'s memory. Collective."""
        with ExitStack() as stack:
            for split in self._splits:
                stack.enter_context(split.full_model(optimizer))
            if self._stages is not None:
                stack.enter_context(self._stages.full_model(optimizer))
            yield

    def gather_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """What the ranks that have a replica together have of their own, for one to save. Collective."""
        parts = gather_objects(state, self._replica_transport)
        return {"parts": parts, "of": self._parts} if len(parts) > 1 else state

    def local_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of what `gather_state` returned."""
        parts, of = state.get("parts", [state]), state.get("of", _PARTS.format(tensor=1, pipe=1))
        if not any(parts):
            return {}
        if of != self._parts:
            raise ConfigError(
                f"this state was saved of {of}, and this is {self._parts}. Use the same mesh, and Pipeline(cut=...), "
                "or load the model and the optimiser alone, before distribute."
            )
        found: dict[str, Any] = parts[self._replica_transport.rank]
        return found

    @property
    def _parts(self) -> str:
        cut = "" if self._stages is None else f", cut {self._stages.cut}"
        return _PARTS.format(tensor=self.mesh.tensor, pipe=self.mesh.pipe) + cut

    def close(self) -> None:
        """Give every rank the whole model, and let it go. Collective."""
        for split in self._splits:
            split.close()
        if self._stages is not None:
            self._stages.close()
        self._release()

    def abandon(self) -> None:
        """Let the model go as it is. Not collective."""
        for split in self._splits:
            split.abandon()
        if self._stages is not None:
            self._stages.abandon()
        self._release()

    def _release(self) -> None:
        self._resources.close()
        for row in (*self._axis_transports.values(), self._replica_transport):
            row.close()

    def _one_stage(self) -> PipelinePlan:
        number = self.mesh.pipeline.microbatches or 2
        free = LayerCost("model", 0.0, 0.0, 0, 0, ())
        return PipelinePlan(actions_by_rank("gpipe", 1, 1, number), [free], number)


def mesh_mistakes(
    model: nn.Module, optimizer: Optimizer, mesh: Mesh, strategy: Strategy, num_ranks: int, example: Any = None
) -> list[str]:
    """What is wrong with splitting `model` so, as far as is seen without doing it."""
    found = [*mesh.mistakes(num_ranks), *_refuse_optimizer(optimizer, mesh)]
    if mesh.tensor * mesh.pipe > 1 and any(isinstance(module, Branches) for module in model.modules()):
        found.append("Branches are for ranks that have the whole model: use them without tensor and pipe.")
    if strategy.needs_whole_model and mesh.tensor * mesh.pipe > 1:
        found.append(
            f"strategy '{strategy}' needs the whole model on every rank, and a rank of this mesh has a part of it: "
            "name another strategy."
        )
    if mesh.pipe > 1 and any(isinstance(module, SyncedBatchNorm) for module in model.modules()):
        found.append("sync_batchnorm normalises over all ranks, and a stage of a pipeline is on some: do without.")
    if mesh.pipe > 1 and example is None:
        found.append(
            "a mesh with pipe above 1 needs an example, by which layers are timed and the model is cut: "
            "distribute(..., example=x), one batch as the pipeline will get."
        )
    if mesh.tensor > 1:
        try:
            plan = tensor_plan(model, mesh.tensor, mesh.split)
        except ConfigError as error:
            return [*found, str(error)]
        found += nothing_split_mistakes(plan)
        if mesh.data > 1:
            found += _refuse_uneven(model, plan, strategy)
    return found


def _refuse_optimizer(optimizer: Optimizer, mesh: Mesh) -> list[str]:
    """Those that look at more of a parameter, or of all of them, than each of its numbers by itself."""
    kind = next((it.__name__ for it in type(optimizer).__mro__ if it.__name__ in _WHOLE_TENSOR_OPTIMIZERS), "")
    over = [axis for axis in _WHOLE_TENSOR_OPTIMIZERS.get(kind, ()) if mesh.shape[axis] > 1]
    if not over:
        return []
    return [
        f"{type(optimizer).__name__} looks at parameters as wholes, and a rank has parts of them with "
        f"{' and '.join(f'{axis}={mesh.shape[axis]}' for axis in over)}: use SGD, Adam, AdamW or another that takes "
        f"each number by itself, or do without {' and '.join(over)}."
    ]


def _refuse_uneven(model: nn.Module, plan: TensorPlan, strategy: Strategy) -> list[str]:
    """What would let copies of a whole layer differ: ranks that split others exchange them apart from each other.

    A sum is the same whatever is beside a gradient; what a codec says may not be, nor who comes first to a server.
    """
    codec = getattr(strategy, "codec", None)
    if strategy.synchronous and (codec is None or isinstance(codec, Cast)):
        return []
    exact_below = getattr(strategy, "exact_below", 0) if strategy.synchronous else 0
    large = [
        layer.name
        for layer in plan.layers
        if layer.style == "replicate"
        and any(p.numel() >= exact_below for p in model.get_submodule(layer.name).parameters(recurse=False))
    ]
    if not large:
        return []
    return [
        f"'{strategy}' would let copies of layers that are whole on every rank differ ({', '.join(large[:3])}): use an "
        "exact strategy, or one with a cast, along data."
    ]


def _axis_transport(mesh: Mesh, axis: Axis, transport: Transport) -> Transport:
    if mesh.shape[axis] == 1 and transport.cluster is None:
        return SingleRankTransport(transport.timeout, transport.world_rank)
    return transport.channel(axis, mesh.ranks_along(axis, transport.rank))


def _share_random_state(group: Any, device: torch.device) -> None:
    """Have the ranks along `tensor` draw the same numbers, for dropout, say."""
    warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support on cpu")
    state = torch.get_rng_state()
    broadcast(state, 0, group)
    torch.set_rng_state(state)
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device)
        broadcast(state, 0, group)
        torch.cuda.set_rng_state(state, device)
