"""Layers of models that are not sequential, found by tracing."""

import pytest
import torch
from torch import Tensor, nn

from tutti.errors import ConfigError
from tutti.parallel.pipeline.layers import StageModule, check_no_shared_parameters, sequential_layers
from tutti.recipes.models import CharGPT, CharLSTM, FashionCNN


class Repeats(nn.Module):
    """Calls the same modules several times in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.activation = nn.Linear(3, 3), nn.Linear(3, 3), nn.Softplus()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(self.activation(self.first(x)))
        return self.activation(self.again(self.again(out)))


MODELS = {
    "modules called twice in a row": (Repeats(), torch.randn(2, 3)),
    "transformer": (CharGPT(21, context=8, width=16, num_heads=4, num_blocks=2), torch.randint(0, 21, (3, 8))),
    "convolutions": (FashionCNN(), torch.randn(2, 1, 28, 28)),
    "recurrent": (CharLSTM(21, 4, 8), torch.randint(0, 21, (3, 8))),
}


@pytest.mark.parametrize(("model", "example"), MODELS.values(), ids=MODELS)
def test_layers_do_what_the_model_does(model: nn.Module, example: Tensor) -> None:
    layers = sequential_layers(model, example)
    assert len(layers) > 2
    assert len({name for name, _ in layers}) == len(layers)
    check_no_shared_parameters(layers)
    stages = [StageModule(layers[:2]), StageModule(layers[2:])]
    values = (example,)
    for stage in stages:
        values = stage(*values)
        assert all(value.is_floating_point() for value in values)  # Or a gradient could not come back.
    assert torch.equal(values[0], model(example))
    assert {id(parameter) for stage in stages for parameter in stage.parameters()} == {
        id(parameter) for parameter in model.parameters()
    }


def test_a_sequential_is_not_traced() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    assert [name for name, _ in sequential_layers(model, None)] == ["0", "1.0", "1.1"]


class Undecided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        if made.sum() > 0:  # The branch depends on values.
            return made
        return -made


def test_a_model_that_cannot_be_traced() -> None:
    with pytest.raises(ConfigError, match=r"cannot be traced.*test_traced_layers.py:\d+: `if made.sum\(\) > 0:"):
        sequential_layers(Undecided(), torch.randn(2, 3))


def test_shared_parameters_are_refused() -> None:
    shared = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match=r"layers '0' and '2' share the parameter 'weight'"):
        check_no_shared_parameters(sequential_layers(nn.Sequential(shared, nn.ReLU(), shared), None))
