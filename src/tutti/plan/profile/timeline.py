"""Whose time it is, at every moment of a pass forward and backward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tutti.plan.profile.clock import Clock, Moment
from tutti.plan.profile.layers import Layer
from tutti.plan.profile.problem import Problem
from tutti.plan.profile.trace import BETWEEN, HOOKS, Interval, Trace


class Timeline:
    """Takes passes of a model apart by its layers.

    Forward, a layer's time is from its call to its return, without that of layers in it. Backward computes what
    forward did in the opposite order: a layer's time begins when backward comes to the node that made its output,
    and ends when it comes to another layer's, or to one that made a layer's input outside any.
    """

    def __init__(self, problem: Problem, layers: list[Layer], clock: Clock) -> None:
        self._problem, self._clock = problem, clock
        self._modules = [layer.module for layer in layers]
        self._parameters = {name: p for name, p in problem.model.named_parameters() if p.requires_grad}
        self._forget()

    def _forget(self) -> None:
        self._marks: list[tuple[Moment, int]] = []
        """From when on time is whose."""
        self._inside: list[int] = [BETWEEN]
        self._nodes: set[Any] = set()
        self._ready: dict[str, int] = {}

    def take(self) -> Trace:
        """Of a pass forward and backward, made now."""
        with self._hooked():
            self._clock.settle()
            self._turn(BETWEEN)
            loss = self._problem.forward()
            middle = len(self._marks)
            self._turn(BETWEEN)
            loss.backward()
            self._turn(BETWEEN)
            self._clock.settle()
            ready = {name: place - middle for name, place in sorted(self._ready.items(), key=lambda item: item[1])}
            return Trace(self._intervals(self._marks[: middle + 1]), self._intervals(self._marks[middle:]), ready)

    def _intervals(self, marks: list[tuple[Moment, int]]) -> list[Interval]:
        return [(whose, self._clock.seconds(moment, later)) for (moment, whose), (later, _) in pairwise(marks)]

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        handles: list[Any] = []
        for number, module in enumerate(self._modules):
            handles.append(module.register_forward_pre_hook(self._called(number), with_kwargs=True))
            # A checkpoint ends what it computes again by an exception, once it has all it needs.
            handles.append(module.register_forward_hook(self._returned(number), always_call=True))
        for name, parameter in self._parameters.items():
            handles.append(parameter.register_post_accumulate_grad_hook(self._arrived(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._forget()  # Nodes have hooks that have the timeline: without this they would keep each other.

    def _turn(self, whose: int) -> None:
        self._marks.append((self._clock.now(), whose))

    def _called(self, number: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._turn(HOOKS)
            self._claim((args, kwargs), self._inside[-1])
            self._inside.append(number)
            self._turn(number)

        return hook

    def _returned(self, number: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            self._turn(HOOKS)
            self._claim(output, number)
            self._inside.pop()
            self._turn(self._inside[-1])

        return hook

    def _claim(self, value: Any, whose: int) -> None:
        """Backward's time is `whose` from where it comes to these tensors, unless they had been made before."""
        for leaf in tree_leaves(value):
            node = leaf.grad_fn if isinstance(leaf, Tensor) else None
            if node is not None and node not in self._nodes:
                self._nodes.add(node)
                node.register_prehook(lambda _: self._turn(whose))

    def _arrived(self, name: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            self._ready[name] = len(self._marks)
            self._turn(self._marks[-1][1])

        return hook
