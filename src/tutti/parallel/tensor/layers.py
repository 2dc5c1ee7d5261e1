"""What layers do with DTensors, where DTensor does not know or would talk more."""

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


@register_sharding(_aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention(query: Any, *_: Any, attn_mask: Any = None, **__: Any) -> Any:
    mask = [Replicate()] if attn_mask is not None else []
    return [([it] * 2, [*[it] * 3, None, None, *mask]) for it in (Replicate(), Shard(1))]


@register_sharding(_aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention_backward(grad: Any, *_: Any, attn_mask: Any = None, **__: Any) -> Any:
    mask = [Replicate()] if attn_mask is not None else []
    return [([it] * 3, [*[it] * 6, None, None, *mask]) for it in (Replicate(), Shard(1))]


@register_sharding(_aten.avg_pool2d_backward.default)
def _avg_pool_backward(grad: Any, x: Any, *options: Any) -> Any:
    channels = Shard(len(x.shape) - 3)
    return [([it], [it, it, *[None] * len(options)]) for it in (Replicate(), channels)]


def parallelise(module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> Undo:
    """Have a split layer take and give DTensors; returns what undoes it."""
    if isinstance(module, CONVOLUTIONS):
        return _replace_forward(module, _by_channel(module, style, mesh))
    if style == "heads":
        return _replace_forward(module, _by_heads(module, mesh))
    if style == "colwise":
        return module.register_forward_pre_hook(_whole_arguments).remove
    return module.register_forward_hook(lambda _, __, output: _summed(output, mesh)).remove


def replicate(module: nn.Module, mesh: DeviceMesh) -> Undo:
    """Have a module of which nothing is split work on plain tensors, the same on every rank; returns what undoes it."""

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(DTensor, lambda it: _placed(it, Replicate()).to_local(), (args, kwargs))

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        return to_dtensors(output, mesh)

    entering = module.register_forward_pre_hook(enter, with_kwargs=True)
    leaving = module.register_forward_hook(leave, prepend=True)

    def undo() -> None:
        entering.remove()
        leaving.remove()

    return undo


def to_dtensors(value: Any, mesh: DeviceMesh) -> Any:
    """Tensors that every rank has alike, as DTensors; those that are DTensors stay."""
    return tree_map_only(Tensor, lambda it: it if isinstance(it, DTensor) else _alike(it, mesh), value)


def to_full_tensors(value: Any) -> Any:
    """The whole of each DTensor, on every rank."""
    return tree_map_only(DTensor, _whole, value)


def _whole(x: Any) -> Tensor:
    (placement,) = x.placements
    if not isinstance(placement, _StridedShard):
        full: Tensor = x.full_tensor()
        return full
    # Heads, each rank's of all three together, which not every version of torch can gather.
    parts = x.to_local().unflatten(placement.dim, (placement.split_factor, -1))
    whole: Any = DTensor.from_local(parts, x.device_mesh, [Shard(placement.dim + 1)], run_check=False)
    return _whole(whole).flatten(placement.dim, placement.dim + 1)


def _by_channel(module: Any, style: ParallelStyle, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    def outputs(x: Tensor) -> Tensor:
        channels = x.dim() - len(module.kernel_size) - 1
        made = module._conv_forward(_taken_whole(x), module.weight, module.bias)
        given = _given(made, Shard(channels), mesh, module.out_channels)
        return _placed(given, Replicate()) if module.out_channels % mesh.size() else given

    def inputs(x: Tensor) -> Tensor:
        channels = x.dim() - len(module.kernel_size) - 1
        made = module._conv_forward(_placed(x, Shard(channels)).to_local(), module.weight, None)
        summed: Any = _summed(DTensor.from_local(made, mesh, [Partial()], run_check=False), mesh)
        if module.bias is None:
            return summed
        return _alike(summed.to_local() + module.bias.view([-1] + [1] * len(module.kernel_size)), mesh)

    return outputs if style == "colwise" else inputs


def _by_heads(module: Any, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        made = F.linear(_taken_whole(x), module.weight, module.bias)
        return _given(made, _StridedShard(x.dim() - 1, split_factor=3), mesh, module.out_features)

    return forward


def _taken_whole(x: Any) -> Tensor:
    """All of the input, from whose use on each rank a part of its gradient comes."""
    local: Tensor = _placed(x, Replicate()).to_local(grad_placements=[Partial()])
    return local


def _given(made: Tensor, placement: Any, mesh: DeviceMesh, size: int) -> Tensor:
    """This rank's part of an output that has `size` in the dimension of the placement."""
    made = made.contiguous()
    shape = torch.Size(size if dim == placement.dim else each for dim, each in enumerate(made.shape))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(made, mesh, [placement], run_check=False, shape=shape, stride=stride)


def _alike(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def _placed(x: Any, placement: Placement) -> Any:
    return x if x.placements == (placement,) else x.redistribute(placements=[placement])


def _whole_arguments(_: nn.Module, args: Any) -> Any:
    return tree_map_only(DTensor, lambda it: _placed(it, Replicate()), args)


def _summed(x: Any, mesh: DeviceMesh) -> Tensor:
    """What ranks have parts of, whole; its gradient will be whole too."""
    return _alike(_placed(x, Replicate()).to_local(), mesh)


def _replace_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Undo:
    module.forward = forward

    def undo() -> None:
        del module.forward

    return undo
