"""Work and depth of layers: the number of operations, and the longest chain of dependent ones.

After the table of Ben-Nun and Hoefler (2019) that Fourie (2019) prints as figure 6, with constants: a multiplication
counts together with its addition, and a sum is a tree. `WORK_COUNTERS` has one function for each kind of layer;
any other layer counts as elementwise.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.pooling import (
    _AdaptiveAvgPoolNd,
    _AdaptiveMaxPoolNd,
    _AvgPoolNd,
    _LPPoolNd,
    _MaxPoolNd,
)

from tutti.cost.work_depth import WorkDepth

NO_WORK = WorkDepth(0, 0)


class LayerWork(NamedTuple):
    """Work and depth of the three computations of a layer."""

    output: WorkDepth
    by_weights: WorkDepth
    """The gradient by its parameters."""
    by_input: WorkDepth
    """The gradient by its input."""

    def needed(self, weights: bool, inputs: bool) -> WorkDepth:
        """Return forward and the gradients that are needed; both depend on the output's gradient, not on each other."""
        back = (self.by_weights if weights else NO_WORK).in_parallel_with(self.by_input if inputs else NO_WORK)
        return self.output.followed_by(back)


WorkCounter = Callable[[nn.Module, Sequence[Tensor], Sequence[Tensor]], LayerWork]
"""A function from a layer, its input tensors and its output tensors to its work."""


def layer_work(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> LayerWork:
    """Return the work of one call of a layer."""
    if not outputs:
        return LayerWork(NO_WORK, NO_WORK, NO_WORK)
    return (counter_for(module) or elementwise)(module, inputs or outputs, outputs)


def counter_for(module: nn.Module) -> WorkCounter | None:
    """Return the counter for the module's class, or for the nearest class it is derived from."""
    return next((WORK_COUNTERS[kind] for kind in type(module).__mro__ if kind in WORK_COUNTERS), None)


def sum_depth(num_terms: float) -> int:
    """Return the depth of a sum of `num_terms` products: one multiplication, then a tree of additions."""
    return 1 + math.ceil(math.log2(max(1.0, num_terms)))


def elementwise(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> LayerWork:
    """Activations: every element by itself. A parameter's gradient is a sum over all of them."""
    per_element = WorkDepth(outputs[0].numel(), 1)
    return LayerWork(per_element, WorkDepth(per_element.work, sum_depth(per_element.work)), per_element)


def view(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> LayerWork:
    """Flatten and its kind: the same values in another shape, nothing is computed."""
    return LayerWork(NO_WORK, NO_WORK, NO_WORK)


def linear(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> LayerWork:
    """Fully connected: three products of matrices, N C_in C_out each."""
    c_in, c_out = inputs[0].shape[-1], outputs[0].shape[-1]
    n = outputs[0].numel() // max(1, c_out)
    return _products(n * c_in * c_out, c_in, n, c_out)


def _products(work: float, *num_terms: float) -> LayerWork:
    """Return three products of the same work; `num_terms` are the terms of one sum in each of them.

    They are those of the output, of the gradient by the weights, and of the gradient by the input.
    """
    return LayerWork(*(WorkDepth(work, sum_depth(terms)) for terms in num_terms))


def convolution(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> LayerWork:
    """Direct convolution: N C_out C_in H' W' K_x K_y, divided by groups.

    The table prints the depth of the output for the gradients too, and H W for H' W' in one of them. Here they are
    what they are for a fully connected layer, which is a 1 x 1 convolution of 1 x 1 images: the gradient by the
    weights is a sum over samples and positions, the one by the input over output channels and the kernel, and each
    has as many products as forward.
    """
    assert isinstance(module, _ConvNd)
    kernel = math.prod(module.kernel_size)
    c_in, c_out = module.in_channels // module.groups, module.out_channels // module.groups
    positions = outputs[0].numel() // module.out_channels
    return _products(positions * module.out_channels * c_in * kernel, c_in * kernel, positions, c_out * kernel)


def transposed_convolution(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> LayerWork:
    """Transposed convolution: every input is multiplied by the kernel."""
    assert isinstance(module, _ConvNd)
    kernel = math.prod(module.kernel_size)
    c_in, c_out = module.in_channels // module.groups, module.out_channels // module.groups
    positions = inputs[0].numel() // module.in_channels
    return _products(positions * module.in_channels * c_out * kernel, c_in * kernel, positions, c_out * kernel)


def pooling(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> LayerWork:
    """Pooling: a tree over each window; in backward, every input by itself. Windows that overlap share no work."""
    # Elements of a window. Adaptive pooling has no kernel size: the average over its windows.
    window = inputs[0].numel() / max(1, outputs[0].numel())
    size = getattr(module, "kernel_size", None)
    if isinstance(size, int):
        window = float(size ** max(1, inputs[0].dim() - 2))  # All dimensions but samples and channels.
    elif isinstance(size, tuple):
        window = float(math.prod(size))
    work = max(inputs[0].numel(), outputs[0].numel() * window)
    return LayerWork(WorkDepth(work, max(1, math.ceil(math.log2(window)))), NO_WORK, WorkDepth(work, 1))


def batch_norm(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> LayerWork:
    """Batch norm: a mean and a variance of each channel, over samples (the table's N) and positions."""
    channels = inputs[0].shape[1] if inputs[0].dim() > 1 else 1
    return _normalised(inputs[0].numel(), inputs[0].numel() / max(1, channels), None)


def layer_norm(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> LayerWork:
    """Layer norm: a mean and a variance of each sample; gradients of the parameters are sums over samples."""
    group = math.prod(getattr(module, "normalized_shape", inputs[0].shape[-1:]))
    return _normalised(inputs[0].numel(), group, inputs[0].numel() / max(1, group))


def group_norm(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> LayerWork:
    """Group norm: a mean and a variance of each sample's groups of channels; of each channel in InstanceNorm."""
    samples, channels = inputs[0].shape[0], inputs[0].shape[1]
    groups = getattr(module, "num_groups", channels)
    return _normalised(inputs[0].numel(), inputs[0].numel() / max(1, samples * groups), inputs[0].numel() / channels)


def _normalised(numel: int, num_averaged: float, num_summed: float | None) -> LayerWork:
    """Return the work of a normalisation of `numel` elements.

    Args:
        num_averaged: elements of one mean and variance.
        num_summed: terms of one parameter's gradient; `num_averaged` if None.
    """
    statistics = WorkDepth(numel, sum_depth(num_averaged))
    by_weights = WorkDepth(numel, sum_depth(num_averaged if num_summed is None else num_summed))
    return LayerWork(statistics, by_weights, statistics)  # The gradient by the input has the same two sums.


def softmax(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> LayerWork:
    """Softmax: a sum over the classes, in forward and in backward."""
    dim = getattr(module, "dim", None)
    normalised = WorkDepth(outputs[0].numel(), sum_depth(outputs[0].shape[-1 if dim is None else dim]))
    return LayerWork(normalised, NO_WORK, normalised)


def embedding(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> LayerWork:
    """Embedding: rows are looked up. In backward, gradients are added to these rows: at worst, all to the same one."""
    numel, rows = outputs[0].numel(), inputs[0].numel()
    width = outputs[0].shape[-1]
    summed = rows * width / max(1, numel)  # In an EmbeddingBag, rows of one bag.
    return LayerWork(WorkDepth(rows * width, sum_depth(summed)), WorkDepth(rows * width, sum_depth(rows)), NO_WORK)


def recurrent(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> LayerWork:
    """RNN, GRU and LSTM: each step is a fully connected layer on the last step's state, so depth grows with length.

    The layers of a stack follow each other by one step; with both directions, each waits for the whole one below.
    """
    assert isinstance(module, nn.RNNBase)
    x, num_directions = inputs[0], 2 if module.bidirectional else 1
    length = x.shape[1 if module.batch_first and x.dim() > 2 else 0]
    # Width of what one step gives to the next and to the layer above: an LSTM may project it.
    carried = module.proj_size or module.hidden_size
    widths = [module.input_size] + [num_directions * carried] * (module.num_layers - 1)
    # Outputs of one step's product: every hidden unit has as many gates as the kind of cell.
    gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1) * module.hidden_size
    rows = x.numel() // max(1, module.input_size)  # Samples times positions.
    work_per_row = sum(gates * (width + carried) + module.proj_size * module.hidden_size for width in widths)
    work = rows * num_directions * work_per_row
    # In one direction a layer begins as soon as the one below has made one step. In two it needs the last step as well.
    steps = module.num_layers * length if num_directions == 2 else length + module.num_layers - 1
    return _unrolled(work, steps, max(widths) + carried, gates, rows)


def recurrent_cell(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> LayerWork:
    """One step of a recurrent layer."""
    assert isinstance(module, nn.RNNCellBase)
    gates = module.weight_hh.shape[0]
    rows = inputs[0].numel() // max(1, module.input_size)
    num_terms = module.input_size + module.hidden_size
    return _unrolled(rows * gates * num_terms, 1, num_terms, gates, rows)


_GATING = 4
"""Operations in a row between the products of two steps: a gate, its use, the cell's nonlinearity, the output."""


def _unrolled(work: float, steps: int, num_terms: int, gates: int, rows: int) -> LayerWork:
    """Return the work of `steps` dependent steps: each sums `num_terms` products for a gate, then applies the gates.

    Backward sums over gates in each step. The weights' gradient, a sum over `rows`, needs the last step of backward.
    """
    forward, back = steps * (sum_depth(num_terms) + _GATING), steps * (sum_depth(gates) + _GATING)
    by_weights = WorkDepth(work, back + sum_depth(rows))
    return LayerWork(WorkDepth(work, forward), by_weights, WorkDepth(work, back))


def attention(module: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> LayerWork:
    """Attention: four fully connected layers; between them, scores of queries with keys, a softmax and a mixture."""
    assert isinstance(module, nn.MultiheadAttention)
    query, key = inputs[0], inputs[min(1, len(inputs) - 1)]  # Where only one tensor was seen, it is both.
    width = module.embed_dim
    num_keys = key.shape[1 if module.batch_first and key.dim() > 2 else 0]
    rows, key_rows = query.numel() // width, key.numel() // max(1, key.shape[-1])
    # Projections of queries and of the output, then of keys and values.
    projection_work = 2 * rows * width * width + key_rows * width * (module.kdim + module.vdim)
    # Scores and mixture: every query with every key, each.
    mixing_work = 2 * rows * num_keys * width
    # A score is a sum over a head; the softmax and the mixture are sums over keys; one step is the exponential.
    mixing_depth = sum_depth(module.head_dim) + 2 * sum_depth(num_keys) + 1
    forward = WorkDepth(projection_work + mixing_work, 2 * sum_depth(width) + mixing_depth)
    # Each of the two products has two factors, and so two gradients.
    by_input = WorkDepth(projection_work + 2 * mixing_work, forward.depth)
    # The weights of the first three layers need the gradient to have come back to them.
    by_weights = WorkDepth(projection_work, sum_depth(width) + mixing_depth + sum_depth(rows))
    return LayerWork(forward, by_weights, by_input)


WORK_COUNTERS: dict[type[nn.Module], WorkCounter] = {
    nn.Identity: view,
    nn.Flatten: view,
    nn.Unflatten: view,
    nn.Linear: linear,
    _ConvNd: convolution,
    _ConvTransposeNd: transposed_convolution,
    _MaxPoolNd: pooling,
    _AvgPoolNd: pooling,
    _LPPoolNd: pooling,
    _AdaptiveMaxPoolNd: pooling,
    _AdaptiveAvgPoolNd: pooling,
    _BatchNorm: batch_norm,
    _InstanceNorm: group_norm,
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: layer_norm,
    nn.Softmax: softmax,
    nn.LogSoftmax: softmax,
    nn.Embedding: embedding,
    nn.EmbeddingBag: embedding,
    nn.RNNBase: recurrent,
    nn.RNNCellBase: recurrent_cell,
    nn.MultiheadAttention: attention,
}
"""Counters by class; a derived class uses that of its nearest base class."""
