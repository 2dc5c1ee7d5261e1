"""`SavedPart`: what one rank of a split model saves of the model and its optimiser, with shards marked.

Parts of all ranks of a replica, `merged`, are the states of the whole model and optimiser.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.parallel.shards import Shard, marked

Owns = Callable[[Tensor], bool]
"""Whether this rank saves a parameter or buffer, or its shard of it."""


@dataclass(frozen=True)
class SavedPart:
    """One rank's part of the state of a replica."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    job: dict[str, Any]
    """What `Job.state_dict` has."""


def model_part(model: nn.Module, owns: Owns, shards: Mapping[nn.Parameter, Shard], is_first: bool) -> dict[str, Any]:
    """Return the entries of the model's state that this rank saves.

    Args:
        is_first: whether it also saves what belongs to no parameter or buffer, such as a module's extra state.
    """
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    by_name: dict[str, Any] = {name: tensor for each in named for name, tensor in each}
    known = {id(tensor) for tensor in by_name.values()}
    part: dict[Any, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        # Hooks may give a tensor another name, as those of `checkpoint_wrapper` do, or another tensor its name.
        tensor = value if id(value) in known else by_name.get(name)
        if tensor is None:
            part |= {name: value} if is_first else {}
        elif owns(tensor):
            part[name] = marked(value.detach(), {}, shards.get(tensor))
    return part


def optimizer_part(
    optimizer: Optimizer, owns: Owns, shards: Mapping[nn.Parameter, Shard], is_first: bool
) -> dict[str, Any]:
    """Return the part of the optimiser's state that this rank saves: parameters are numbered as in the whole state.

    Args:
        is_first: whether it also saves the options of parameter groups, and what belongs to no parameter.
    """
    state = optimizer.state_dict()
    parameters = {
        number: parameter
        for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True)
        for number, parameter in zip(saved["params"], group["params"], strict=True)
    }
    part: dict[Any, Any] = {}
    for number, entries in state["state"].items():
        if number not in parameters:
            part |= {number: entries} if is_first else {}
        elif owns(parameters[number]):
            part[number] = marked(entries, {}, shards.get(parameters[number]))
    return {**state, "state": part} if is_first else {"state": part}
