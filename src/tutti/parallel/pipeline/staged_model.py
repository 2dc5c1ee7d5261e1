"""`StagedModel`: a model cut into pipeline stages, of which each rank keeps only its own.

How it works
------------
Every rank starts with the whole model. All of them find the same layers; the first rank of the world times each layer
on a microbatch of the example and broadcasts the costs, so that all compute the same cut. Then each rank frees the
parameters and buffers that none of its stages use: their data becomes empty, their gradients and optimiser state are
dropped. The tensor objects stay, so the user's optimiser and model need not be rebuilt.

`full_model` reverses this for a while: the rank that owns a tensor (the first one that uses it) sends it to the others.
Outside of it, calling the model raises an error, because no rank could compute it alone.

Everything but `abandon` is collective, in the same order on every rank. A mistake on one rank is shared before it is
raised, so that all ranks raise it and none waits.
"""

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
    """Cuts `model` into stages, and keeps only the parameters of this rank's. Collective among all ranks of the world.

    Args:
        transport: between the ranks along `pipe`.
        world_transport: between all ranks: all of them use the costs that the first one measures.
        example: one batch of inputs, on which layers are timed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        settings: Pipeline,
        transport: Transport,
        world_transport: Transport,
        example: Any,
    ) -> None:
        self._model, self._optimizer, self._transport = model, optimizer, transport
        # Twice as many as ranks: the bubble of 1F1B is then a third or less of the step, (P - 1) / (3 P - 1).
        num_microbatches = settings.microbatches or 2 * transport.size
        num_stages = transport.size * settings.num_stages_per_rank
        actions = actions_by_rank(settings.schedule, transport.size, settings.num_stages_per_rank, num_microbatches)
        microbatch = split_batch(example, num_microbatches)[0]
        # 1. Layers, and what each costs: the same on all ranks of the world.
        layers = _find_layers(model, microbatch, world_transport)
        costs = _shared_costs(layers, microbatch, world_transport)
        # 2. The cut: layers to stages, such that the slowest stage is as fast as possible.
        # How many activations a stage keeps depends on the schedule and on its place in it, so memory is known per
        # stage.
        num_live = [max_live_microbatches(actions[stage % transport.size], stage) for stage in range(num_stages)]
        ranges = _cut(costs, settings, num_live, transport.size)
        stage_costs = [_sum(costs[start:stop]) for start, stop in ranges]
        self.plan = PipelinePlan(actions, stage_costs, num_microbatches, num_rows(example))
        """The stages, and the actions of each rank."""
        # 3. This rank's stages.
        self.local_stages = {
            index: StageModule(layers[start:stop])
            for index, (start, stop) in enumerate(ranges)
            if index % transport.size == transport.rank
        }
        """The stages of this rank, by number."""
        self.cut = [stop - start for start, stop in ranges]
        """Number of layers of each stage."""
        # 4. Free what other ranks hold.
        users = _users(model, layers, ranges, transport.size)
        self._owners = {tensor: min(ranks) for tensor, ranks in users.items()}
        """The rank that sends each parameter and buffer to the others; several stages may share a buffer."""
        self._remote = [tensor for tensor, ranks in users.items() if transport.rank not in ranks]
        """Parameters and buffers that no stage of this rank uses."""
        # Kept, because a freed tensor has no shape left from which its memory could be allocated again.
        self.shapes = {tensor: tensor.shape for tensor in self._owners}
        """The shapes of all parameters and buffers of the model, before any was sharded or freed."""
        self._free_remote()

    @contextmanager
    def full_model(self, optimizer: bool) -> Iterator[None]:
        """Within it every rank has the whole model, and the state of the `optimizer` if asked. Collective on `pipe`."""
        self._gather(optimizer)
        try:
            yield
        finally:
            # Also drops what was changed in tensors of other ranks: only the owner's tensors count.
            self._free_remote()

    def owns(self, tensor: Tensor) -> bool:
        """Whether this rank is the one that sends a parameter or buffer to the others, and saves it."""
        return self._owners.get(tensor, 0) == self._transport.rank

    def close(self) -> None:
        """Give every rank the whole model and optimiser state, and release the model. Collective along `pipe`."""
        self._gather(optimizer=True)

    def abandon(self) -> None:
        """Release the model as it is. Not collective. Idempotent."""
        self._model.__dict__.pop("forward", None)

    @torch.no_grad()
    def _gather(self, optimizer: bool) -> None:
        """Make the model whole on every rank, and the optimiser's state too if asked. Collective along `pipe`."""
        self.abandon()  # The model may be called again, now that it becomes whole.
        if optimizer:
            self._gather_optimizer()
        for tensor in self._remote:
            tensor.data = tensor.new_empty(self.shapes[tensor])  # Filled by the broadcasts below.
        # One owner after the other, and its tensors in one order: all ranks agree on which broadcast comes next.
        for rank in range(self._transport.size):
            for tensor in [tensor for tensor, owner in self._owners.items() if owner == rank]:
                self._broadcast(tensor, rank)

    def _gather_optimizer(self) -> None:
        """Give every rank the optimiser state of all parameters. Parameters are named by their position."""
        state = self._optimizer.state
        local = {
            number: state[tensor]
            for number, (tensor, owner) in enumerate(self._owners.items())
            if owner == self._transport.rank and tensor in state
        }
        tensors, devices = list(self._owners), _state_devices(local)
        # Positions are the same on all ranks: all listed the tensors of the same model in the same order.
        for rank, entries_of in enumerate(gather_state(local, self._transport)):
            if rank != self._transport.rank:
                for number, entries in entries_of.items():
                    tensor = tensors[number]
                    state[tensor] = _on_devices(entries, tensor, self.shapes[tensor], devices)

    def _free_remote(self) -> None:
        """Free what no stage of this rank uses, and let calls of the whole model fail."""
        for tensor in self._remote:
            tensor.data = tensor.new_empty(0)  # The same object, which the optimiser and the model still refer to.
            tensor.grad = None
            self._optimizer.state.pop(tensor, None)
        # On the instance: the class, which other models may share, stays as it is. `abandon` removes it.
        self._model.forward = _refuse_forward

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        """Send a tensor from its owner to all other ranks, in the same order on every rank."""
        if self._transport.rank == root:
            others = [rank for rank in range(self._transport.size) if rank != root]
            # All sends are started before any is waited for, so that the ranks receive at the same time.
            for work in [self._transport.isend(tensor.detach(), rank) for rank in others]:
                work.wait()
        else:
            self._transport.irecv(tensor.detach(), root).wait()


def _find_layers(model: nn.Module, microbatch: Any, world_transport: Transport) -> Layers:
    """Return the model's layers; if that fails on one rank, raise the error on all."""
    layers, mistake = Layers(), ""
    try:
        layers = sequential_layers(model, microbatch)
        check_no_shared_parameters(layers)
    except ConfigError as error:
        mistake = str(error)
    # Also a rank without a mistake must take part: the others would wait for it.
    mistakes = all_gather_json(mistake, world_transport)
    if any(mistakes):
        rank = next(rank for rank, mistake in enumerate(mistakes) if mistake)
        raise ConfigError(mistakes[0] if len(set(mistakes)) == 1 else f"rank {rank}: {mistakes[rank]}")
    return layers


def _shared_costs(layers: Layers, microbatch: Any, world_transport: Transport) -> list[LayerCost]:
    """Return what the first rank measures, on all ranks: their cuts must be the same."""
    result: Any = None
    if world_transport.rank == 0:
        try:
            result = [[*vars(cost).values()] for cost in measure_layers(layers, microbatch, world_transport.now)]
        except Exception as error:  # Of any kind: the other ranks are waiting for the broadcast.
            result = f"the layers could not be run one after the other on the example: {error}"
    result = broadcast_json(result, world_transport)
    if isinstance(result, str):
        raise ConfigError(result)
    return [_cost_from_json(*values) for values in result]


def _cost_from_json(*values: Any) -> LayerCost:
    """Return the cost whose fields these are, in their order."""
    cost = LayerCost(*values)
    # JSON has lists for tuples.
    return replace(cost, output_shapes=tuple((tuple(shape), dtype) for shape, dtype in cost.output_shapes))


def _cut(costs: list[LayerCost], settings: Pipeline, num_live: list[int], num_ranks: int) -> list[LayerRange]:
    """Return the layers of each stage.

    Args:
        num_live: for each stage, the number of microbatches whose activations it keeps at a time.
    """
    num_stages, limit_bytes = len(num_live), settings.memory_bytes
    memory = [[cost.memory_bytes(number) for cost in costs] for number in num_live]
    # The least that a layer takes in any stage: if even that is too much, no cut can help, and the error names the
    # layer.
    least = [min(sizes) for sizes in zip(*memory, strict=True)]
    check_layers_fit([cost.name for cost in costs], num_stages, least, limit_bytes)
    if settings.cut is not None:
        ranges = cut_from_counts(settings.cut, num_stages, len(costs))
        check_ranks_fit(ranges, memory, num_ranks, limit_bytes)
        return ranges
    seconds = [cost.seconds for cost in costs]
    if not any(seconds):  # In virtual time, layers without matrix products take none.
        # One more than the bytes, so that layers without parameters weigh something too.
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
            "microbatches, or set Pipeline(cut=...)."
        )
    return fitting


def _sum(costs: list[LayerCost]) -> LayerCost:
    """Return the cost of consecutive layers together."""
    return LayerCost(
        costs[0].name,
        sum(cost.forward_s for cost in costs),
        sum(cost.backward_s for cost in costs),
        sum(cost.parameter_bytes for cost in costs),
        sum(cost.activation_bytes for cost in costs),
        costs[-1].output_shapes,
    )


def _users(model: nn.Module, layers: Layers, ranges: list[LayerRange], num_ranks: int) -> dict[Tensor, set[int]]:
    """Return the ranks along `pipe` that use each parameter and buffer; the first keeps those that no layer uses."""
    users: dict[Tensor, set[int]] = {}
    for index, (start, stop) in enumerate(ranges):
        for _, layer in layers[start:stop]:
            for tensor in [*layer.parameters(), *layer.buffers()]:
                # Buffers may be shared by layers of several stages; parameters may not (`check_no_shared_parameters`).
                users.setdefault(tensor, set()).add(index % num_ranks)
    for tensor in [*model.parameters(), *model.buffers()]:
        users.setdefault(tensor, {0})
    return users


def _state_devices(state: dict[int, dict[str, Any]]) -> dict[str, torch.device]:
    """Return the device of each kind of optimiser state: some optimisers count steps on the CPU."""
    return {
        key: value.device for entries in state.values() for key, value in entries.items() if isinstance(value, Tensor)
    }


def _on_devices(
    entries: dict[str, Any], parameter: Tensor, shape: torch.Size, devices: dict[str, torch.device]
) -> dict[str, Any]:
    """Move the optimiser state of another rank's parameter to the devices on which this rank keeps such state."""
    return {
        # Where this rank has no such state itself: state of the parameter's shape, such as momentum, goes to the
        # parameter's device, and the rest, such as a step count, stays where it was.
        key: value.to(devices.get(key, parameter.device if value.shape == shape else value.device))
        if isinstance(value, Tensor)
        else value
        for key, value in entries.items()
    }


def _refuse_forward(*_: Any, **__: Any) -> Any:
    """Stands in for the model's `forward` while ranks hold parts of it only."""
    raise ConfigError(
        "this model is in stages on several ranks. Train with `pipeline = job.pipeline(loss_fn)` and "
        "`loss = pipeline(x, y)`; evaluate within job.consensus()."
    )
