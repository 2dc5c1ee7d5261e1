"""`tutti.summary`: layers, shapes, and the buckets that a run has."""

import pytest
import torch
from torch import nn

import tutti
from support import run_ok
from tutti.errors import ConfigError
from tutti.world import World


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def test_layers_and_shapes() -> None:
    model = network()
    model[0].requires_grad_(False)
    found = tutti.summary(model, torch.randn(2, 1, 8, 8))
    assert [(layer.name, layer.kind, layer.outputs) for layer in found.layers] == [
        ("0", "Conv2d", "[2, 4, 6, 6]"),
        ("1", "BatchNorm2d", "[2, 4, 6, 6]"),
        ("2", "ReLU", "[2, 4, 6, 6]"),
        ("3", "Flatten", "[2, 144]"),
        ("4", "Linear", "[2, 10]"),
    ]
    assert found.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.num_trainable == found.num_parameters - 40
    assert found.gradient_bytes == 4 * found.num_trainable
    lines = str(found).splitlines()
    assert lines[0].split() == ["layer", "type", "output", "parameters", "trainable", "gradients"]
    assert lines[1].split()[-3:] == ["40", "0", "frozen"]
    assert lines[-1].startswith("Exchanged in every step, before compression: 2 buckets (")
    assert model.training
    assert int(model[1].num_batches_tracked) == 0


def test_buckets_are_those_of_a_run() -> None:
    def train(world: World) -> tuple[tuple[int, ...], tuple[int, ...]]:
        model = nn.Sequential(network(), nn.Linear(10, 200_000), nn.Linear(200_000, 8))
        with tutti.distribute(model, torch.optim.SGD(model.parameters()), "ring", world=world) as job:
            return tutti.summary(model).bucket_bytes, tuple(bucket.flat.nbytes for bucket in job._replica.buckets)

    for found, present in run_ok(train, size=2, transport="sockets"):
        assert found == present
        assert len(found) > 2


def test_without_an_example() -> None:
    assert "output" not in str(tutti.summary(network())).splitlines()[0]


def test_a_shared_parameter_counts_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert tutti.summary(model).num_parameters == 16


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="needs a torch"):
        tutti.summary(3)  # type: ignore[arg-type]
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ConfigError, match="give one as example"):
        tutti.summary(lazy)
    assert tutti.summary(lazy, torch.ones(2, 5)).num_parameters == 18
    assert "nothing is exchanged" in str(tutti.summary(nn.Linear(2, 2).requires_grad_(False)))
