"""`LayerTimer`: splits the time of a forward and a backward pass among the layers.

How it works. Hooks append marks: a moment of the clock, and the layer that owns the time from then on. In forward, a
layer owns the time from its call to its return, without that of layers inside it. Backward computes in the opposite
order: prehooks of autograd nodes give the time to a layer when backward reaches the node that made its output. They
take it away when backward reaches another layer's node, or one that made a layer's input outside any layer. The time
of the hooks themselves is marked as such and counts nowhere.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tutti.plan.profile.clock import Clock, Moment
from tutti.plan.profile.layers import Layer
from tutti.plan.profile.trace import HOOKS, OUTSIDE_LAYERS, Interval, PassTrace
from tutti.plan.profile.training_pass import TrainingPass


class LayerTimer:
    """Times the passes of a model, layer by layer."""

    def __init__(self, training_pass: TrainingPass, layers: list[Layer], clock: Clock) -> None:
        self._training_pass, self._clock = training_pass, clock
        self._modules = [layer.module for layer in layers]
        self._parameters = {name: p for name, p in training_pass.model.named_parameters() if p.requires_grad}
        self._reset()

    def _reset(self) -> None:
        self._marks: list[tuple[Moment, int]] = []
        """Moments, each with the owner of the time from then on."""
        self._stack: list[int] = [OUTSIDE_LAYERS]
        """Layers whose forward is running, the innermost last."""
        self._nodes: set[Any] = set()
        """Autograd nodes that have a hook."""
        self._ready: dict[str, int] = {}
        """The number of marks before each gradient arrived, by parameter."""

    def measure(self) -> PassTrace:
        """Run a forward and a backward pass, and return their trace."""
        with self._hooked():
            self._clock.settle()  # Work that was submitted before must not count.
            self._mark(OUTSIDE_LAYERS)
            loss = self._training_pass.forward()
            middle = len(self._marks)  # The next mark ends forward and starts backward: both slices below have it.
            self._mark(OUTSIDE_LAYERS)
            loss.backward()
            self._mark(OUTSIDE_LAYERS)
            self._clock.settle()
            ready = {name: index - middle for name, index in sorted(self._ready.items(), key=lambda item: item[1])}
            return PassTrace(self._intervals(self._marks[: middle + 1]), self._intervals(self._marks[middle:]), ready)

    def _intervals(self, marks: list[tuple[Moment, int]]) -> list[Interval]:
        return [(owner, self._clock.seconds(moment, later)) for (moment, owner), (later, _) in pairwise(marks)]

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        handles: list[Any] = []
        for number, module in enumerate(self._modules):
            handles.append(module.register_forward_pre_hook(self._called(number), with_kwargs=True))
            # Activation checkpointing ends its recomputation by an exception, once it has all it needs.
            handles.append(module.register_forward_hook(self._returned(number), always_call=True))
        for name, parameter in self._parameters.items():
            handles.append(parameter.register_post_accumulate_grad_hook(self._arrived(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._reset()  # Nodes hold hooks that hold this timer, which holds the nodes: break the cycle.

    def _mark(self, owner: int) -> None:
        self._marks.append((self._clock.now(), owner))

    def _called(self, number: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._mark(HOOKS)
            # The inputs were made by the layer around this one, or outside: backward returns there after this layer.
            self._claim((args, kwargs), self._stack[-1])
            self._stack.append(number)
            self._mark(number)

        return hook

    def _returned(self, number: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            self._mark(HOOKS)
            self._claim(output, number)
            self._stack.pop()
            self._mark(self._stack[-1])

        return hook

    def _claim(self, value: Any, owner: int) -> None:
        """Give backward's time to `owner` from the nodes of these tensors on, unless a node has an owner already."""
        for leaf in tree_leaves(value):
            node = leaf.grad_fn if isinstance(leaf, Tensor) else None
            # A tensor may pass through several layers unchanged. The first to claim its node made it.
            if node is not None and node not in self._nodes:
                self._nodes.add(node)
                node.register_prehook(lambda _: self._mark(owner))

    def _arrived(self, name: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            self._ready[name] = len(self._marks)
            self._mark(self._marks[-1][1])  # The owner stays: a gradient arrives in the midst of its layer's backward.

        return hook
