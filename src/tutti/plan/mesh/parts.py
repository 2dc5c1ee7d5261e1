"""`ModelParts`: the parts of a model that ranks of a mesh would have, each profiled once."""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tutti.errors import ConfigError
from tutti.parallel.pipeline.cut import balanced_cut, check_layers_fit
from tutti.parallel.pipeline.layers import Layers, StageModule, check_no_shared_parameters, sequential_layers
from tutti.parallel.pipeline.measure import LayerCost, measure_layers
from tutti.parallel.tensor.plan import nothing_split_mistakes, tensor_plan
from tutti.plan.mesh.dry_run import TracedCollective, traced_mesh
from tutti.plan.mesh.stage_profile import Clock, StageProfile, profile_stage
from tutti.replica.samples import num_rows


@dataclass(frozen=True)
class StagePart:
    """The stage of one rank."""

    profile: StageProfile
    output_bytes: tuple[int, ...]
    """Bytes of each tensor that is sent to the next stage."""


class ModelParts:
    """Profiles of the parts that ranks of a mesh would have of a model.

    Args:
        example: one batch of inputs; several inputs are a tuple.
        now: the clock by which computation is timed.
    """

    def __init__(self, model: nn.Module, example: Any, now: Clock = time.perf_counter) -> None:
        self._model = copy.deepcopy(model)  # Profiling changes gradients, buffers and, while sharded, parameters.
        self._args = example if isinstance(example, tuple) else (example,)
        self._now = now
        self.num_samples = num_rows(self._args)
        # Meshes that differ in `data` only have the same parts. A refusal is kept too, so that it is found once.
        self._profiled: dict[tuple[int, int], list[StagePart] | ConfigError] = {}

    @cached_property
    def full_model(self) -> StageProfile:
        """The profile of a rank that has all of the model."""
        return self.stages(1, 1)[0].profile

    def stages(self, num_tensor_ranks: int, num_stages: int) -> list[StagePart]:
        """Return the part of the first tensor-parallel rank in each stage.

        Raises `ConfigError` if the model cannot be split so.
        """
        key = num_tensor_ranks, num_stages
        if key not in self._profiled:
            try:
                self._profiled[key] = self._profile(num_tensor_ranks, num_stages)
            except ConfigError as error:
                self._profiled[key] = error
        stages = self._profiled[key]
        if isinstance(stages, ConfigError):
            raise stages
        return stages

    def _profile(self, num_tensor_ranks: int, num_stages: int) -> list[StagePart]:
        plan = tensor_plan(self._model, num_tensor_ranks)
        if num_tensor_ranks > 1 and (mistakes := nothing_split_mistakes(plan)):
            raise ConfigError(mistakes[0])
        rules = {module: plan.style_of(name) for name, module in self._model.named_modules()}
        parts = []
        # Random numbers that layers draw, as dropout does, must not advance the user's sequence.
        for number, (stage, values, output_bytes) in enumerate(self._cut(num_stages)):
            with torch.random.fork_rng(), torch.enable_grad(), self._split(stage, rules, num_tensor_ranks) as trace:
                profile = profile_stage(stage, values, trace, self._now, number == 0)
                parts.append(StagePart(profile, output_bytes))
        return parts

    def _cut(self, num_stages: int) -> list[tuple[nn.Module, Sequence[Any], tuple[int, ...]]]:
        """Return each stage, its inputs, and the bytes of its outputs."""
        if num_stages == 1:
            return [(self._model, self._args, ())]
        layers, costs, inputs = self._sequence
        # Only the number of layers is checked here: memory is judged by the planner.
        check_layers_fit([cost.name for cost in costs], num_stages, [0] * len(costs), None)
        seconds = [cost.seconds for cost in costs]
        # A virtual clock that counts no operations measures zeros: balance parameters, and layers without any, then.
        weights = seconds if any(seconds) else [1.0 + cost.parameter_bytes for cost in costs]
        spans = balanced_cut(weights, num_stages)
        assert spans is not None  # Only a memory limit can make a cut impossible, and none is given.
        stages: list[tuple[nn.Module, Sequence[Any], tuple[int, ...]]] = []
        for start, stop in spans:
            output_bytes = tuple(tensor.nbytes for tensor in inputs[stop]) if stop < len(layers) else ()
            stages.append((StageModule(layers[start:stop]), inputs[start], output_bytes))
        return stages

    @cached_property
    def _sequence(self) -> tuple[Layers, list[LayerCost], list[tuple[Tensor, ...]]]:
        """The layers in sequence, the cost of each, and the inputs of each."""
        example = self._args if len(self._args) > 1 else self._args[0]
        layers = sequential_layers(self._model, example)
        check_no_shared_parameters(layers)
        inputs = [self._args]  # Of each layer, and after them the model's output.
        with torch.no_grad(), torch.random.fork_rng():
            for _, layer in layers:
                output = layer(*inputs[-1])
                inputs.append(output if isinstance(output, tuple) else (output,))
        return layers, measure_layers(layers, example, self._now), inputs

    @contextmanager
    def _split(self, stage: nn.Module, rules: Any, num_ranks: int) -> Iterator[list[TracedCollective]]:
        """Within it, the stage has the shards of the first of `num_ranks` ranks; yields the trace of collectives."""
        if num_ranks == 1:
            yield []
            return
        from tutti.parallel.tensor.sharded_model import ShardedModel, implicit_replication  # Imports torch's compiler.

        # `abandon` leaves shards in the parameters, because it must not communicate: keep the full data here.
        before = [(parameter, parameter.data) for parameter in stage.parameters()]
        device = next((parameter.device.type for parameter, _ in before), "cpu")
        # Sharding also shards the state of an optimiser. There is none to measure here, so it gets an empty one.
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
        with traced_mesh(num_ranks, device) as (mesh, trace), implicit_replication():
            split = ShardedModel(stage, rules, mesh, optimizer)
            try:
                yield trace
            finally:
                split.abandon()
                for parameter, data in before:
                    parameter.data, parameter.grad = data, None
