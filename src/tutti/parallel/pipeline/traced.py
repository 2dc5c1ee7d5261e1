"""Layers of a model that is no sequence, as `torch.export` sees it: cut wherever one module's operators end."""

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

_one_at_a_time = Lock()  # Tracing keeps its state in the process; ranks may be threads.

_TORCH = str(Path(torch.__file__).parent)


def traced_layers(model: nn.Module, example: Any) -> list[tuple[str, nn.Module]]:
    """The model's operators, grouped by the module that ran them; each group a layer."""
    args = example if isinstance(example, tuple) else (example,)
    graph = _export(model, args).graph
    values = [node for node in graph.nodes if node.op == "placeholder"]
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    _refuse_values(model, results)
    position = {node: index for index, node in enumerate([*values, *nodes])}
    position[output] = len(position)
    last_use = {node: max((position.get(user, -1) for user in node.users), default=-1) for node in position}
    groups = [list(group) for _, group in groupby(nodes, _module_of)]
    layers: list[tuple[str, nn.Module]] = []
    live, waiting = values, list[fx.Node]()
    for group in groups:
        waiting += group
        end = position[waiting[-1]]
        after = [node for node in position if position[node] <= end and last_use[node] > end]
        if group is groups[-1]:
            after = results
        elif not all(_can_travel(node) for node in after):
            continue  # Not a place to cut: something here is no tensor that can have a gradient.
        layers.append((_name(waiting, layers), _TracedLayer(model, waiting, live, after)))
        live, waiting = after, []
    return layers


class _TracedLayer(nn.Module):
    """Some operators of the graph. What later ones need goes through."""

    def __init__(
        self, model: nn.Module, nodes: Sequence[fx.Node], takes: Sequence[fx.Node], gives: Sequence[fx.Node]
    ) -> None:
        super().__init__()
        self._takes, self._gives = [node.name for node in takes], [node.name for node in gives]
        self._steps: list[tuple[str, str | None, Any, Any, Any]] = []
        for path, group in groupby(nodes, _module_of):
            self._add(model, path, list(group))

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        known: dict[str, Any] = dict(zip(self._takes, values, strict=True))
        for name, module, target, args, kwargs in self._steps:
            if module is not None:
                known[name] = self.get_submodule(module)(known[args])
            else:
                known[name] = self._run(known, target, (args, kwargs))
        return tuple(known[name] for name in self._gives)

    def _run(self, known: dict[str, Any], target: Any, arguments: Any) -> Any:
        args, kwargs = fx.node.map_arg(arguments, lambda node: self._value(known, node))
        return target(*args, **kwargs)

    def _add(self, model: nn.Module, path: str, group: list[fx.Node]) -> None:
        """One module's operators; the module itself in their place, where it only turns one tensor into another."""
        module = model.get_submodule(path)
        inside = set(group)
        inputs = {it for node in group for it in node.all_input_nodes if it not in inside and it.op != "get_attr"}
        outputs = [node for node in group if any(user not in inside for user in node.users)]
        leaf = not list(module.children()) and len(inputs) == len(outputs) == 1
        if leaf and type(module).__module__.startswith("torch.nn") and not isinstance(module, nn.RNNBase):
            key = path.replace(".", "/")
            self.add_module(key, module)
            self._steps.append((outputs[0].name, key, None, next(iter(inputs)).name, None))
            return
        for node in group:
            for each in node.all_input_nodes:
                if each.op == "get_attr":
                    self._hold(model, str(each.target), each.name)
            self._steps.append((node.name, None, node.target, node.args, node.kwargs))

    def _hold(self, model: nn.Module, target: str, name: str) -> None:
        owner, _, key = target.rpartition(".")
        try:
            tensor = getattr(model.get_submodule(owner), key)
        except AttributeError as error:
            raise ConfigError(f"the model makes a constant tensor ('{target}') that no module holds.") from error
        if isinstance(tensor, nn.Parameter):
            self.register_parameter(name, tensor)
        else:
            self.register_buffer(name, tensor, persistent=False)  # Of this stage's rank, as parameters are.

    def _value(self, known: dict[str, Any], node: fx.Node) -> Any:
        if node.op != "get_attr":
            return known[node.name]
        return self._parameters[node.name] if node.name in self._parameters else self._buffers[node.name]


def _export(model: nn.Module, args: tuple[Any, ...]) -> fx.GraphModule:
    try:
        with _one_at_a_time, torch.enable_grad(), warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")  # They, and what is printed, are about exporting, which nobody does here.
            exported = torch.export.export(model, args, strict=False)
            _refuse_structure(model, exported.call_spec.out_spec)
            return exported.module()
    except ConfigError:
        raise
    except Exception as error:  # Whatever it is, it is about the model.
        raise ConfigError(
            f"the model cannot be traced, so no cut into stages can be found: {_line_of(error)}"
            f"{str(error).strip().splitlines()[0]} Make it an nn.Sequential, or mend that line."
        ) from error


def _line_of(error: BaseException) -> str:
    """The user's line at which it came up."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [it for it in frames if not it.filename.startswith((_TORCH, "<")) and it.filename != __file__]
    inside = [it for it in mine[1:] if it.name != "_export"] or mine
    return f"{inside[-1].filename}:{inside[-1].lineno}: `{inside[-1].line}`: " if inside else ""


def _module_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    return str(list(stack.values())[-1][0])


def _name(nodes: list[fx.Node], layers: list[tuple[str, nn.Module]]) -> str:
    names = [name for node in nodes if (name := _module_of(node))]
    name, taken = names[0] if names else "model", {name for name, _ in layers}
    return next(
        each for number in range(len(taken) + 1) if (each := name if not number else f"{name}+{number}") not in taken
    )


def _can_travel(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def _refuse_structure(model: nn.Module, spec: Any) -> None:
    """Refuse what is neither a tensor nor a tuple of them: what the loss gets is what the model gives."""
    if spec.is_leaf() or (spec.type is tuple and all(each.is_leaf() for each in spec.children())):
        return
    raise ConfigError(
        f"{type(model).__name__} gives a {spec.type.__name__}, and a pipeline's last stage gives a tensor or a tuple "
        "of tensors: have it return those."
    )


def _refuse_values(model: nn.Module, results: list[Any]) -> None:
    if not all(isinstance(each, fx.Node) for each in results):
        raise ConfigError(f"{type(model).__name__} gives something that is no tensor, which cannot leave a pipeline.")
