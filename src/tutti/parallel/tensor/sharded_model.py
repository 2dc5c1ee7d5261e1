"""`ShardedModel`: a model whose weights are sharded over the ranks along `tensor`, computed with DTensor.

How it works
------------
Between forward passes the parameters are plain tensors: this rank's shards. The optimiser, strategies and checkpoints
see these, and need not know of DTensor. Within a forward pass each parameter is replaced by a DTensor that wraps the
shard; the module's parameters are put back at the end, also after an error. autograd passes gradients of the DTensors
back to the plain shards.

The whole model computes on DTensors, so that DTensor inserts the communication that each operator needs. Plain tensors
that it uses, such as buffers, count as replicated (`implicit_replication`). Three things are changed, and undone by
`_unpatch`:

- Layers that are split get forward passes that communicate least (`layers.parallelise`).
- Modules that contain no split layer compute on plain tensors, the same on every rank (`layers.replicate`): nothing in
  them needs DTensor. Of nested ones, only the outermost is changed.
- The model's `forward` is wrapped: inputs become replicated DTensors, outputs become full tensors. Operators that
  DTensor cannot compute correctly on shards are gathered (`gather_fallback`).

All ranks along `tensor` must run the same operators in the same order, because collectives happen inside of operators.
They do: they get the same batch (`SameBatchCheck`), draw the same random numbers, and see full values wherever
the model reads any. If a rank is lost, the collective in progress fails on the others.
"""

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
from torch.utils._pytree import tree_map_only

from tutti.errors import ConfigError
from tutti.parallel.groups import broadcast
from tutti.parallel.shards import Shard
from tutti.parallel.support import SUPPORT, together
from tutti.parallel.tensor.gather_fallback import GatherFallbackMode, is_sharding_error
from tutti.parallel.tensor.layers import Undo, parallelise, replicate, to_dtensors, to_full_tensors
from tutti.parallel.tensor.rules import CONVOLUTIONS
from tutti.parallel.tensor.shard_spec import ShardSpec, shard_specs
from tutti.parallel.tensor.styles import ParallelStyle


class ShardedModel:
    """Keeps `model` sharded, and lets it compute what the full model would."""

    def __init__(
        self,
        model: nn.Module,
        styles: Mapping[nn.Module, ParallelStyle],
        mesh: DeviceMesh,
        optimizer: Optimizer,
        before_forward: Callable[[Any], None] = lambda inputs: None,
    ) -> None:
        """Shard the parameters and their optimiser state.

        Args:
            styles: the style of each layer; others are replicated.
            before_forward: called with the model's inputs before every forward pass.
        """
        self._model, self._mesh, self._optimizer, self._before_forward = model, mesh, optimizer, before_forward
        self._group: dist.ProcessGroup = mesh.get_group()
        self._styles: dict[str, ParallelStyle] = {
            name: styles.get(module, "replicate") for name, module in model.named_modules()
        }
        self._split_layers = {name for name, style in self._styles.items() if style != "replicate"}
        self._specs: dict[nn.Parameter, ShardSpec] = {}
        self._full_shapes: dict[nn.Parameter, tuple[torch.Size, tuple[int, ...]]] = {}
        for name, module in model.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                # Of a parameter that several modules share, the first one decides.
                self._specs.setdefault(parameter, shard_specs(module, self._styles[name])[key])
                # Kept, because DTensor must be told the full shape: an uneven shard does not reveal it.
                self._full_shapes[parameter] = parameter.shape, parameter.stride()
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._dtensor_parameters: list[tuple[nn.Module, str, nn.Parameter]] = []
        """Parameters that are DTensors within a forward pass: module, name in it, and parameter."""
        self._undo: list[Undo] = []
        self._in_forward = False
        self._gather_fallback = GatherFallbackMode(mesh, {module: name for name, module in model.named_modules()})
        self._replace_tensors(self._shard)
        self._patch()

    def close(self) -> None:
        """Give every rank the full model and optimiser state, and release the model. Collective."""
        self._unpatch()
        self._replace_tensors(self._gather)

    def abandon(self) -> None:
        """Release the model as it is. Not collective."""
        self._unpatch()

    def is_sharded(self, parameter: nn.Parameter) -> bool:
        """Whether this rank has a shard of a parameter, and the other ranks have the rest."""
        return parameter in self._specs and self._specs[parameter].dim is not None

    @contextmanager
    def full_model(self, optimizer: bool, keep_changes: bool = False) -> Iterator[None]:
        """Within it every rank has the full model and computes alone; with optimiser state if asked. Collective.

        With `keep_changes` full tensors that are loaded in it, the same on every rank, are sharded at its end.
        """
        state = self._optimizer.state
        # Copies of the state's dictionaries: `_replace_tensors` puts full tensors into the optimiser's own.
        local = [
            (parameter, parameter.data, parameter.grad, dict(state[parameter]) if parameter in state else None)
            for parameter in self._sharded_parameters
        ]
        self._unpatch()  # The full model computes alone, without DTensor.
        if optimizer:
            self._replace_tensors(self._gather)
        else:
            for parameter, data, *_ in local:
                parameter.data = self._gather(data, parameter)
        try:
            yield
            if keep_changes:
                local = [
                    (p, data.copy_(self._shard(p.data, p)), grad, self._shard_state(p)) for p, data, grad, _ in local
                ]
                state = self._optimizer.state  # Another dict, if it was loaded.
        finally:
            # The shards were kept, so this needs no communication, and changes to full tensors are dropped.
            for parameter, data, grad, entries in local:
                parameter.data, parameter.grad = data, grad
                if entries is not None:
                    state[parameter] = entries
            self._patch()

    def _shard_state(self, parameter: nn.Parameter) -> dict[str, Any] | None:
        """Return this rank's shard of the optimiser's state of a parameter that is full now; None if it has none."""
        entries = self._optimizer.state.get(parameter)
        return entries and {
            key: self._shard(value, parameter)
            if isinstance(value, Tensor) and value.shape == parameter.shape
            else value
            for key, value in entries.items()
        }

    @property
    def shards(self) -> dict[nn.Parameter, Shard]:
        """The shard that this rank has of each parameter that is sharded."""
        rank, size = self._group.rank(), self._group.size()
        return {p: self._specs[p].place(self._full_shapes[p][0], rank, size) for p in self._sharded_parameters}

    @property
    def _sharded_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter, spec in self._specs.items() if spec.dim is not None]

    def _patch(self) -> None:
        """Let the model compute on DTensors."""
        replicated: list[str] = []
        for name, module in self._model.named_modules():
            if name in self._split_layers:
                self._undo.append(module.register_forward_pre_hook(self._refuse_outside).remove)
                self._undo.append(parallelise(module, self._styles[name], self._mesh))
            # Outer modules come first, so the hooks of a replicated one serve everything inside of it.
            if any(_is_within(name, outer) for outer in replicated):
                continue
            if any(_is_within(layer, name) for layer in self._split_layers):
                # Convolutions and fused attention compute on local tensors (see `layers`).
                if self._styles[name] != "heads" and not isinstance(module, CONVOLUTIONS):
                    self._dtensor_parameters += [(module, *item) for item in module.named_parameters(recurse=False)]
            elif next(chain(module.parameters(), module.buffers()), None) is not None:
                replicated.append(name)
                self._undo.append(replicate(module, self._mesh))
        self._forward = self._model.forward
        # On the instance, which hides the method of the class until the attribute is deleted.
        self._model.forward = self._sharded_forward
        self._undo.append(lambda: delattr(self._model, "forward"))

    def _unpatch(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._dtensor_parameters.clear()

    @torch.compiler.disable  # It cannot follow DTensors in and out of the model, if that is compiled afterwards.
    def _sharded_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take and return plain tensors, and compute on DTensors between."""
        self._before_forward((args, kwargs))
        # A setting of the thread, which `implicit_replication` holds as well, for backward passes.
        # Set again for every pass: another job of this thread may have ended and reset it.
        torch._C._set_dtensor_allow_implicit_replication(True)
        try:
            with together(), self._parameters_as_dtensors(), self._gather_fallback:
                args, kwargs = to_dtensors((args, kwargs), self._mesh)
                return tree_map_only(Tensor, _once_differentiable, to_full_tensors(self._forward(*args, **kwargs)))
        except (NotImplementedError, RuntimeError) as error:
            if not is_sharding_error(error):
                raise
            location = _innermost_module(self._model, error.__traceback__)
            raise ConfigError(
                f"{location} cannot be computed on shards over {self._group.size()} ranks: "
                f"{str(error).partition(chr(10))[0]} Replicate the layers whose outputs it takes: "
                'Mesh(split={"name": "replicate"}).'
            ) from error

    def _refuse_outside(self, module: nn.Module, _: Any) -> None:
        """A split layer is called: not by itself, when its parameters are this rank's shards and not DTensors."""
        if not self._in_forward:
            raise ConfigError(
                f"a {type(module).__name__} layer of a split model was called outside of the model's forward pass. "
                f"{SUPPORT['activation checkpointing'].text}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Refuse to copy the model, which has this object in its forward pass."""
        raise ConfigError(f"rank {self._group.rank()} along tensor: {SUPPORT['averaged weights'].text}")

    @contextmanager
    def _parameters_as_dtensors(self) -> Iterator[None]:
        """Within it, the split modules hold DTensors in place of their parameters."""
        dtensors: dict[nn.Parameter, Tensor] = {}
        self._in_forward = True
        try:
            for module, key, parameter in self._dtensor_parameters:
                # One DTensor for a parameter that several modules share, so that they share it within too.
                if parameter not in dtensors:
                    dtensors[parameter] = self._as_dtensor(parameter)
                module._parameters[key] = dtensors[parameter]  # type: ignore[assignment]
            yield
        finally:
            self._in_forward = False
            # Also after an error: the optimiser and the strategy hold the plain parameters.
            for module, key, parameter in self._dtensor_parameters:
                module._parameters[key] = parameter

    def _as_dtensor(self, parameter: nn.Parameter) -> Tensor:
        shape, stride = self._full_shapes[parameter]
        placements = [self._specs[parameter].placement]
        return DTensor.from_local(parameter, self._mesh, placements, run_check=False, shape=shape, stride=stride)

    def _replace_tensors(self, replacement: Callable[[Tensor, nn.Parameter], Tensor]) -> None:
        """Replace every sharded parameter, and the optimiser's state of its shape."""
        for parameter in self._sharded_parameters:  # All are checked before the first one is changed.
            self._refuse_other_shapes(parameter)
        for parameter in self._sharded_parameters:
            state = self._optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[key] = replacement(value, parameter)
            parameter.data = replacement(parameter.data, parameter)
            parameter.grad = None  # It has the shape from before.

    def _refuse_other_shapes(self, parameter: nn.Parameter) -> None:
        """Refuse optimiser state that has neither the parameter's shape nor one element: how to shard it is unknown."""
        for key, value in self._optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape != parameter.shape and value.numel() != 1:
                raise ConfigError(
                    f"rank {self._group.rank()} along tensor: {type(self._optimizer).__name__} keeps state '{key}' of "
                    f"shape {tuple(value.shape)} for parameter '{self._names[parameter]}', of which this rank has "
                    f"shape {tuple(parameter.shape)}. It is not known how to shard this state. Replicate the layer, "
                    'Mesh(split={"name": "replicate"}), or use an element-wise optimiser.'
                )

    def _shard(self, full: Tensor, parameter: nn.Parameter) -> Tensor:
        return self._specs[parameter].shard(full, self._group.rank(), self._group.size())

    def _gather(self, local: Tensor, parameter: nn.Parameter) -> Tensor:
        """Return the full tensor, from one broadcast per rank: shards may differ in size. Collective."""
        spec, size = self._specs[parameter], self._group.size()
        # Only its shape is needed to compute the shapes of the shards, so it takes no memory.
        full = torch.empty(self._full_shapes[parameter][0], device="meta")
        shards = [local.new_empty(spec.shard(full, rank, size).shape) for rank in range(size)]
        shards[self._group.rank()] = local.contiguous()
        with together():
            for rank, shard in enumerate(shards):
                broadcast(shard, rank, self._group)
        return spec.full_tensor(shards)


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Within it, DTensor takes plain tensors in operators for replicated ones, in backward too."""
    before = torch._C._get_dtensor_allow_implicit_replication()
    torch._C._set_dtensor_allow_implicit_replication(True)
    try:
        yield
    finally:
        torch._C._set_dtensor_allow_implicit_replication(before)


def _once_differentiable(output: Tensor) -> Tensor:
    """Refuse to differentiate gradients, which lose parts of their graph between DTensors and plain tensors."""

    def refuse(_: Tensor) -> None:
        if torch.is_grad_enabled():  # Within a backward pass: it was called with create_graph=True.
            raise ConfigError(SUPPORT["second derivatives"].text)

    if output.requires_grad:
        output.register_hook(refuse)
    return output


def _is_within(name: str, outer: str) -> bool:
    """Whether the module called `name` is the one called `outer`, or inside of it."""
    return name == outer or not outer or name.startswith(f"{outer}.")


def _innermost_module(model: nn.Module, traceback: TracebackType | None) -> str:
    """Return the innermost module of `model` in a traceback."""
    names = {module: name for name, module in model.named_modules()}
    innermost: nn.Module | None = None
    # Outermost frame first, so the last match is the innermost module.
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        innermost = owner if isinstance(owner, nn.Module) and owner in names else innermost
        traceback = traceback.tb_next
    if innermost is None or not names[innermost]:
        return "the model"
    return f"layer '{names[innermost]}' ({type(innermost).__name__})"
