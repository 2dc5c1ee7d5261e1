"""What one rank of a mesh does of a step: tried out here, on the stage and the pieces of layers that it would have."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tutti.cost import Gradient
from tutti.plan.mesh.dry_run import TracedCollective
from tutti.plan.profile.memory import kept_bytes, most_bytes, storage_bytes

Clock = Callable[[], float]

_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One stage forward and backward, by a rank that splits its layers with others."""

    forward_s: float
    backward_s: float
    """Of computing alone."""
    forward: tuple[TracedCollective, ...]
    """What those who split layers say to each other."""
    backward: tuple[TracedCollective, ...]
    gradients: tuple[tuple[Gradient, int], ...]
    """As they become ready, each with how much of `backward` was said before."""
    parameter_bytes: int
    """And of buffers."""
    taken_bytes: int
    """Of what it is given."""
    kept_bytes: int
    """Between forward and backward, besides."""
    most_bytes: int
    """In use at once, gradients included, besides parameters and what the stage takes."""

    @property
    def gradient_bytes(self) -> int:
        return sum(gradient.num_bytes for gradient, _ in self.gradients)


def try_out(stage: nn.Module, values: Sequence[Any], said: list[TracedCollective], now: Clock, first: bool) -> Trial:
    """Take a stage forward and backward on what it is given; `said` is where what ranks say is written down."""
    run = _Passes(stage, values, said, now, first)
    run.take()  # Caches are cold.
    best = min((run.take() for _ in range(_ROUNDS)), key=lambda each: each.forward_s + each.backward_s)
    there = [*stage.parameters(), *stage.buffers(), *run.values]
    device = next((tensor.device for tensor in there), torch.device("cpu"))
    run.forget()
    kept = kept_bytes(run.forward, there, device)
    most = most_bytes(lambda: run.backward(run.forward()), there, device)
    run.forget()
    held = sum(tensor.nbytes for tensor in [*stage.parameters(), *stage.buffers()])
    taken = storage_bytes(each for each in run.values if isinstance(each, Tensor))
    return Trial(**vars(best), parameter_bytes=held, taken_bytes=taken, kept_bytes=kept, most_bytes=most)


@dataclass
class _Taken:
    forward_s: float
    backward_s: float
    forward: tuple[TracedCollective, ...]
    backward: tuple[TracedCollective, ...]
    gradients: tuple[tuple[Gradient, int], ...]


class _Passes:
    """Of one stage, as often as is asked."""

    def __init__(
        self, stage: nn.Module, values: Sequence[Any], said: list[TracedCollective], now: Clock, first: bool
    ) -> None:
        self._stage, self._said, self._now = stage, said, now
        self.values = [_taken(value, first) for value in values]
        self._trained = {name: p for name, p in stage.named_parameters() if p.requires_grad}

    def forward(self) -> list[Tensor]:
        made = self._stage(*self.values)
        outputs = made if isinstance(made, tuple | list) else (made,)
        return [it for it in outputs if isinstance(it, Tensor) and it.requires_grad]

    def backward(self, outputs: list[Tensor]) -> None:
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(it) for it in outputs])

    def take(self) -> _Taken:
        self.forget()
        self._said.clear()
        start_s = self._now()
        outputs = self.forward()
        middle_s, before = self._now(), len(self._said)
        with self._watched(middle_s, before) as ready:
            self.backward(outputs)
        end_s = self._now()
        forward, backward = tuple(self._said[:before]), tuple(self._said[before:])
        late = [name for name in self._trained if name not in ready]
        ready |= {name: (end_s - middle_s, len(backward)) for name in late}
        gradients = tuple((self._gradient(name, ready_s), number) for name, (ready_s, number) in ready.items())
        return _Taken(middle_s - start_s, end_s - middle_s, forward, backward, gradients)

    def forget(self) -> None:
        for tensor in [*self._trained.values(), *self.values]:
            if isinstance(tensor, Tensor):
                tensor.grad = None

    @contextmanager
    def _watched(self, start_s: float, before: int) -> Iterator[dict[str, tuple[float, int]]]:
        ready: dict[str, tuple[float, int]] = {}

        def arrived(name: str) -> Callable[[Tensor], None]:
            return lambda _: ready.update({name: (self._now() - start_s, len(self._said) - before)})

        handles = [p.register_post_accumulate_grad_hook(arrived(name)) for name, p in self._trained.items()]
        try:
            yield ready
        finally:
            for handle in handles:
                handle.remove()

    def _gradient(self, name: str, ready_s: float) -> Gradient:
        parameter = self._trained[name]
        return Gradient(name=name, shape=tuple(parameter.shape), num_bytes=parameter.nbytes, ready_s=ready_s)


def _taken(value: Any, first: bool) -> Any:
    """As a stage takes it: from another stage, its gradient is wanted."""
    return (
        value.detach().requires_grad_(value.is_floating_point() and not first) if isinstance(value, Tensor) else value
    )
