"""A model as the ranks of meshes would have it: each stage and each way of splitting its layers is tried out once."""

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
from tutti.parallel.pipeline.cut import balanced, check_fits
from tutti.parallel.pipeline.layers import Layers, Stage, check_apart, layers_of
from tutti.parallel.pipeline.measure import LayerCost, measure
from tutti.parallel.tensor.plan import refuse_if_whole, tensor_plan
from tutti.plan.mesh.dry_run import TracedCollective, traced_mesh
from tutti.plan.mesh.trial import Clock, Trial, try_out
from tutti.replica.samples import num_rows


@dataclass(frozen=True)
class StagePart:
    """One rank's stage."""

    trial: Trial
    gives: tuple[int, ...]
    """Bytes of each tensor that goes to the next stage."""


class Parts:
    """Of a model, tried out on an example of what it takes.

    Args:
        example: one input, or several in a tuple.
        now: the clock by which computing is timed.
    """

    def __init__(self, model: nn.Module, example: Any, now: Clock = time.perf_counter) -> None:
        self._model = copy.deepcopy(model)
        self._args = example if isinstance(example, tuple) else (example,)
        self._now = now
        self.num_samples = num_rows(self._args)
        self._known: dict[tuple[int, int], list[StagePart] | ConfigError] = {}

    @cached_property
    def whole(self) -> Trial:
        """One rank that has it all."""
        return self.stages(1, 1)[0].trial

    def stages(self, num_splitting: int, num_stages: int) -> list[StagePart]:
        """What the first of the ranks that split layers does in each stage; `ConfigError` if that cannot be."""
        key = num_splitting, num_stages
        if key not in self._known:
            try:
                self._known[key] = self._try(num_splitting, num_stages)
            except ConfigError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, ConfigError):
            raise found
        return found

    def _try(self, num_splitting: int, num_stages: int) -> list[StagePart]:
        plan = tensor_plan(self._model, num_splitting)
        if num_splitting > 1 and (mistakes := refuse_if_whole(plan)):
            raise ConfigError(mistakes[0])
        ways = {module: plan.way_of(name) for name, module in self._model.named_modules()}
        found = []
        for number, (stage, values, gives) in enumerate(self._cut(num_stages)):
            with torch.random.fork_rng(), torch.enable_grad(), self._split(stage, ways, num_splitting) as said:
                found.append(StagePart(try_out(stage, values, said, self._now, number == 0), gives))
        return found

    def _cut(self, num_stages: int) -> list[tuple[nn.Module, Sequence[Any], tuple[int, ...]]]:
        """Each stage, what it takes, and the bytes of what it gives."""
        if num_stages == 1:
            return [(self._model, self._args, ())]
        layers, costs, inputs = self._sequence
        check_fits([cost.name for cost in costs], num_stages, [0] * len(costs), None)
        seconds = [cost.seconds for cost in costs]
        spans = balanced(seconds if any(seconds) else [1.0 + cost.parameter_bytes for cost in costs], num_stages)
        assert spans is not None
        made: list[tuple[nn.Module, Sequence[Any], tuple[int, ...]]] = []
        for start, stop in spans:
            given = tuple(tensor.nbytes for tensor in inputs[stop]) if stop < len(layers) else ()
            made.append((Stage(layers[start:stop]), inputs[start], given))
        return made

    @cached_property
    def _sequence(self) -> tuple[Layers, list[LayerCost], list[tuple[Tensor, ...]]]:
        """Layers one after the other, what each costs, and what it takes."""
        example = self._args if len(self._args) > 1 else self._args[0]
        layers = layers_of(self._model, example)
        check_apart(layers)
        inputs = [self._args]
        with torch.no_grad(), torch.random.fork_rng():
            for _, layer in layers:
                made = layer(*inputs[-1])
                inputs.append(made if isinstance(made, tuple) else (made,))
        return layers, measure(layers, example, self._now), inputs

    @contextmanager
    def _split(self, stage: nn.Module, ways: Any, num_ranks: int) -> Iterator[list[TracedCollective]]:
        """Within it, the stage has the pieces of the first of so many ranks."""
        if num_ranks == 1:
            yield []
            return
        from tutti.parallel.tensor.split import TensorSplit, implicit_replication  # Costs a compiler's import.

        before = [(parameter, parameter.data) for parameter in stage.parameters()]
        device = next((parameter.device.type for parameter, _ in before), "cpu")
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
        with traced_mesh(num_ranks, device) as (mesh, said), implicit_replication():
            split = TensorSplit(stage, ways, mesh, optimizer)
            try:
                yield said
            finally:
                split.abandon()
                for parameter, data in before:
                    parameter.data, parameter.grad = data, None
