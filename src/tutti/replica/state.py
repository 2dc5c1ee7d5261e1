"""Equal starting states of replicas: check that models match on all ranks, then take rank 0's values."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.collectives import all_gather_json, broadcast_all, broadcast_json, recursive_doubling, run
from tutti.collectives.packing import pack, unpack
from tutti.errors import ConfigError, ReplicaMismatch
from tutti.transports import Transport


def check_alike(
    model: nn.Module, optimizer: Optimizer, strategy: str, mistakes: list[str], transport: Transport
) -> None:
    """Raise the same error on every rank if any rank made a mistake or has a different model.

    Every rank has to call this, also one that knows of a mistake already: an error that only one rank raised would
    leave the others waiting. Collective.
    """
    groups = [len(group["params"]) for group in optimizer.param_groups]
    choices = {"strategy": strategy, "optimiser": f"{type(optimizer).__name__} with groups of {groups} parameters"}
    local = {"mistakes": mistakes, "layout": layout(model), "choices": choices}
    # Equal on all ranks, so all ranks take the same branch: either none or all of them gather below.
    if _alike(local, transport) and not mistakes:
        return
    by_rank = all_gather_json(local, transport)
    named = list(zip(transport.world_ranks, by_rank, strict=True))
    all_mistakes = [f"rank {rank}: {mistake}" for rank, other in named for mistake in other["mistakes"]]
    if all_mistakes:
        # The same mistake everywhere, which is the usual case, is listed once and without ranks.
        shared = all(other["mistakes"] == by_rank[0]["mistakes"] for other in by_rank)
        raise ConfigError("\n".join(by_rank[0]["mistakes"] if shared else all_mistakes))
    first = transport.world_ranks[0]
    for rank, other in named:
        if other["layout"] != by_rank[0]["layout"]:
            raise ReplicaMismatch(_first_difference(by_rank[0]["layout"], other["layout"], first, rank))
        for what, ours in by_rank[0]["choices"].items():
            if other["choices"][what] != ours:
                raise ReplicaMismatch(
                    f"the {what} differs between ranks: rank {first} has {ours}, rank {rank} has "
                    f"{other['choices'][what]}."
                )


def _alike(local: Any, transport: Transport) -> bool:
    """Whether every rank has the same value, by digest: gathering all values from a thousand ranks would take long."""
    digest = hashlib.sha256(json.dumps(local).encode()).hexdigest()
    differ = torch.tensor([int(broadcast_json(digest, transport) != digest)], device="cpu")
    if transport.size > 1:
        # The sum over all ranks: above 0 if any rank differs from rank 0.
        run(recursive_doubling.steps(differ, transport))
    return not differ.any()


def take_from_rank_0(model: nn.Module, optimizer: Optimizer, transport: Transport) -> None:
    """Overwrite parameters, buffers and the optimiser's state with those of rank 0. Collective."""
    if transport.size == 1:
        return
    with torch.no_grad():
        broadcast_all([*model.parameters(), *model.buffers()], transport)
    tensors: list[Tensor] = []
    packed, mistake = None, ""
    if transport.rank == 0:
        try:
            packed = pack(optimizer.state_dict(), tensors)
        except ConfigError as error:
            mistake = (
                f"the optimiser's state: {error}"  # Raised below, on every rank: the others wait for the broadcast.
            )
    kinds = [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors]
    packed, kinds, mistake = broadcast_json([packed, kinds, mistake], transport)
    if mistake:
        raise ConfigError(mistake)
    if transport.rank == 0:
        tensors = [torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.cpu() for tensor in tensors]
    else:
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device="cpu") for shape, dtype in kinds]
    broadcast_all(tensors, transport)
    # On rank 0 too: loading may cast what it loads, and must then do so everywhere.
    load_optimizer_state(optimizer, unpack(packed, tensors))


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state that came without the versions of modules, which torch keeps beside the values.

    They are those of `model`. A module that finds no version takes its values for those of its oldest, and converts
    them once more, or refuses them.
    """
    versioned: Any = OrderedDict(state)
    versioned._metadata = getattr(model.state_dict(), "_metadata", OrderedDict())
    model.load_state_dict(versioned)


def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state into an optimiser, with tensors in the memory order of their parameters.

    Fused optimisers go through the memory of a parameter and of its state side by side, whatever their strides are.
    What was sent, or read from a file, is in the order of its indices: for parameters in another one, such as
    `channels_last`, they would silently take other elements' state.
    """
    optimizer.load_state_dict(state)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            own = optimizer.state.get(parameter, {})
            own.update({key: in_order_of(parameter, value) for key, value in own.items()})


def in_order_of(parameter: Tensor, value: Any) -> Any:
    """Return a value of an optimiser's state, in the memory order of the parameter if it has an entry per element."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def share_buffers(model: nn.Module, transport: Transport) -> None:
    """Overwrite the model's buffers with rank 0's."""
    with torch.no_grad():
        broadcast_all(list(model.buffers()), transport)


def layout(model: nn.Module) -> list[list[Any]]:
    """Return name, shape, dtype, device and kind of every parameter and buffer, as JSON types."""
    tensors: list[tuple[str, Tensor, str]]
    tensors = [(name, p, "trained" if p.requires_grad else "frozen") for name, p in model.named_parameters()]
    tensors += [(name, buffer, "buffer") for name, buffer in model.named_buffers()]
    return [
        [name, list(t.shape), str(t.dtype).removeprefix("torch."), t.device.type, kind] for name, t, kind in tensors
    ]


def _first_difference(expected: list[list[Any]], got: list[list[Any]], first: int, rank: int) -> str:
    """Return the error for two models that differ, with the first entry in which they do."""
    # A model that just has more entries is dealt with after the loop.
    for other, ours in zip(got, expected, strict=False):
        if other != ours:
            return (
                f"the models differ between ranks, first at '{ours[0]}': rank {first} has {_describe(ours)}, "
                f"rank {rank} has {_describe(other)}. Build the same model on every rank."
            )
    longer, extra = (first, expected) if len(expected) > len(got) else (rank, got)
    name = extra[min(len(expected), len(got))][0]
    return f"the models differ between ranks: only rank {longer} has '{name}'. Build the same model on every rank."


def _describe(entry: list[Any]) -> str:
    name, shape, dtype, device, kind = entry
    return f"'{name}' {tuple(shape)} {dtype} on {device}, {kind}"
