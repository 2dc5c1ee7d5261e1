"""A model split over the ranks along `tensor`: each has its pieces of the parameters, and computes with DTensors."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tutti.errors import ConfigError
from tutti.parallel.groups import broadcast
from tutti.parallel.same_batch import SameBatchCheck
from tutti.parallel.tensor.gather_fallback import GatherFallbackMode, is_sharding_error
from tutti.parallel.tensor.layers import Undo, parallelise, replicate, to_dtensors, to_full_tensors
from tutti.parallel.tensor.rules import CONVOLUTIONS
from tutti.parallel.tensor.shard_spec import ShardSpec, shard_specs
from tutti.parallel.tensor.styles import ParallelStyle


class ShardedModel:
    """Keeps `model` split.

    Between forward passes its parameters are plain tensors, the pieces of this rank, which is what the optimiser and
    strategies see; within one they are DTensors over those, so that whatever the model computes is what the
    whole model would.
    """

    def __init__(
        self,
        model: nn.Module,
        ways: Mapping[nn.Module, ParallelStyle],
        mesh: DeviceMesh,
        optimizer: Optimizer,
        same: SameBatchCheck | None = None,
    ) -> None:
        """Split it. `same` compares what ranks give the model, unless somebody else has."""
        self._model, self._mesh, self._optimizer, self._same = model, mesh, optimizer, same
        self._group: dist.ProcessGroup = mesh.get_group()
        self._ways: dict[str, ParallelStyle] = {name: ways.get(it, "replicate") for name, it in model.named_modules()}
        self._split = {name for name, style in self._ways.items() if style != "replicate"}
        self._pieces: dict[nn.Parameter, ShardSpec] = {}
        self._shapes: dict[nn.Parameter, tuple[torch.Size, tuple[int, ...]]] = {}
        for name, module in model.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                self._pieces.setdefault(parameter, shard_specs(module, self._ways[name])[key])
                self._shapes[parameter] = parameter.shape, parameter.stride()
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._held: list[tuple[nn.Module, str, nn.Parameter]] = []
        """Parameters that are DTensors within a forward pass."""
        self._undo: list[Undo] = []
        self._gathering = GatherFallbackMode(mesh, {module: name for name, module in model.named_modules()})
        self._change(self._own)
        self._hold()

    def close(self) -> None:
        """Give the model and the optimiser's memory back whole, and let them go. Collective."""
        self._release()
        self._change(self._gathered)

    def abandon(self) -> None:
        """Let the model go as it is. Not collective."""
        self._release()

    def is_sharded(self, parameter: nn.Parameter) -> bool:
        """Whether this rank has a part of a parameter, and others the rest."""
        return parameter in self._pieces and self._pieces[parameter].dim is not None

    @contextmanager
    def full_model(self, optimizer: bool) -> Iterator[None]:
        """Within it the model is whole, and if asked the `optimizer`'s memory, and computes by itself. Collective."""
        memory = self._optimizer.state
        split = [parameter for parameter, piece in self._pieces.items() if piece.dim is not None]
        mine = [(it, it.data, it.grad, dict(memory[it]) if it in memory else None) for it in split]
        self._release()
        if optimizer:
            self._change(self._gathered)
        else:
            for parameter, data, *_ in mine:
                parameter.data = self._gathered(data, parameter)
        try:
            yield
        finally:
            for parameter, data, grad, state in mine:
                parameter.data, parameter.grad = data, grad
                if state is not None:
                    memory[parameter] = state
            self._hold()

    def _hold(self) -> None:
        surrounded: list[str] = []
        for name, module in self._model.named_modules():
            if name in self._split:
                self._undo.append(parallelise(module, self._ways[name], self._mesh))
            if any(_is_within(name, it) for it in surrounded):
                continue
            if any(_is_within(it, name) for it in self._split):
                if self._ways[name] != "heads" and not isinstance(module, CONVOLUTIONS):
                    self._held += [(module, *each) for each in module.named_parameters(recurse=False)]
            elif next(chain(module.parameters(), module.buffers()), None) is not None:
                surrounded.append(name)
                self._undo.append(replicate(module, self._mesh))
        self._forward = self._model.forward
        self._model.forward = self._forward_in_pieces
        self._undo.append(lambda: delattr(self._model, "forward"))

    def _release(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._held.clear()

    def _forward_in_pieces(self, *args: Any, **kwargs: Any) -> Any:
        if self._same is not None:
            self._same((args, kwargs))
        torch._C._set_dtensor_allow_implicit_replication(True)  # Another job of this thread may have ended meanwhile.
        try:
            with self._as_dtensors(), self._gathering:
                args, kwargs = to_dtensors((args, kwargs), self._mesh)
                return to_full_tensors(self._forward(*args, **kwargs))
        except (NotImplementedError, RuntimeError) as error:
            if not is_sharding_error(error):
                raise
            where = _innermost(self._model, error.__traceback__)
            raise ConfigError(
                f"{where} cannot be computed in pieces over {self._group.size()} ranks: "
                f"{str(error).splitlines()[0]} Keep whole the layers whose outputs it takes: "
                'Mesh(split={"name": "replicate"}).'
            ) from error

    @contextmanager
    def _as_dtensors(self) -> Iterator[None]:
        made: dict[nn.Parameter, Tensor] = {}
        try:
            for module, key, parameter in self._held:
                if parameter not in made:
                    made[parameter] = self._as_dtensor(parameter)
                module._parameters[key] = made[parameter]  # type: ignore[assignment]
            yield
        finally:
            for module, key, parameter in self._held:
                module._parameters[key] = parameter

    def _as_dtensor(self, parameter: nn.Parameter) -> Tensor:
        shape, stride = self._shapes[parameter]
        placements = [self._pieces[parameter].placement]
        return DTensor.from_local(parameter, self._mesh, placements, run_check=False, shape=shape, stride=stride)

    def _change(self, change: Callable[[Tensor, nn.Parameter], Tensor]) -> None:
        """Change every parameter that is split, and what the optimiser remembers of it."""
        split = [parameter for parameter, piece in self._pieces.items() if piece.dim is not None]
        for parameter in split:
            self._refuse_odd_memory(parameter)
        for parameter in split:
            state = self._optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[key] = change(value, parameter)
            parameter.data = change(parameter.data, parameter)
            parameter.grad = None

    def _refuse_odd_memory(self, parameter: nn.Parameter) -> None:
        for key, value in self._optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape != parameter.shape and value.numel() != 1:
                raise ConfigError(
                    f"rank {self._group.rank()} along tensor: {type(self._optimizer).__name__} remembers '{key}' of "
                    f"shape {tuple(value.shape)} for parameter '{self._names[parameter]}', of which this rank has "
                    f"{tuple(parameter.shape)}: how to split it is not known. Keep the layer whole, "
                    'Mesh(split={"name": "replicate"}), or use an optimiser that takes each number by itself.'
                )

    def _own(self, whole: Tensor, parameter: nn.Parameter) -> Tensor:
        return self._pieces[parameter].of(whole, self._group.rank(), self._group.size())

    def _gathered(self, mine: Tensor, parameter: nn.Parameter) -> Tensor:
        piece, size = self._pieces[parameter], self._group.size()
        whole = torch.empty(self._shapes[parameter][0], device="meta")
        found = [mine.new_empty(piece.of(whole, rank, size).shape) for rank in range(size)]
        found[self._group.rank()] = mine.contiguous()
        for rank, each in enumerate(found):
            broadcast(each, rank, self._group)
        return piece.whole(found)


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Within it, DTensor takes what a model mixes in that is none to be the same on every rank, in backward too."""
    before = torch._C._get_dtensor_allow_implicit_replication()
    torch._C._set_dtensor_allow_implicit_replication(True)
    try:
        yield
    finally:
        torch._C._set_dtensor_allow_implicit_replication(before)


def _is_within(name: str, outer: str) -> bool:
    return name == outer or not outer or name.startswith(f"{outer}.")


def _innermost(model: nn.Module, traceback: TracebackType | None) -> str:
    """The innermost module of `model` in which an error came up."""
    names = {module: name for name, module in model.named_modules()}
    found: nn.Module | None = None
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        found = owner if isinstance(owner, nn.Module) and owner in names else found
        traceback = traceback.tb_next
    return f"layer '{names[found]}' ({type(found).__name__})" if found is not None and names[found] else "the model"
