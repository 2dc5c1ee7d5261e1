"""`StageProfile`: the passes of one rank of a mesh, measured here on the stage and the shards that it would have."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tutti.cost import Gradient
from tutti.plan.mesh.dry_run import TracedCollective
from tutti.plan.profile.memory import kept_bytes, peak_bytes, storage_bytes

Clock = Callable[[], float]

_ROUNDS = 3
"""Timed repetitions; the fastest is used, because other load on the machine only adds time."""


@dataclass(frozen=True, kw_only=True)
class StageProfile:
    """Forward and backward of one stage, on a rank that splits its layers with others."""

    forward_s: float
    """Seconds of computation in forward, without communication."""
    backward_s: float
    """Seconds of computation in backward, without communication."""
    forward: tuple[TracedCollective, ...]
    """Collectives of forward, between the ranks that split layers."""
    backward: tuple[TracedCollective, ...]
    """Collectives of backward."""
    gradients: tuple[tuple[Gradient, int], ...]
    """Gradients in the order in which they become ready, each with the number of backward collectives before it."""
    parameter_bytes: int
    """Bytes of parameters and buffers."""
    input_bytes: int
    """Bytes of the stage's inputs."""
    kept_bytes: int
    """Bytes of activations that are kept between forward and backward."""
    peak_bytes: int
    """Peak bytes in use, gradients included, without parameters and inputs."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(gradient.num_bytes for gradient, _ in self.gradients)


def profile_stage(
    stage: nn.Module, values: Sequence[Any], trace: list[TracedCollective], now: Clock, first: bool
) -> StageProfile:
    """Run a stage forward and backward, and measure both.

    Args:
        values: its inputs.
        trace: the list to which its collectives are appended.
        first: whether it is the first stage, whose inputs need no gradient.
    """
    runner = _StageRunner(stage, values, trace, now, first)
    runner.measure()  # Not counted: caches are cold.
    best = min((runner.measure() for _ in range(_ROUNDS)), key=lambda passes: passes.forward_s + passes.backward_s)
    # Memory is measured in passes of its own: counting allocations would slow the timed ones.
    resident = [*stage.parameters(), *stage.buffers(), *runner.values]
    device = next((tensor.device for tensor in resident), torch.device("cpu"))
    runner.drop_gradients()
    kept = kept_bytes(runner.forward, resident, device)
    peak = peak_bytes(lambda: runner.backward(runner.forward()), resident, device)
    runner.drop_gradients()
    parameter_bytes = sum(tensor.nbytes for tensor in [*stage.parameters(), *stage.buffers()])
    input_bytes = storage_bytes(value for value in runner.values if isinstance(value, Tensor))
    return StageProfile(
        **vars(best), parameter_bytes=parameter_bytes, input_bytes=input_bytes, kept_bytes=kept, peak_bytes=peak
    )


@dataclass
class _Passes:
    """One forward and one backward pass: the fields of `StageProfile` of the same names."""

    forward_s: float
    backward_s: float
    forward: tuple[TracedCollective, ...]
    backward: tuple[TracedCollective, ...]
    gradients: tuple[tuple[Gradient, int], ...]


class _StageRunner:
    """Runs the passes of one stage, as often as is asked."""

    def __init__(
        self, stage: nn.Module, values: Sequence[Any], trace: list[TracedCollective], now: Clock, first: bool
    ) -> None:
        self._stage, self._trace, self._now = stage, trace, now
        self.values = [_stage_input(value, first) for value in values]
        self._trained = {name: p for name, p in stage.named_parameters() if p.requires_grad}

    def forward(self) -> list[Tensor]:
        output = self._stage(*self.values)
        outputs = output if isinstance(output, tuple | list) else (output,)
        return [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]

    def backward(self, outputs: list[Tensor]) -> None:
        if outputs:
            # The next stage would send these gradients. Their values do not matter for time and memory.
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

    def measure(self) -> _Passes:
        """Run both passes once, and time them."""
        # Every repetition then does the same work: a first gradient is stored, and later ones would be added to it.
        self.drop_gradients()
        self._trace.clear()
        start_s = self._now()
        outputs = self.forward()
        middle_s, num_forward = self._now(), len(self._trace)
        with self._recorded_gradients(middle_s, num_forward) as ready:
            self.backward(outputs)
        end_s = self._now()
        forward, backward = tuple(self._trace[:num_forward]), tuple(self._trace[num_forward:])
        # A parameter that got no gradient is still exchanged: as if it were ready at the end.
        late = [name for name in self._trained if name not in ready]
        ready |= {name: (end_s - middle_s, len(backward)) for name in late}
        gradients = tuple((self._gradient(name, ready_s), number) for name, (ready_s, number) in ready.items())
        return _Passes(middle_s - start_s, end_s - middle_s, forward, backward, gradients)

    def drop_gradients(self) -> None:
        for tensor in [*self._trained.values(), *self.values]:
            if isinstance(tensor, Tensor):
                tensor.grad = None

    @contextmanager
    def _recorded_gradients(self, start_s: float, num_forward: int) -> Iterator[dict[str, tuple[float, int]]]:
        """Within it, record when each gradient is ready, and after how many collectives of backward.

        Collectives take no time here, so that `RankStep` can add what they would take on a given network.
        """
        ready: dict[str, tuple[float, int]] = {}

        # A function of its own, because a lambda in the loop below would see the loop's last name only.
        def arrived(name: str) -> Callable[[Tensor], None]:
            return lambda _: ready.update({name: (self._now() - start_s, len(self._trace) - num_forward)})

        handles = [p.register_post_accumulate_grad_hook(arrived(name)) for name, p in self._trained.items()]
        try:
            yield ready
        finally:
            for handle in handles:
                handle.remove()

    def _gradient(self, name: str, ready_s: float) -> Gradient:
        parameter = self._trained[name]
        return Gradient(name=name, shape=tuple(parameter.shape), num_bytes=parameter.nbytes, ready_s=ready_s)


def _stage_input(value: Any, first: bool) -> Any:
    """Return the input as a stage receives it: one that comes from another stage needs a gradient."""
    return (
        value.detach().requires_grad_(value.is_floating_point() and not first) if isinstance(value, Tensor) else value
    )
