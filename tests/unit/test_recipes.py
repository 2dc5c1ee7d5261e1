"""The models and the record, and what every recipe in the registry promises."""

import dataclasses
import pickle
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tutti.errors import ConfigError, UnknownName
from tutti.recipes import RECIPES, Recipe, accuracy, collate, cross_entropy, digits, models, recipe
from tutti.recipes.speeds import IMAGES_PER_S, seconds_per_sample

DOCS = Path(__file__).parents[2] / "docs" / "data.md"


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def train(made: Recipe, seed: int) -> float:
    """The test accuracy after a whole solo run."""
    torch.manual_seed(seed)
    splits, model = made.data(None), made.model()
    optimizer = made.optimizer(model)
    for _ in range(made.epochs):
        for inputs, targets in DataLoader(splits.train, made.batch_size, shuffle=True, collate_fn=collate):
            made.loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    inputs, targets = next(iter(DataLoader(splits.test, len(splits.test), collate_fn=collate)))
    with torch.no_grad():
        return float(made.accuracy(model(inputs), targets))


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (models.CifarQuick(), 145_578),
        (models.FourLayerMLP(100), 784 * 300 + 300 + 300 * 100 + 100 + 100 * 10 + 10),
        (models.FourLayerMLP(7, first_hidden_width=5), 784 * 5 + 5 + 5 * 7 + 7 + 7 * 10 + 10),
        (models.DigitsMLP(), 64 * 64 + 64 + 64 * 10 + 10),
        (models.mlp(3, 4, 5), 3 * 4 + 4 + 4 * 5 + 5),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_parameter_counts(model: nn.Module, count: int) -> None:
    assert num_parameters(model) == count


def test_mlp_has_no_relu_at_the_end_and_refuses_nonsense() -> None:
    assert [type(layer) for layer in models.mlp(3, 4, 5)] == [nn.Linear, nn.ReLU, nn.Linear]
    for widths in ((), (3,), (3, 0, 2)):
        with pytest.raises(ConfigError, match="two or more widths"):
            models.mlp(*widths)


@pytest.mark.parametrize("model", [partial(models.CharLSTM, 11), partial(models.CharGPT, 11, context=9)])
def test_char_models_see_no_later_character(model: partial[nn.Module]) -> None:
    torch.manual_seed(0)
    net, tokens = model(), torch.randint(11, (2, 9))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = net(tokens), net(changed)
    assert before.shape == (2, 9, 11)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_char_gpt_says_what_it_cannot_read() -> None:
    with pytest.raises(ConfigError, match="at most 4 characters at once, got 5"):
        models.CharGPT(11, context=4)(torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(ConfigError, match="width that 4 heads divide, got 6"):
        models.CharGPT(11, width=6)


COUNTS = {"resnet50": 25_557_032, "alexnet": 61_100_840, "googlenet": 6_624_904}


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("name", models.LARGE)
def test_large_models(name: str, device: str) -> None:
    with torch.device(device):
        model, images = models.large(name), torch.zeros(1, 3, 224, 224)
    assert {p.device.type for p in model.parameters()} == {device}
    assert num_parameters(model) == COUNTS[name]
    scores = model(images)
    assert scores.shape == (1, 1000)
    scores.sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_vgg() -> None:
    """As many parameters as Simonyan and Zisserman's table 2 gives for D, 138 million."""
    with torch.device("meta"):
        model = models.VGG16()
        assert model(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)
    assert num_parameters(model) == 138_357_544
    assert len([module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]) == 16


@pytest.mark.parametrize(
    ("model", "features"),
    [(models.ResNet50, 2048), (models.AlexNet, 4096), (models.GoogLeNet, 1024), (models.VGG16, 4096)],
)
def test_large_models_of_other_classes(model: type[nn.Module], features: int) -> None:
    with torch.device("meta"):
        usual, small = model(), model(num_classes=7)
        assert small(torch.zeros(1, 3, 224, 224)).shape == (1, 7)
    assert num_parameters(usual) - num_parameters(small) == (1000 - 7) * (features + 1)


def test_large_models_by_name() -> None:
    with pytest.raises(UnknownName, match=r"unknown model 'resnet5'. Did you mean 'resnet50'\?.*alexnet, googlenet"):
        models.large("resnet5")


def test_speeds_are_of_large_models_and_a_missing_one_says_what_there_is() -> None:
    assert all(speeds and speeds.keys() <= models.LARGE.keys() for speeds in IMAGES_PER_S.values())
    assert seconds_per_sample("p100", "resnet50") == 1 / 219
    for accelerator in ("p100", "titan-x-pascal"):
        fast, middling, slow = (seconds_per_sample(accelerator, name) for name in ("alexnet", "googlenet", "resnet50"))
        assert fast < middling < slow
    with pytest.raises(UnknownName, match=r"unknown accelerator 'p10'. Did you mean 'p100'\?"):
        seconds_per_sample("p10", "resnet50")
    with pytest.raises(
        ConfigError, match=r"'googlenet' on 'k80', which has: resnet50, alexnet. .* on k40, titan-x-pascal, p100"
    ):
        seconds_per_sample("k80", "googlenet")
    with pytest.raises(ConfigError, match=r"'vgg16' on 'v100', which has: resnet50\.$"):
        seconds_per_sample("v100", "vgg16")


def test_objectives_agree_on_images_and_text() -> None:
    scores, targets = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, 0])
    torch.testing.assert_close(cross_entropy(scores, targets), nn.functional.cross_entropy(scores, targets))
    torch.testing.assert_close(cross_entropy(scores.view(2, 3, 5), targets.view(2, 3)), cross_entropy(scores, targets))
    right = nn.functional.one_hot(targets, 5).float()
    right[0] = right[1]
    assert accuracy(right, targets) == pytest.approx(5 / 6)
    assert accuracy(right.view(2, 3, 5), targets.view(2, 3)) == pytest.approx(5 / 6)


@pytest.mark.parametrize("name", RECIPES)
class TestEveryRecipe:
    def test_trains_on_its_example(self, name: str) -> None:
        made = recipe(name)
        assert made.name == name
        torch.manual_seed(0)
        model, (inputs, targets) = made.model(), made.example(3)
        assert num_parameters(model) <= 1_000_000
        optimizer = made.optimizer(model)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in held} == {id(p) for p in model.parameters()}
        output = model(inputs)
        assert output.shape[:-1] == targets.shape
        assert len(inputs) == len(targets) == 3
        loss = made.loss(output, targets)
        assert loss.shape == ()
        assert loss.isfinite()
        assert 0 <= made.accuracy(output, targets) <= 1
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        assert made.loss(model(inputs), targets) < loss

    def test_loss_is_the_mean_over_samples(self, name: str) -> None:
        made = recipe(name)
        model, (inputs, targets) = made.model(), made.example(4)
        each = [made.loss(model(inputs[i : i + 1]), targets[i : i + 1]) for i in range(4)]
        torch.testing.assert_close(made.loss(model(inputs), targets), torch.stack(each).mean())

    def test_only_the_model_depends_on_the_random_state(self, name: str) -> None:
        made = recipe(name)
        torch.manual_seed(1)
        first = made.model().state_dict()
        torch.manual_seed(1)
        second = made.model().state_dict()
        assert all(torch.equal(first[key], second[key]) for key in first)
        state = torch.get_rng_state()
        assert all(torch.equal(a, b) for a, b in zip(made.example(2), made.example(2), strict=True))
        assert torch.equal(torch.get_rng_state(), state)

    def test_travels_to_another_process(self, name: str) -> None:
        made: Recipe = pickle.loads(pickle.dumps(recipe(name)))
        assert made.model()(made.example(1)[0]).isfinite().all()

    def test_runs_without_memory_on_the_meta_device(self, name: str) -> None:
        made = recipe(name)
        inputs, targets = made.example(2)
        output = made.model().to("meta")(inputs.to("meta"))
        made.loss(output, targets.to("meta")).backward()
        assert output.shape[:-1] == targets.shape


def test_names_and_options() -> None:
    with pytest.raises(UnknownName, match=r"unknown recipe 'digit'. Did you mean 'digits'\?"):
        recipe("digit")
    with pytest.raises(ConfigError, match=r"'mnist-mlp' has no option width. Options: second_hidden"):
        recipe("mnist-mlp", width=3)
    with pytest.raises(ConfigError, match=r"'digits' has no option lr. It takes none"):
        recipe("digits", lr=3)
    with pytest.raises(ConfigError, match="second_hidden of 1 or more, got 0"):
        recipe("mnist-mlp", second_hidden=0)
    assert num_parameters(recipe("mnist-mlp", second_hidden=7).model()) == num_parameters(models.FourLayerMLP(7))


def test_a_wrong_recipe_hears_of_all_mistakes_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(
            digits(),
            name="My Recipe",
            summary="",
            model=None,  # type: ignore[arg-type]
            batch_size=0,
            epochs=-1,
            target=95.0,
        )
    for part in (
        "'My Recipe'",
        "summary needs",
        "model needs",
        "batch_size needs 1 or more, got 0",
        "got -1",
        "95.0",
    ):
        assert part in str(caught.value)


def test_digits_reaches_its_target() -> None:
    made = digits()
    assert made.target >= 0.95
    assert train(made, seed=0) >= made.target


def test_the_recipe_in_the_docs_reaches_its_target() -> None:
    code = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[-1]
    names: dict[str, object] = {}
    exec(compile(code, str(DOCS), "exec"), names)
    made = names["parity"]()  # type: ignore[operator]
    assert isinstance(made, Recipe)
    assert train(made, seed=0) >= made.target


def test_the_docs_list_every_recipe() -> None:
    assert re.findall(r"^\| `([a-z-]+)`", DOCS.read_text(), re.MULTILINE) == list(RECIPES)
