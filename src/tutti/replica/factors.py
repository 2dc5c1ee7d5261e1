"""Factored gradients: layers whose gradient is a matrix product, whose factors are caught in backward instead.

The gradient of W in y = x Wᵀ is Eᵀ A, where A is x and E the gradient of y, with one row each for every row of a batch.
Where rows are few, the factors are smaller than the product (Xie et al. 2015).

How it works
------------
A `Catcher` replaces the `forward` of linear layers and 1×1 convolutions by `_Forward`, which computes the same by an
autograd function of our own, `_Product`. Its backward computes the gradients of x and b as usual. For W it gives
autograd nothing, and passes the pair (E, A) to the replica, in autograd's thread.

A layer is first only watched (`catching` is False): rows are counted, so that the strategy can decide whether factors
are smaller. `Catcher.keep` then starts catching for the layers that are worth it, and restores the others.

`FactoredLayer` counts forward passes and caught pairs. A layer used several times in one pass (a recurrent one) is
`complete` when as many pairs were caught as forward passes were made. After `hand_over` the exchange owns its pairs.

Gradient accumulation inside `no_sync`: the pair stays on this rank. It is added to `p.grad`, as the user expects, and
kept as well. If nobody has changed `p.grad` until the exchange (by tensor versions), the pairs are exchanged instead;
otherwise the gradient is exchanged as it is.

With `keeps_gradient`, the gradient is made as well, and goes into its bucket: for strategies that may use either.
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
"""A pair of factors (E, A): gradients of outputs, and inputs; a row per sample or point, a column per feature."""


class FactoredLayer:
    """A layer, the pairs caught of it in this backward pass, and those kept from passes that were not exchanged."""

    def __init__(self, slot: Slot, module: nn.Module) -> None:
        self.slot = slot
        self.module = module
        self.num_out, self.num_in = slot.tensor.shape[:2]
        self.rows = 0
        """Rows that went forward while the layer was only watched."""
        self.catching = False
        """Whether its factors are caught in place of its gradient."""
        self.keeps_gradient = False
        """Whether the gradient is made as well, and factors are kept in addition where they are smaller."""
        self.pairs: list[Pair] = []
        """Pairs of this exchange."""
        self._kept: list[Pair] = []
        """Pairs of passes inside `no_sync`, whose product is in `p.grad` as well."""
        self._kept_as: list[tuple[Tensor, int]] = []
        """The gradient that is the product of the kept pairs, and their factors, each with its tensor version then."""
        self.expect()

    def expect(self) -> None:
        """Get ready for the next backward pass."""
        self.handed_over = False
        self._forwards = self._caught = 0
        self.pairs = []

    @property
    def complete(self) -> bool:
        """Whether all forward passes have been matched by a pair, so that nothing more is expected in this pass."""
        return not self.handed_over and 0 < self._forwards <= self._caught

    def record_forward(self, x: Tensor) -> None:
        """Count a forward pass. One inside backward (activation checkpointing) repeats an earlier one."""
        again = torch._C._current_graph_task_id() != -1  # Not -1: called from inside a backward pass.
        if not self.catching:
            self.rows += 0 if again and self.rows else x.numel() // self.num_in
        # Reentrant checkpointing runs the first pass without grad, which is not counted: then the repetition counts.
        elif not again or self._forwards == self._caught:
            self._forwards += 1

    def catch(self, pair: Pair, stays: bool) -> None:
        """Keep a pair for this exchange; if it `stays` on this rank, or comes too late, add it to the gradient.

        A pair that stays is kept as well, and is exchanged later as factors if nobody has changed the gradient by then.
        """
        self._caught += 1
        if not stays and not self.handed_over:
            self.pairs.append(pair)
            return
        # Asked before the product is added, which changes the gradient.
        untouched = stays and self._untouched()
        grad = self._add(product([pair], self.slot.tensor), replacing=untouched and not self._kept)
        if untouched:
            self._kept.append(pair)
            # Inputs may be changed in place too, now that backward needs them no more: their versions count as well.
            tensors = [grad, *(factor for kept in self._kept for factor in kept)]
            self._kept_as = [(tensor, tensor._version) for tensor in tensors]
        else:
            self._forget()

    def hand_over(self) -> list[Pair]:
        """Return all pairs of this exchange, which owns them from now on."""
        self.handed_over = True
        if self._kept and self._untouched():
            self.pairs = self._kept + self.pairs
            # Its product is exchanged by the pairs: left here, it would be added a second time.
            if not self.keeps_gradient:
                self.slot.tensor.grad = None
        self._forget()
        return self.pairs

    @property
    def has_more(self) -> bool:
        """Whether there is a gradient besides the pairs: of earlier passes, or of other uses of the weight."""
        grad = self.slot.tensor.grad
        return grad is not None and not grad.is_meta and bool(grad.any())

    def _untouched(self) -> bool:
        """Whether the gradient is the product of the kept pairs and nothing else."""
        grad = self.slot.tensor.grad
        if not self._kept_as:
            return grad is None or not grad.any()
        # `zero_grad` makes another tensor or None; clipping and unscaling change the version.
        return grad is self._kept_as[0][0] and all(tensor._version == version for tensor, version in self._kept_as)

    def _forget(self) -> None:
        self._kept, self._kept_as = [], []

    def _add(self, gradient: Tensor, replacing: bool) -> Tensor:
        """Add to the gradient and return it.

        A gradient of zeros is replaced by memory of its own: views of a bucket share one version counter, which would
        change with every other gradient.
        """
        tensor = self.slot.tensor
        if tensor.grad is None or replacing:
            tensor.grad = gradient
        else:
            tensor.grad.add_(gradient)
        return tensor.grad


def product(pairs: list[Pair], like: Tensor) -> Tensor:
    """Return Σ Eᵀ A, as a gradient of the parameter `like`."""
    # (num_out, rows) @ (rows, num_in). Factors may be in half precision under autocast.
    products = [torch.mm(e.to(like.dtype).t(), a.to(like.dtype)) for e, a in pairs]
    return torch.stack(products).sum(0).view_as(like) if len(products) > 1 else products[0].view_as(like)


class Catcher:
    """Replaces the forward of a model's linear layers, so that the factors of their gradients can be caught."""

    def __init__(self, model: nn.Module, slots: list[Slot], on_caught: Callable[[FactoredLayer, Pair], None]) -> None:
        self.on_caught = on_caught
        """Called with the layer and each pair, in backward."""
        self.layers = layers_of(model, slots)
        catcher_ref = ref(self)  # Weak: modules must not keep the catcher, nor the replica behind it.
        for layer in self.layers:
            # An attribute of the instance hides the method of its class; `_restore` deletes it.
            layer.module.forward = _Forward(layer.module, layer, catcher_ref)

    def keep(self, names: frozenset[str], keeps_gradient: bool = False) -> None:
        """Catch the factors of these parameters from now on, and leave the other layers alone."""
        for layer in self.layers:
            layer.catching, layer.keeps_gradient = layer.slot.name in names, keeps_gradient
            layer.expect()
            if not layer.catching:
                _restore(layer.module)
        self.layers = [layer for layer in self.layers if layer.catching]

    def detach(self) -> None:
        """Restore the forward of all layers."""
        for layer in self.layers:
            _restore(layer.module)
        self.layers = []


def _restore(module: nn.Module) -> None:
    """Give a module its own forward back, if that was replaced here."""
    if isinstance(module.__dict__.get("forward"), _Forward):
        del module.forward


def layers_of(model: nn.Module, slots: list[Slot]) -> list[FactoredLayer]:
    """Return the layers of a model whose gradients can be factored, in the order of their names."""
    by_tensor = {id(slot.tensor): slot for slot in slots}
    candidates = [(by_tensor.get(id(module.weight)), module) for module in factorable(model)]
    layers = [FactoredLayer(slot, module) for slot, module in candidates if slot is not None]
    return sorted(layers, key=lambda layer: layer.slot.name)


def factorable(model: nn.Module) -> Iterator[nn.Module]:
    """Yield linear layers and 1×1 convolutions whose weight no other module has."""
    # A shared weight has one gradient for all its uses, which the factors of one module would not explain.
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
    # Subclasses with another forward, and instances that somebody has patched, are left alone.
    return type(module).forward is nn.Linear.forward and "forward" not in module.__dict__


def _is_pointwise(module: nn.Module) -> bool:
    """Whether a convolution is a linear layer over channels, applied at every point."""
    if not isinstance(module, _ConvNd) or "forward" in module.__dict__:
        return False
    ones = (1,) * len(module.kernel_size)
    plain = type(module).forward in (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)
    same = module.kernel_size == ones and module.stride == ones and not any(module.padding)
    return plain and same and module.groups == 1


class _Forward:
    """The forward of a watched layer. A copy of the model, also a pickled one, has the usual forward."""

    def __init__(self, module: nn.Module, layer: FactoredLayer, catcher: "ref[Catcher]") -> None:
        self._module, self._layer, self._catcher = module, layer, catcher
        self._usual: Callable[[nn.Module, Tensor], Tensor] = type(module).forward

    def __call__(self, input: Tensor) -> Tensor:
        # Dynamo must not trace the counting below: compiled layers exchange whole gradients.
        if torch.compiler.is_compiling():
            return self._usual(self._module, input)
        catcher = self._catcher()
        if catcher is not None and self._can_catch(input):
            self._layer.record_forward(input)
            if self._layer.catching:
                output: Tensor = _Product.apply(input, self._module.weight, self._module.bias, (self._layer, catcher))
                return output
        return self._usual(self._module, input)

    def _can_catch(self, input: Tensor) -> bool:
        """Whether this call can hand over factors in place of its gradient, and whether they would be smaller."""
        weight = self._layer.slot.tensor
        trained = self._module.weight is weight and weight.requires_grad and torch.is_grad_enabled()
        # Hooks of the user's that see the whole gradient. Tutti's own are post-accumulate hooks, which are not in here.
        if weight._backward_hooks:
            return False
        # Inputs without a batch dimension take the usual path.
        if not trained or not (input.dim() > 1 if weight.dim() == 2 else input.dim() == weight.dim()):
            return False
        rows = input.numel() // self._layer.num_in
        # Factors of rows × (num_out + num_in) elements are kept only where they are smaller than the gradient.
        return not self._layer.keeps_gradient or rows * sum(weight.shape[:2]) < weight.numel()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module]]:
        return _class_forward, (self._module,)


def _class_forward(module: nn.Module) -> Callable[..., Any]:
    return MethodType(type(module).forward, module)


class _Product(torch.autograd.Function):
    """y = x Wᵀ + b. Backward passes the factors of the gradient of W to the catcher, and does not compute it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, where: tuple[FactoredLayer, Catcher]
    ) -> Tensor:
        # Save x as autocast would: in the dtype of the matrix product, not in the wider one it came in.
        if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        ctx.save_for_backward(x, weight)
        ctx.where = where
        return _FORWARD[weight.dim()](x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        layer, catcher = ctx.where
        by_x = by_weight = by_bias = None  # Gradients of the three inputs; None is what autograd takes for "none".
        pair = _rows(grad, weight), _rows(x, weight)
        try:  # False if only other gradients were asked for, as torch.autograd.grad does.
            accumulates = torch._C._will_engine_execute_node(ctx.next_functions[1][0])
        except RuntimeError:  # torch.autograd.grad was asked for this very gradient.
            accumulates, by_weight = False, product([pair], weight)
        if accumulates:
            catcher.on_caught(layer, pair)
        matrix = weight.flatten(1).to(grad.dtype)
        if ctx.needs_input_grad[0]:
            # (..., num_out) @ (num_out, num_in); a 1×1 convolution has its channels in dimension 1.
            by_x = grad @ matrix if weight.dim() == 2 else torch.einsum("mn,bm...->bn...", matrix, grad)
        if ctx.needs_input_grad[2]:
            by_bias = grad.flatten(0, -2).sum(0) if weight.dim() == 2 else grad.transpose(0, 1).flatten(1).sum(1)
        return by_x, by_weight, by_bias, None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear`, but never as a view: autograd forbids in-place changes of views made by custom functions."""
    # (rows, num_out), reshaped to x's leading dimensions without recording a view.
    output = F.linear(x.flatten(0, -2), weight, bias)
    return torch.ops.aten._unsafe_view.default(output, [*x.shape[:-1], len(weight)])


_FORWARD: dict[int, Callable[..., Tensor]] = {2: _linear, 3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
"""The usual forward, by the number of dimensions of a weight."""


def _rows(tensor: Tensor, weight: Tensor) -> Tensor:
    """Return a matrix with a row for every sample, or every point of one, and a column for every feature."""
    tensor = tensor.detach()
    if weight.dim() > 2:
        tensor = tensor.movedim(1, -1)  # (batch, channel, *points) -> (batch, *points, channel).
    return tensor.reshape(-1, tensor.shape[-1])
