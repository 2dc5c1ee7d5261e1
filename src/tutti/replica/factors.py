"""Layers whose gradient is a matrix product: its factors are caught in backward, and the product is not made.

The gradient of W in y = x Wᵀ is Eᵀ A, where A is x and E the gradient of y, with one row each for every row of a batch.
Where rows are few, the factors are smaller than the product (Xie et al. 2015).
"""

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from tutti.replica.buckets import Slot

Pair = tuple[Tensor, Tensor]
"""Gradients of outputs and inputs: rows of (out) and of (in) features."""


class FactoredLayer:
    """A layer, what was caught of it in this backward pass, and what is kept of passes before that stayed here."""

    def __init__(self, slot: Slot, module: nn.Module) -> None:
        self.slot = slot
        self.module = module
        self.num_out, self.num_in = slot.tensor.shape[:2]
        self.rows = 0
        """How many went forward while the layer was only watched."""
        self.catching = False
        self.beside = False
        """Whether factors are kept beside the gradient, which is made as well, if they are smaller."""
        self.pairs: list[Pair] = []
        self._kept: list[Pair] = []
        self._kept_as: list[tuple[Tensor, int]] = []
        """The gradient that is the product of what was kept, and what was kept, each with its version."""
        self.expect()

    def expect(self) -> None:
        """Get ready for the next backward pass."""
        self.handed_over = False
        self._forwards = self._caught = 0
        self.pairs = []

    @property
    def complete(self) -> bool:
        """Whether nothing more is to come in this backward pass, as far as can be known."""
        return not self.handed_over and 0 < self._forwards <= self._caught

    def went_forward(self, x: Tensor) -> None:
        """A forward pass has begun, or is done again in backward."""
        again = torch._C._current_graph_task_id() != -1
        if not self.catching:
            self.rows += 0 if again and self.rows else x.numel() // self.num_in
        elif not again or self._forwards == self._caught:
            self._forwards += 1

    def catch(self, pair: Pair, stays: bool) -> None:
        """Keep a pair for the exchange of this pass or, if it `stays` on this rank for now or comes too late, add it.

        What stays is the gradient as the user sees it, and will be exchanged as factors if nobody has touched it until
        then.
        """
        self._caught += 1
        if not stays and not self.handed_over:
            self.pairs.append(pair)
            return
        untouched = stays and self._untouched()
        grad = self._add(product([pair], self.slot.tensor), replacing=untouched and not self._kept)
        if untouched:
            self._kept.append(pair)
            tensors = [grad, *(factor for kept in self._kept for factor in kept)]
            self._kept_as = [(tensor, tensor._version) for tensor in tensors]
        else:
            self._forget()

    def hand_over(self) -> list[Pair]:
        """All pairs of this exchange."""
        self.handed_over = True
        if self._kept and self._untouched():
            self.pairs = self._kept + self.pairs
            if not self.beside:
                self.slot.tensor.grad = None
        self._forget()
        return self.pairs

    @property
    def has_more(self) -> bool:
        """Whether there is a gradient that the pairs do not hold: of earlier passes, or of the weight's other uses."""
        grad = self.slot.tensor.grad
        return grad is not None and not grad.is_meta and bool(grad.any())

    def _untouched(self) -> bool:
        """Whether the gradient is what was kept, and no more."""
        grad = self.slot.tensor.grad
        if not self._kept_as:
            return grad is None or not grad.any()
        return grad is self._kept_as[0][0] and all(tensor._version == version for tensor, version in self._kept_as)

    def _forget(self) -> None:
        self._kept, self._kept_as = [], []

    def _add(self, gradient: Tensor, replacing: bool) -> Tensor:
        """The sum; in memory of its own if it replaces zeros, since versions of views are those of all of them."""
        tensor = self.slot.tensor
        if tensor.grad is None or replacing:
            tensor.grad = gradient
        else:
            tensor.grad.add_(gradient)
        return tensor.grad


def product(pairs: list[Pair], like: Tensor) -> Tensor:
    """Σ Eᵀ A, as a gradient of the parameter `like`."""
    made = [torch.mm(e.to(like.dtype).t(), a.to(like.dtype)) for e, a in pairs]
    return torch.stack(made).sum(0).view_as(like) if len(made) > 1 else made[0].view_as(like)


class Catcher:
    """Has the linear layers of a model computed so that the factors of their gradients can be caught."""

    def __init__(self, model: nn.Module, slots: list[Slot], caught: Callable[[FactoredLayer, Pair], None]) -> None:
        self._tell = caught
        self.layers = layers_of(model, slots)
        mine = ref(self)
        for layer in self.layers:
            layer.module.forward = _Forward(layer.module, layer, mine)

    def keep(self, names: frozenset[str], beside: bool = False) -> None:
        """Catch the factors of these parameters from now on, and leave the other layers alone."""
        for layer in self.layers:
            layer.catching, layer.beside = layer.slot.name in names, beside
            layer.expect()
            if not layer.catching:
                _restore(layer.module)
        self.layers = [layer for layer in self.layers if layer.catching]

    def caught(self, layer: FactoredLayer, pair: Pair) -> None:
        self._tell(layer, pair)

    def detach(self) -> None:
        for layer in self.layers:
            _restore(layer.module)
        self.layers = []


def _restore(module: nn.Module) -> None:
    if isinstance(module.__dict__.get("forward"), _Forward):
        del module.forward


def layers_of(model: nn.Module, slots: list[Slot]) -> list[FactoredLayer]:
    """Those of a model that have factors, in the order of their names."""
    by_tensor = {id(slot.tensor): slot for slot in slots}
    found = [(by_tensor.get(id(module.weight)), module) for module in factorable(model)]
    layers = [FactoredLayer(slot, module) for slot, module in found if slot is not None]
    return sorted(layers, key=lambda layer: layer.slot.name)


def factorable(model: nn.Module) -> Iterator[nn.Module]:
    """Linear layers and convolutions of single points whose weight no other module has."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or owners[id(weight)] > 1 or not weight.is_floating_point():
            continue
        if _is_linear(module) or _is_pointwise(module):
            yield module


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward and "forward" not in module.__dict__


def _is_pointwise(module: nn.Module) -> bool:
    """Whether a convolution is a linear layer over channels, at every point by itself."""
    if not isinstance(module, _ConvNd) or "forward" in module.__dict__:
        return False
    ones = (1,) * len(module.kernel_size)
    plain = type(module).forward in (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)
    same = module.kernel_size == ones and module.stride == ones and not any(module.padding)
    return plain and same and module.groups == 1


class _Forward:
    """What a layer does instead of its own forward. A copy of the model, also a pickled one, does its own."""

    def __init__(self, module: nn.Module, layer: FactoredLayer, catcher: "ref[Catcher]") -> None:
        self._module, self._layer, self._catcher = module, layer, catcher
        self._own: Callable[[nn.Module, Tensor], Tensor] = type(module).forward

    def __call__(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._own(self._module, input)
        catcher = self._catcher()
        if catcher is not None and self._can_catch(input):
            self._layer.went_forward(input)
            if self._layer.catching:
                made: Tensor = _Product.apply(input, self._module.weight, self._module.bias, (self._layer, catcher))
                return made
        return self._own(self._module, input)

    def _can_catch(self, input: Tensor) -> bool:
        weight = self._layer.slot.tensor
        trained = self._module.weight is weight and weight.requires_grad and torch.is_grad_enabled()
        if weight._backward_hooks:  # They want to see, or change, the gradient as a whole.
            return False
        if not trained or not (input.dim() > 1 if weight.dim() == 2 else input.dim() == weight.dim()):
            return False
        rows = input.numel() // self._layer.num_in
        return not self._layer.beside or rows * sum(weight.shape[:2]) < weight.numel()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module]]:
        return _own_forward, (self._module,)


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    return MethodType(type(module).forward, module)


class _Product(torch.autograd.Function):
    """y = x Wᵀ + b, of whose backward the gradient of W is not computed but handed on in factors."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, where: tuple[FactoredLayer, Catcher]
    ) -> Tensor:
        if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        ctx.save_for_backward(x, weight)
        ctx.where = where
        return _FORWARD[weight.dim()](x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        layer, catcher = ctx.where
        by_x = by_weight = by_bias = None
        pair = _rows(grad, weight), _rows(x, weight)
        try:  # Not if only other gradients were asked for, as torch.autograd.grad does.
            accumulates = torch._C._will_engine_execute_node(ctx.next_functions[1][0])
        except RuntimeError:  # It is this very gradient that was asked for, by torch.autograd.grad.
            accumulates, by_weight = False, product([pair], weight)
        if accumulates:
            catcher.caught(layer, pair)
        matrix = weight.flatten(1).to(grad.dtype)
        if ctx.needs_input_grad[0]:
            by_x = grad @ matrix if weight.dim() == 2 else torch.einsum("mn,bm...->bn...", matrix, grad)
        if ctx.needs_input_grad[2]:
            by_bias = grad.flatten(0, -2).sum(0) if weight.dim() == 2 else grad.transpose(0, 1).flatten(1).sum(1)
        return by_x, by_weight, by_bias, None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `F.linear`, whose output may be a view, which nobody could change in place after a function of our own."""
    made = F.linear(x.flatten(0, -2), weight, bias)
    return torch.ops.aten._unsafe_view.default(made, [*x.shape[:-1], len(weight)])


_FORWARD: dict[int, Callable[..., Tensor]] = {2: _linear, 3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
"""By the dimensions of a weight."""


def _rows(tensor: Tensor, weight: Tensor) -> Tensor:
    """Samples, and points of them, as the rows of a matrix of features."""
    tensor = tensor.detach()
    if weight.dim() > 2:
        tensor = tensor.movedim(1, -1)
    return tensor.reshape(-1, tensor.shape[-1])
