"""Traffic of Poseidon's protocols for the fully connected layers of AlexNet and VGG-16: as published and as counted."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from reproductions.poseidon.results import CountedTraffic, LayerTraffic, ParameterCount
from tutti.cluster import Cluster
from tutti.recipes.models import VGG16, AlexNet, mlp
from tutti.simulation.runs.scaling import ScalingCase, scaling
from tutti.strategies import Poseidon
from tutti.strategies.poseidon.rule import METHODS, LayerShape, Method, published, published_floats, sent_bytes

MODELS: dict[str, Callable[[], nn.Module]] = {"AlexNet": AlexNet, "VGG-16": VGG16}
PUBLISHED_PARAMETERS = {"AlexNet": (2.3e6, 59e6), "VGG-16": (7.15e6, 121.1e6)}
"""Parameters of convolutions and of fully connected layers (Kim 2016)."""
TIMES_FULL, TIMES_OWNERS = 7.1, 4.0
"""Published factors by which a broadcast sends less than server and clients, and than Microsoft's Adam."""

WIDTHS = (9216, 4096, 4096, 1000)
"""Widths of AlexNet's fully connected layers: the inputs of the first, then the outputs of each."""

RULES = ("full", "broadcast", "owners", "sacp")
"""Rules of the strategy that are counted."""


def widths(narrowing: int = 1) -> tuple[int, ...]:
    """Return the widths of AlexNet's fully connected layers, divided by a factor."""
    return tuple(width // narrowing for width in WIDTHS)


def count_parameters() -> Iterator[ParameterCount]:
    """Count the parameters of convolutions and fully connected layers, beside the published numbers."""
    for name, make in MODELS.items():
        with torch.device("meta"):
            model = make()
        connected = sum(p.numel() for layer in _linear_layers(model) for p in layer.parameters())
        others = sum(p.numel() for p in model.parameters()) - connected
        yield ParameterCount(name, PUBLISHED_PARAMETERS[name], (others, connected))


def layer_shapes(model: str, num_rows: int) -> list[LayerShape]:
    """Return the weights of a model's fully connected layers, by their names in Caffe."""
    with torch.device("meta"):
        layers = _linear_layers(MODELS[model]())
    return [
        LayerShape(f"fc{number}", layer.out_features, layer.in_features, num_rows)
        for number, layer in enumerate(layers, 6)
    ]


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def layer_traffic(num_workers: int, num_rows: int) -> Iterator[LayerTraffic]:
    """Yield the traffic of every fully connected layer, by the published formulas and as implemented here."""
    for model in MODELS:
        for shape in layer_shapes(model, num_rows):
            yield LayerTraffic(
                model=model,
                layer=shape.name,
                num_out=shape.num_out,
                num_in=shape.num_in,
                num_rows=num_rows,
                workers=num_workers,
                published_floats=published_floats(shape, num_workers),
                sacp=published(shape, num_workers),
                sent_bytes={str(method): num_bytes for method, num_bytes in sent_bytes(shape, num_workers).items()},
            )


def published_factors(shapes: list[LayerShape], num_workers: int) -> tuple[float, float]:
    """Return by which factors a broadcast sends less than server and clients, and than Adam, by published formulas."""
    floats = [published_floats(shape, num_workers) for shape in shapes]
    full, broadcast, owners = (sum(layer[method] for layer in floats) for method in ("full", "broadcast", "owners"))
    return full / broadcast, owners / broadcast


def solve_factors(times_full: float = TIMES_FULL, times_owners: float = TIMES_OWNERS) -> tuple[float, float]:
    """Return the number of workers P, and M N / (K (M + N)), for which the published formulas give both factors."""
    share = times_owners - times_full / 2  # P / (P - 1)²
    workers = (2 * share + 1 + math.sqrt(4 * share + 1)) / (2 * share)
    return workers, times_full / (2 * share)


def formula_bytes(rule: str, layer_widths: tuple[int, ...], num_workers: int, num_rows: int) -> float:
    """Return the bytes that a worker sends per step for consecutive layers; their biases are summed in a ring."""
    total = 0.0
    for num_in, num_out in pairwise(layer_widths):
        shape = LayerShape("fc", num_out, num_in, num_rows)
        method: Method = published(shape, num_workers) if rule == "sacp" else _method(rule)
        bias_bytes = num_out * shape.itemsize
        total += sent_bytes(shape, num_workers)[method] + 2 * (num_workers - 1) / num_workers * bias_bytes
    return total


def _method(name: str) -> Method:
    return next(method for method in METHODS if method == name)


def count_traffic(num_workers: int, num_rows: int, cluster: Cluster) -> Iterator[CountedTraffic]:
    """Simulate AlexNet's fully connected layers by sizes alone, and count the bytes that a worker sends per step."""
    num_inputs, *_ = shape = widths()
    for rule in RULES:
        case = ScalingCase(
            model=partial(mlp, *shape),
            sample=(num_inputs,),
            cluster=cluster,
            strategy=Poseidon(rule),  # type: ignore[arg-type]
            batch_size=num_rows,
            steps=3,
        )
        (row,) = scaling(case, [num_workers])
        yield counted_traffic(rule, row.bytes_per_worker, shape, num_workers, num_rows)


def counted_traffic(
    rule: str, sent: float, layer_widths: tuple[int, ...], num_workers: int, num_rows: int
) -> CountedTraffic:
    """Return counted bytes together with those of the formula."""
    return CountedTraffic(
        rule=rule,
        workers=num_workers,
        num_rows=num_rows,
        widths=layer_widths,
        sent_bytes=sent,
        formula_bytes=formula_bytes(rule, layer_widths, num_workers, num_rows),
    )
