"""Layers of a model that is not an `nn.Sequential`, found by tracing it with `torch.export`.

The traced graph is a sequence of operators. It may be cut between any two modules where all live values are
floating-point tensors, since these can be sent to the next stage and have gradients that come back. Values that a later
layer needs pass through the layers between (skip connections, for example).
"""

import traceback
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, fx, nn

from tutti.errors import ConfigError

_trace_lock = Lock()
"""Held while tracing: torch keeps the state of a trace per process, and ranks may be threads of one process."""

_TORCH = str(Path(torch.__file__).parent)


def traced_layers(model: nn.Module, example: Any) -> list[tuple[str, nn.Module]]:
    """Return the model's operators, grouped into layers by the module that ran them.

    Args:
        example: one microbatch of inputs; several inputs are a tuple.
    """
    args = example if isinstance(example, tuple) else (example,)
    graph = _export(model, args).graph
    # 1. Number all values in the order in which they are computed. Parameters and buffers (`get_attr` nodes) are left
    # out: the layer that uses one holds it, so they are never sent.
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    _refuse_values(model, results)
    position = {node: index for index, node in enumerate([*inputs, *nodes])}
    position[output] = len(position)
    # 2. Find the last reader of each value; -1 if nothing reads it.
    last_use = {node: max((position.get(user, -1) for user in node.users), default=-1) for node in position}
    # 3. Cut.
    # Operators of one module stay together: a module is the smallest part that users know, and cutting inside it would
    # send more values.
    groups = [list(group) for _, group in groupby(nodes, _module_of)]
    layers: list[tuple[str, nn.Module]] = []
    live, pending = inputs, list[fx.Node]()
    for group in groups:
        pending += group
        end = position[pending[-1]]
        # Values computed up to here that something after here uses: they would be sent to the next stage.
        after = [node for node in position if position[node] <= end and last_use[node] > end]
        # The last layer returns what the model returns, also where that is not what a next layer would need.
        if group is groups[-1]:
            after = results
        elif not all(_can_be_sent(node) for node in after):
            continue  # No cut here: a live value is not a tensor that can have a gradient.
        layers.append((_name(pending, layers), _TracedLayer(model, pending, live, after)))
        live, pending = after, []
    return layers


class _TracedLayer(nn.Module):
    """Consecutive operators of a graph as a module. Inputs that later layers need are passed through."""

    def __init__(
        self, model: nn.Module, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> None:
        super().__init__()
        self._input_names, self._output_names = [node.name for node in inputs], [node.name for node in outputs]
        self._steps: list[tuple[str, str | None, Any, Any, Any]] = []
        # Call by call, because a module may be called twice in a row: as one group, it would be run once.
        for (path, _), group in groupby(nodes, lambda node: (_module_of(node), _call_of(node))):
            self._add(model, path, list(group))

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        values_by_name: dict[str, Any] = dict(zip(self._input_names, values, strict=True))
        for name, module, target, args, kwargs in self._steps:
            if module is not None:
                values_by_name[name] = self.get_submodule(module)(values_by_name[args])
            else:
                values_by_name[name] = self._run(values_by_name, target, (args, kwargs))
        return tuple(values_by_name[name] for name in self._output_names)

    def _run(self, values_by_name: dict[str, Any], target: Any, arguments: Any) -> Any:
        """Call an operator with its arguments, in which nodes of the graph stand for values."""
        args, kwargs = fx.node.map_arg(arguments, lambda node: self._value(values_by_name, node))
        return target(*args, **kwargs)

    def _add(self, model: nn.Module, path: str, group: list[fx.Node]) -> None:
        """Add the operators of one module, or the module itself if it is one of torch's that maps a tensor to a tensor.

        The module is preferred, because tensor parallelism and hooks work on modules. Recurrent modules return tuples.
        """
        module = model.get_submodule(path)
        inside = set(group)
        # What the operators take from outside, and what others take from them. Parameters do not count: the layer
        # holds them.
        inputs = {
            source
            for node in group
            for source in node.all_input_nodes
            if source not in inside and source.op != "get_attr"
        }
        outputs = [node for node in group if any(user not in inside for user in node.users)]
        # A module with one tensor in and one out can be called as it is.
        leaf = not list(module.children()) and len(inputs) == len(outputs) == 1
        if leaf and type(module).__module__.startswith("torch.nn") and not isinstance(module, nn.RNNBase):
            key = path.replace(".", "/")
            self.add_module(key, module)
            self._steps.append((outputs[0].name, key, None, next(iter(inputs)).name, None))
            return
        for node in group:
            for source in node.all_input_nodes:
                if source.op == "get_attr":
                    self._add_tensor(model, str(source.target), source.name)
            self._steps.append((node.name, None, node.target, node.args, node.kwargs))

    def _add_tensor(self, model: nn.Module, target: str, name: str) -> None:
        """Register a parameter or buffer that an operator uses."""
        owner, _, key = target.rpartition(".")
        try:
            tensor = getattr(model.get_submodule(owner), key)
        except AttributeError as error:
            raise ConfigError(
                f"the model makes a constant tensor ('{target}') that no module holds. Register it as a buffer."
            ) from error
        if isinstance(tensor, nn.Parameter):
            self.register_parameter(name, tensor)
        else:
            self.register_buffer(name, tensor, persistent=False)  # Kept by the ranks whose stages use it.

    def _value(self, values_by_name: dict[str, Any], node: fx.Node) -> Any:
        """Return what a node stands for: a computed value, a parameter or a buffer."""
        if node.op != "get_attr":
            return values_by_name[node.name]
        return self._parameters[node.name] if node.name in self._parameters else self._buffers[node.name]


def _export(model: nn.Module, args: tuple[Any, ...]) -> fx.GraphModule:
    """Trace a model. Raises `ConfigError` with the line of the user's code that cannot be traced."""
    try:
        # torch.export prints its own report to stderr; the error below names the line of the user's code.
        with _trace_lock, torch.enable_grad(), warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")  # They are about saving exported programs, which is not done here.
            exported = torch.export.export(model, args, strict=False)
            _refuse_structure(model, exported.call_spec.out_spec)
            return exported.module()
    except ConfigError:
        raise
    except Exception as error:  # torch.export raises errors of many kinds, all about the model.
        raise ConfigError(
            f"the model cannot be traced, so no cut into stages can be found: {_line_of(error)}"
            f"{str(error).strip().partition(chr(10))[0]} Make it an nn.Sequential, or change that line."
        ) from error


def _line_of(error: BaseException) -> str:
    """Return the innermost line of the user's code in a traceback, as a prefix of a message."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith((_TORCH, "<")) and frame.filename != __file__]
    user = [frame for frame in outside[1:] if frame.name != "_export"] or outside
    return f"{user[-1].filename}:{user[-1].lineno}: `{user[-1].line}`: " if user else ""


def _module_of(node: fx.Node) -> str:
    """Return the name of the innermost module that ran an operator."""
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    return str(list(stack.values())[-1][0])


def _call_of(node: fx.Node) -> str:
    """Return what tells the calls of one module apart: torch numbers them ("act", "act@1", ...)."""
    return str(list(node.meta.get("nn_module_stack") or {"": None})[-1])


def _name(nodes: list[fx.Node], layers: list[tuple[str, nn.Module]]) -> str:
    """Return a name for a layer, after its first module, that no layer before it has."""
    names = [name for node in nodes if (name := _module_of(node))]
    name, taken = names[0] if names else "model", {name for name, _ in layers}
    return next(
        unique
        for number in range(len(taken) + 1)
        if (unique := name if not number else f"{name}+{number}") not in taken
    )


def _can_be_sent(node: fx.Node) -> bool:
    """Whether a value can go to another stage: a tensor whose gradient can come back."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def _refuse_structure(model: nn.Module, spec: Any) -> None:
    """Refuse a model whose output is neither a tensor nor a tuple of tensors: no message can hold it."""
    if spec.is_leaf() or (spec.type is tuple and all(child.is_leaf() for child in spec.children())):
        return
    raise ConfigError(
        f"{type(model).__name__} returns a {spec.type.__name__}, and the last stage of a pipeline must return a tensor "
        "or a tuple of tensors. Change what its forward returns."
    )


def _refuse_values(model: nn.Module, results: list[Any]) -> None:
    """Refuse a model that returns a constant: only values of the graph can be computed by the last stage."""
    if not all(isinstance(result, fx.Node) for result in results):
        raise ConfigError(
            f"{type(model).__name__} returns something that is not a tensor, and the last stage of a pipeline must "
            "return a tensor or a tuple of tensors. Change what its forward returns."
        )
