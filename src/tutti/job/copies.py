"""Copies of a model that each rank keeps by itself, such as averages of its weights over steps: their mean over ranks.

Where all ranks have the same parameters (`AllReduce`), their copies are equal too, and a checksum shows it. Otherwise
the copies differ as the parameters do, and are averaged.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tutti.collectives import native, run
from tutti.collectives.broadcast import groups
from tutti.errors import ReplicaMismatch
from tutti.transports import Transport


def averaged_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return what has a mean: parameters and floating-point buffers, by name."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: t.detach() for name, t in named.items() if t.is_floating_point() or t.is_complex()}


def copy_mistake(module: Any, model: nn.Module) -> str:
    """Return what is wrong with averaging `module` beside the distributed `model`; nothing if it can be."""
    if not isinstance(module, nn.Module):
        return f"it takes a module, such as torch.optim.swa_utils.AveragedModel(model), got a {type(module).__name__}."
    if {id(p) for p in module.parameters()} & {id(p) for p in model.parameters()}:
        return "this module has parameters of the distributed model, for which job.consensus() is; it takes a copy."
    return ""


def describe(tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return the name, kind and checksum of every tensor of a copy, for `different_tensors`."""
    return [
        {"name": name, "shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch."), "checksum": _checksum(t)}
        for name, t in tensors.items()
    ]


def _checksum(tensor: Tensor) -> str | None:
    """Return a digest of the values of a tensor, by which ranks compare them without sending them."""
    if tensor.is_meta:
        return None  # In a dry run there are no values, and the mean is to be timed.
    return hashlib.sha256(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def different_tensors(by_rank: dict[int, Any]) -> dict[str, Any]:
    """Return the names of tensors that differ between ranks, and the ranks. Raises if they are of different kinds."""
    first = min(by_rank)
    for rank, other in by_rank.items():
        if (ours := _kinds(by_rank[first])) != (theirs := _kinds(other)):
            differ = [pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]]
            has = differ[0] if differ else (f"{len(ours)} tensors", f"{len(theirs)}")
            raise ReplicaMismatch(
                f"job.average: the copies differ between ranks: rank {first} has {has[0]}, rank {rank} has {has[1]}."
            )
    columns = zip(*by_rank.values(), strict=True)
    # Meta tensors have no checksum, so that the set is empty: they count as different, and a dry run times their
    # mean.
    names = [column[0]["name"] for column in columns if len({each["checksum"] for each in column} - {None}) != 1]
    return {"names": names, "ranks": sorted(by_rank)}


def _kinds(described: list[dict[str, Any]]) -> list[str]:
    return [f"'{each['name']}' {tuple(each['shape'])} {each['dtype']}" for each in described]


@torch.no_grad()
def average(tensors: Iterable[Tensor], transport: Transport) -> None:
    """Replace tensors by their mean over the ranks of `transport`, the same bits on all. Collective."""
    for group in groups(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        # Summed in float32: in 16 bits a sum over many ranks would lose digits.
        flat = flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat
        # On the host, whatever the device: ranks that share a GPU, or have none in common, are served alike.
        flat = flat if flat.is_meta else flat.cpu()
        run(native.steps(flat, transport))
        flat = flat.div_(transport.size)
        for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(part.view(tensor.shape))
