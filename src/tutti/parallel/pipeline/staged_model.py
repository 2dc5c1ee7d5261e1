"""A model cut into stages, of which this rank keeps its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.cluster import format_size
from tutti.collectives import all_gather_json, broadcast_json
from tutti.errors import ConfigError
from tutti.parallel.pipeline.cut import (
    LayerRange,
    balanced_cut,
    balanced_cut_within,
    check_layers_fit,
    check_ranks_fit,
    cut_from_counts,
)
from tutti.parallel.pipeline.layers import Layers, StageModule, check_no_shared_parameters, sequential_layers
from tutti.parallel.pipeline.measure import LayerCost, measure_layers
from tutti.parallel.pipeline.microbatches import split_batch
from tutti.parallel.pipeline.plan import PipelinePlan
from tutti.parallel.pipeline.schedules import actions_by_rank, max_live_microbatches
from tutti.parallel.pipeline.settings import Pipeline
from tutti.replica.gathered import gather_state
from tutti.replica.samples import num_rows
from tutti.transports import Transport


class StagedModel:
    """Cuts `model`, and keeps only the parameters of this rank's stages. Collective among all ranks of `everyone`.

    Args:
        transport: between the ranks along `pipe`.
        everyone: between all ranks: what the first one measures, all go by.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        settings: Pipeline,
        transport: Transport,
        everyone: Transport,
        example: Any,
    ) -> None:
        self._model, self._optimizer, self._transport = model, optimizer, transport
        num_microbatches = settings.microbatches or 2 * transport.size
        num_stages = transport.size * settings.num_stages_per_rank
        orders = actions_by_rank(settings.schedule, transport.size, settings.num_stages_per_rank, num_microbatches)
        batch = split_batch(example, num_microbatches)[0]
        layers = _layers(model, batch, everyone)
        costs = _shared_costs(layers, batch, everyone)
        held = [max_live_microbatches(orders[stage % transport.size], stage) for stage in range(num_stages)]
        spans = _spans(costs, settings, held, transport.size)
        stage_costs = [_sum(costs[start:stop]) for start, stop in spans]
        self.plan = PipelinePlan(orders, stage_costs, num_microbatches, num_rows(example))
        self.local_stages = {
            index: StageModule(layers[start:stop])
            for index, (start, stop) in enumerate(spans)
            if index % transport.size == transport.rank
        }
        self.cut = [stop - start for start, stop in spans]
        """How many layers each stage has."""
        users = _users(model, layers, spans, transport.size)
        self._owners = {tensor: min(ranks) for tensor, ranks in users.items()}
        """Who gives each parameter and buffer to the others: a buffer may be of several stages."""
        self._others = [tensor for tensor, ranks in users.items() if transport.rank not in ranks]
        """What this rank has no use for."""
        self._shapes = {tensor: tensor.shape for tensor in self._owners}
        self._hold()

    @contextmanager
    def full_model(self, optimizer: bool) -> Iterator[None]:
        """Within it every rank has the whole model, and if asked the `optimizer`'s memory. Collective along `pipe`."""
        self._gather(optimizer)
        try:
            yield
        finally:
            self._hold()

    def close(self) -> None:
        """Give every rank the whole model and the optimiser's memory, and let it go. Collective along `pipe`."""
        self._gather(optimizer=True)

    @torch.no_grad()
    def _gather(self, optimizer: bool) -> None:
        self.abandon()
        if optimizer:
            self._gather_optimizer()
        for tensor in self._others:
            tensor.data = tensor.new_empty(self._shapes[tensor])
        for rank in range(self._transport.size):
            for tensor in [it for it, owner in self._owners.items() if owner == rank]:
                self._hand_out(tensor, rank)

    def _gather_optimizer(self) -> None:
        memory = self._optimizer.state
        mine = {
            number: memory[tensor]
            for number, (tensor, owner) in enumerate(self._owners.items())
            if owner == self._transport.rank and tensor in memory
        }
        tensors, devices = list(self._owners), _devices(mine)
        for rank, theirs in enumerate(gather_state(mine, self._transport)):
            if rank != self._transport.rank:
                for number, entries in theirs.items():
                    memory[tensors[number]] = _beside(entries, tensors[number], self._shapes[tensors[number]], devices)

    def abandon(self) -> None:
        """Let the model go as it is. Not collective. Idempotent."""
        self._model.__dict__.pop("forward", None)

    def _hold(self) -> None:
        for tensor in self._others:
            tensor.data = tensor.new_empty(0)
            tensor.grad = None
            self._optimizer.state.pop(tensor, None)
        self._model.forward = _refuse_forward

    def _hand_out(self, tensor: Tensor, root: int) -> None:
        if self._transport.rank == root:
            others = [rank for rank in range(self._transport.size) if rank != root]
            for work in [self._transport.isend(tensor.detach(), rank) for rank in others]:
                work.wait()
        else:
            self._transport.irecv(tensor.detach(), root).wait()


def _layers(model: nn.Module, batch: Any, everyone: Transport) -> Layers:
    """The model's layers; if they cannot be had on one rank, all are told."""
    layers, mistake = Layers(), ""
    try:
        layers = sequential_layers(model, batch)
        check_no_shared_parameters(layers)
    except ConfigError as error:
        mistake = str(error)
    mistakes = all_gather_json(mistake, everyone)
    if any(mistakes):
        rank = next(rank for rank, each in enumerate(mistakes) if each)
        raise ConfigError(mistakes[0] if len(set(mistakes)) == 1 else f"rank {rank}: {mistakes[rank]}")
    return layers


def _shared_costs(layers: Layers, batch: Any, everyone: Transport) -> list[LayerCost]:
    """What the first rank measures: all must cut alike."""
    found: Any = None
    if everyone.rank == 0:
        try:
            found = [[*vars(cost).values()] for cost in measure_layers(layers, batch, everyone.now)]
        except Exception as error:  # Whatever it is: the other ranks are waiting.
            found = f"the layers could not be run one after the other on the example: {error}"
    found = broadcast_json(found, everyone)
    if isinstance(found, str):
        raise ConfigError(found)
    return [_cost(*each) for each in found]


def _cost(*values: Any) -> LayerCost:
    """From what JSON made of it."""
    cost = LayerCost(*values)
    return replace(cost, output_shapes=tuple((tuple(shape), dtype) for shape, dtype in cost.output_shapes))


def _spans(costs: list[LayerCost], settings: Pipeline, held: list[int], num_ranks: int) -> list[LayerRange]:
    """Which layers each stage has; `held` is by stage, of how many microbatches it keeps activations."""
    num_stages, limit_bytes = len(held), settings.memory_bytes
    memory = [[cost.memory_bytes(each) for cost in costs] for each in held]
    least = [min(each) for each in zip(*memory, strict=True)]
    check_layers_fit([cost.name for cost in costs], num_stages, least, limit_bytes)
    if settings.cut is not None:
        spans = cut_from_counts(settings.cut, num_stages, len(costs))
        check_ranks_fit(spans, memory, num_ranks, limit_bytes)
        return spans
    seconds = [cost.seconds for cost in costs]
    if not any(seconds):  # In virtual time, without a layer that multiplies.
        seconds = [1.0 + cost.parameter_bytes for cost in costs]
    if limit_bytes is None:
        best = balanced_cut(seconds, num_stages)
        assert best is not None, "there are as many layers as stages"
        return best
    fitting = balanced_cut_within(seconds, memory, num_ranks, limit_bytes)
    if fitting is None:
        raise ConfigError(
            f"{len(costs)} layers that need {format_size(sum(least))} or more do not fit into {num_stages} stages on "
            f"{num_ranks} ranks of {format_size(limit_bytes)} each. Allow more memory, use more ranks or smaller "
            "microbatches, or say Pipeline(cut=...)."
        )
    return fitting


def _sum(costs: list[LayerCost]) -> LayerCost:
    """What several layers cost together."""
    return LayerCost(
        costs[0].name,
        sum(it.forward_s for it in costs),
        sum(it.backward_s for it in costs),
        sum(it.parameter_bytes for it in costs),
        sum(it.activation_bytes for it in costs),
        costs[-1].output_shapes,
    )


def _users(model: nn.Module, layers: Layers, spans: list[LayerRange], num_ranks: int) -> dict[Tensor, set[int]]:
    """The ranks along `pipe` that need each parameter and buffer; the first has those that no layer uses."""
    found: dict[Tensor, set[int]] = {}
    for index, (start, stop) in enumerate(spans):
        for _, layer in layers[start:stop]:
            for tensor in [*layer.parameters(), *layer.buffers()]:
                found.setdefault(tensor, set()).add(index % num_ranks)
    for tensor in [*model.parameters(), *model.buffers()]:
        found.setdefault(tensor, {0})
    return found


def _devices(memory: dict[int, dict[str, Any]]) -> dict[str, torch.device]:
    """Where an optimiser keeps what it remembers of this rank's parameters: some count steps on the CPU."""
    return {key: it.device for entries in memory.values() for key, it in entries.items() if isinstance(it, Tensor)}


def _beside(
    entries: dict[str, Any], parameter: Tensor, shape: torch.Size, devices: dict[str, torch.device]
) -> dict[str, Any]:
    """What an optimiser remembers of a parameter of another rank, where this one's would be."""
    return {
        key: it.to(devices.get(key, parameter.device if it.shape == shape else it.device))
        if isinstance(it, Tensor)
        else it
        for key, it in entries.items()
    }


def _refuse_forward(*_: Any, **__: Any) -> Any:
    raise ConfigError(
        "this model is in stages on several ranks. Train with `pipeline = job.pipeline(loss_fn)` and "
        "`loss = pipeline(x, y)`; evaluate within job.consensus()."
    )
