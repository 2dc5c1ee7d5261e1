"""Forward passes of split layers on DTensors, where DTensor has no rule or would communicate more than needed.

Column-parallel layers (Shoeybi et al. 2019) take replicated inputs and return outputs sharded by feature; row-parallel
layers take inputs sharded by feature and all-reduce their partial outputs. Every function here that changes a module
returns a function that undoes the change.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map_only

from tutti.parallel.tensor.rules import CONVOLUTIONS
from tutti.parallel.tensor.styles import ParallelStyle

_aten = torch.ops.aten

Undo = Callable[[], None]
"""Undoes the change of a module."""


# Sharding rules that DTensor lacks. Each returns the accepted combinations: placements of outputs, and of inputs.


@register_sharding(_aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention(query: Any, *_: Any, attn_mask: Any = None, **__: Any) -> Any:
    """Attention on the CPU: heads are independent of each other, so they may be sharded."""
    mask = [Replicate()] if attn_mask is not None else []
    # Dimension 1 is that of the heads, which are independent of each other.
    # Outputs: the result and its log-sum-exp. Inputs: query, key and value, then dropout_p and is_causal, which are
    # no tensors.
    return [([placement] * 2, [*[placement] * 3, None, None, *mask]) for placement in (Replicate(), Shard(1))]


@register_sharding(_aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention_backward(grad: Any, *_: Any, attn_mask: Any = None, **__: Any) -> Any:
    """The backward pass of `_attention`, with the same shards."""
    mask = [Replicate()] if attn_mask is not None else []
    # Outputs: the gradients of query, key and value. Inputs: that of the result, the three, the result, its
    # log-sum-exp.
    return [([placement] * 3, [*[placement] * 6, None, None, *mask]) for placement in (Replicate(), Shard(1))]


@register_sharding(_aten.avg_pool2d_backward.default)
def _avg_pool_backward(grad: Any, x: Any, *options: Any) -> Any:
    """Average pooling mixes no channels, so these may be sharded."""
    channels = Shard(len(x.shape) - 3)
    # Counted from the end, since a batch dimension may be missing: channels, height, width.
    return [([placement], [placement, placement, *[None] * len(options)]) for placement in (Replicate(), channels)]


def parallelise(module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> Undo:
    """Let a split layer take and return DTensors."""
    if isinstance(module, CONVOLUTIONS):
        return _replace_forward(module, _convolution_forward(module, style, mesh))
    if style == "heads":
        return _replace_forward(module, _fused_attention_forward(module, mesh))
    # Linear and embedding layers compute on sharded weights as they are. Only their input or output needs a layout.
    if style == "colwise":
        return module.register_forward_pre_hook(_replicate_arguments).remove
    return module.register_forward_hook(lambda _, __, output: _all_reduced(output, mesh)).remove


def replicate(module: nn.Module, mesh: DeviceMesh) -> Undo:
    """Let a module without split layers compute on plain tensors, the same on every rank."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        # Gathered first where it is sharded: the module knows nothing of shards, and would take one for the whole
        # tensor.
        return tree_map_only(DTensor, lambda x: _redistributed(x, Replicate()).to_local(), (args, kwargs))

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        return to_dtensors(output, mesh)

    pre_hook = module.register_forward_pre_hook(before, with_kwargs=True)
    hook = module.register_forward_hook(after, prepend=True)  # The user's hooks see DTensors, as for other modules.

    def undo() -> None:
        pre_hook.remove()
        hook.remove()

    return undo


def to_dtensors(value: Any, mesh: DeviceMesh) -> Any:
    """Wrap plain tensors, which must be the same on every rank, as replicated DTensors; DTensors stay as they are."""
    return tree_map_only(Tensor, lambda x: x if isinstance(x, DTensor) else _replicated(x, mesh), value)


def to_full_tensors(value: Any) -> Any:
    """Replace each DTensor by the full tensor, on every rank."""
    return tree_map_only(DTensor, _full_tensor, value)


def _full_tensor(x: Any) -> Tensor:
    (placement,) = x.placements
    if not isinstance(placement, _StridedShard):
        full: Tensor = x.full_tensor()
        return full
    # Queries, keys and values, of which each rank has some heads. Not every version of torch can gather strided
    # shards, so the three blocks become a dimension of their own, and the heads an ordinary shard.
    blocks = x.to_local().unflatten(placement.dim, (placement.split_factor, -1))
    sharded: Any = DTensor.from_local(blocks, x.device_mesh, [Shard(placement.dim + 1)], run_check=False)
    return _full_tensor(sharded).flatten(placement.dim, placement.dim + 1)


def _convolution_forward(module: Any, style: ParallelStyle, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """Return a forward pass on local tensors: DTensor has no sharding by channels for convolutions."""

    def colwise(x: Tensor) -> Tensor:
        # Counted from the end, since a batch dimension may be missing.
        channel_dim = x.dim() - len(module.kernel_size) - 1
        local = module._conv_forward(_replicated_input(x), module.weight, module.bias)
        output = _sharded_output(local, Shard(channel_dim), mesh, module.out_channels)
        # Unequal shards are gathered at once: pooling and reshaping, which follow, need equal ones.
        return _redistributed(output, Replicate()) if module.out_channels % mesh.size() else output

    def rowwise(x: Tensor) -> Tensor:
        channel_dim = x.dim() - len(module.kernel_size) - 1
        local = module._conv_forward(_redistributed(x, Shard(channel_dim)).to_local(), module.weight, None)
        summed: Any = _all_reduced(DTensor.from_local(local, mesh, [Partial()], run_check=False), mesh)
        if module.bias is None:
            return summed
        # The bias is added after the sum: otherwise every rank would add it once.
        return _replicated(summed.to_local() + module.bias.view([-1] + [1] * len(module.kernel_size)), mesh)

    return colwise if style == "colwise" else rowwise


def _fused_attention_forward(module: Any, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """Return the forward pass of a Linear layer that computes some heads of queries, keys and values."""

    def forward(x: Tensor) -> Tensor:
        local = F.linear(_replicated_input(x), module.weight, module.bias)
        return _sharded_output(local, _StridedShard(x.dim() - 1, split_factor=3), mesh, module.out_features)

    return forward


def _replicated_input(x: Any) -> Tensor:
    """Return the full input as a local tensor. Each rank computes a part of its gradient, so these are summed."""
    local: Tensor = _redistributed(x, Replicate()).to_local(grad_placements=[Partial()])
    return local


def _sharded_output(local: Tensor, placement: Any, mesh: DeviceMesh, size: int) -> Tensor:
    """Wrap this rank's shard of an output, whose full size in the sharded dimension is `size`."""
    local = local.contiguous()
    # Given explicitly: from an uneven shard, DTensor would compute another shape.
    shape = torch.Size(size if dim == placement.dim else length for dim, length in enumerate(local.shape))
    # The strides of a contiguous tensor of the full shape, which need no memory on the meta device.
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)


def _replicated(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def _redistributed(x: Any, placement: Placement) -> Any:
    return x if x.placements == (placement,) else x.redistribute(placements=[placement])


def _replicate_arguments(_: nn.Module, args: Any) -> Any:
    return tree_map_only(DTensor, lambda x: _redistributed(x, Replicate()), args)


def _all_reduced(x: Any, mesh: DeviceMesh) -> Tensor:
    """Sum partial values over ranks. The result is wrapped anew, so that its gradient is replicated too."""
    return _replicated(_redistributed(x, Replicate()).to_local(), mesh)


def _replace_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Undo:
    module.forward = forward

    def undo() -> None:
        # Deletes the instance's attribute, after which the class's own method is found again.
        del module.forward

    return undo
