"""What Poseidon's protocols send for the fully connected layers of AlexNet and VGG-16: as published, and as counted."""

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tutti.cluster import Cluster
from tutti.recipes.models import VGG16, AlexNet, mlp
from tutti.simulation.runs.scaling import ScalingCase, scaling
from tutti.strategies import Poseidon
from tutti.strategies.poseidon.rule import METHODS, LayerShape, Method, published, published_floats, sent_bytes

MODELS: dict[str, Callable[[], nn.Module]] = {"AlexNet": AlexNet, "VGG-16": VGG16}
PUBLISHED_PARAMETERS = {"AlexNet": (2.3e6, 59e6), "VGG-16": (7.15e6, 121.1e6)}
"""Of convolutions and of fully connected layers (Kim 2016)."""
TIMES_FULL, TIMES_OWNERS = 7.1, 4.0
"""How many times less than server and clients, and than Adam's scheme, a broadcast is said to send."""

WIDTHS = (9216, 4096, 4096, 1000)
"""Of AlexNet's fully connected layers: the inputs of the first, then the outputs of each."""


def widths(narrower: int = 1) -> tuple[int, ...]:
    """Of AlexNet's fully connected layers, or of such that are so many times narrower."""
    return tuple(width // narrower for width in WIDTHS)


def parameters() -> list[dict[str, Any]]:
    """How many parameters convolutions and fully connected layers have: published, and those of the models here."""
    rows = []
    for name, make in MODELS.items():
        with torch.device("meta"):
            model = make()
        connected = sum(p.numel() for layer in _linear(model) for p in layer.parameters())
        others = sum(p.numel() for p in model.parameters()) - connected
        rows.append({"model": name, "published": PUBLISHED_PARAMETERS[name], "here": (others, connected)})
    return rows


def shapes(model: str, num_rows: int) -> list[LayerShape]:
    """Weights of a model's fully connected layers, by the names that Caffe gives them."""
    with torch.device("meta"):
        layers = _linear(MODELS[model]())
    return [
        LayerShape(f"fc{number}", layer.out_features, layer.in_features, num_rows)
        for number, layer in enumerate(layers, 6)
    ]


def _linear(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def layer_by_layer(num_workers: int, num_rows: int) -> list[dict[str, Any]]:
    """Of every fully connected layer: numbers on the wire by the published formulas, and what a worker here sends."""
    return [
        {
            "model": model, "layer": asdict(shape), "workers": num_workers,
            "published_floats": published_floats(shape, num_workers), "sacp": published(shape, num_workers),
            "sent_bytes": sent_bytes(shape, num_workers),
        }
        for model in MODELS
        for shape in shapes(model, num_rows)
    ]  # fmt: skip


def factors(of: list[LayerShape], num_workers: int) -> tuple[float, float]:
    """How many times less a broadcast sends than server and clients, and than Adam's scheme, by published formulas."""
    floats = [published_floats(shape, num_workers) for shape in of]
    full, broadcast, owners = (sum(each[way] for each in floats) for way in ("full", "broadcast", "owners"))
    return full / broadcast, owners / broadcast


def solved(times_full: float = TIMES_FULL, times_owners: float = TIMES_OWNERS) -> tuple[float, float]:
    """The number of workers P, and M N / (K (M + N)), for which the published formulas give both factors."""
    share = times_owners - times_full / 2  # P / (P - 1)²
    workers = (2 * share + 1 + math.sqrt(4 * share + 1)) / (2 * share)
    return workers, times_full / (2 * share)


def formula_bytes(rule: str, layer_widths: tuple[int, ...], num_workers: int, num_rows: int) -> float:
    """What a worker sends in a step for layers one after the other, with their biases, which are summed in a ring."""
    total = 0.0
    for num_in, num_out in pairwise(layer_widths):
        shape = LayerShape("fc", num_out, num_in, num_rows)
        method: Method = published(shape, num_workers) if rule == "sacp" else _method(rule)
        bias_bytes = num_out * shape.itemsize
        total += sent_bytes(shape, num_workers)[method] + 2 * (num_workers - 1) / num_workers * bias_bytes
    return total


def _method(name: str) -> Method:
    return next(method for method in METHODS if method == name)


RULES = ("full", "broadcast", "owners", "sacp")


def counted(num_workers: int, num_rows: int, cluster: Cluster, narrower: int = 1) -> list[dict[str, Any]]:
    """Bytes that a worker sends in a step, simulated by sizes alone, beside what the formula says."""
    given, *_ = shape = widths(narrower)
    rows = []
    for rule in RULES:
        case = ScalingCase(
            model=partial(mlp, *shape),
            sample=(given,),
            cluster=cluster,
            strategy=Poseidon(rule),  # type: ignore[arg-type]
            batch_size=num_rows,
            steps=3,
        )
        (row,) = scaling(case, [num_workers])
        rows.append(beside_formula(rule, row.bytes_per_worker, shape, num_workers, num_rows))
    return rows


def beside_formula(
    rule: str, sent: float, layer_widths: tuple[int, ...], num_workers: int, num_rows: int
) -> dict[str, Any]:
    """What was counted, and how far it is from the formula."""
    formula = formula_bytes(rule, layer_widths, num_workers, num_rows)
    where = {"rule": rule, "workers": num_workers, "rows": num_rows, "widths": layer_widths}
    return {**where, "sent_bytes": sent, "formula_bytes": formula, "error": sent / formula - 1}
