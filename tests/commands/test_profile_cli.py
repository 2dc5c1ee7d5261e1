"""`tutti profile`: recipes, models of the user's, and mistakes."""

import json
from pathlib import Path

import pytest
import torch

from command import Call, assert_refused
from tutti.cli.model_argument import resized
from tutti.recipes import RECIPES

NETS = """
import torch
from torch import nn

NUMBER = 3

def make(width=4):
    return nn.Sequential(nn.Linear(8, width), nn.Linear(width, 2)), torch.randn(3, 8)

def alone():
    return nn.Conv2d(3, 4, 3)

def labelled():
    return nn.Linear(8, 2), (torch.randn(3, 8), torch.zeros(3))

class Net(nn.Conv2d):
    def __init__(self):
        super().__init__(3, 4, 3)

def text():
    return "a model"

def broken():
    return nn.Sequential(nn.Linear(8, 4), nn.Linear(5, 2)), torch.randn(3, 8)

def raises():
    raise KeyError("weights")
"""


@pytest.fixture
def nets(tmp_path: Path) -> str:
    """A module of the user's, by a name that no other test has imported."""
    name = f"nets_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(NETS)
    return name


def test_a_recipe(call: Call, tmp_path: Path) -> None:
    ended = call("profile", "mnist-mlp", "--batch", "16", "--json", "profile.json")
    assert ended.status == 0, ended.err
    assert ended.out.startswith("mnist-mlp, 16 samples on cpu")
    for words in ("layers.4", "between layers", "backward", "W/D", "1.017 MiB in 6 parameters"):
        assert words in ended.out, words
    found = json.loads((tmp_path / "profile.json").read_text())
    assert (found["subject"], found["num_samples"], found["device"]) == ("mnist-mlp", 16, "cpu")
    assert [layer["kind"] for layer in found["layers"]] == ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert found["layers"][0]["work"] == 2 * 16 * 784 * 300
    assert {gradient["name"] for gradient in found["gradients"][:2]} == {"layers.4.weight", "layers.4.bias"}
    assert found["step_s"] > 0


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_within_80_columns(name: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ended = call("profile", name, "--batch", "2")
    assert ended.status == 0, ended.err
    assert max(map(len, ended.out.splitlines())) <= 80
    assert "…" not in ended.out


def test_options_of_recipes_and_factories(call: Call, tmp_path: Path, nets: str) -> None:
    for words in (["mnist-mlp", "--option", "second_hidden=7"], [f"{nets}:make", "--option", "width=7"]):
        assert call("profile", *words, "--batch", "2", "--json", "profile.json").status == 0
        shapes = [each["shape"] for each in json.loads((tmp_path / "profile.json").read_text())["gradients"]]
        assert [7] in shapes


def test_a_factory_with_and_without_a_batch(call: Call, tmp_path: Path, nets: str) -> None:
    for words, samples in (
        (["make"], 3),
        (["make", "--batch", "7"], 7),
        (["labelled", "--batch", "2"], 2),
        (["alone", "--input", "3x5x5"], 32),
        (["alone", "--input", "3x5x5", "--batch", "2"], 2),
        (["Net", "--input", "3x5x5", "--batch", "2"], 2),
    ):
        ended = call("profile", f"{nets}:{words[0]}", *words[1:], "--json", "profile.json")
        assert ended.status == 0, ended.err
        assert json.loads((tmp_path / "profile.json").read_text())["num_samples"] == samples
    assert "not measured: the factory has no optimiser" in ended.out


def test_a_batch_of_another_size_has_the_same_samples() -> None:
    x, y = torch.arange(6).reshape(3, 2), torch.arange(3)
    (more, labels), scale = resized(((x, y), 2.0), 5)
    assert torch.equal(more, x[[0, 1, 2, 0, 1]])
    assert torch.equal(labels, y[[0, 1, 2, 0, 1]])
    assert scale == 2.0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["mnist-mpl"], "unknown recipe 'mnist-mpl'. Did you mean 'mnist-mlp'?"),
        (["mnist-mpl"], "A model of your own is MODULE:FACTORY"),
        (["digits", "--batch", "-1"], "--batch must be 1 or more, got -1."),
        (["digits", "--batch", "0"], "--batch must be 1 or more, got 0"),
        (["digits", "--input", "8x8"], "--input is for factories that return no batch"),
        (["digits", "--option", "width=3"], "recipe 'digits' has no option width"),
        (["digits", "--device", "tpu9"], "--device takes cpu, cuda or cuda:1, got 'tpu9'"),
        (["digits", "--device", "cuda:99"], "--device cuda:99 does not exist: there are"),
        (["digits", "--json", "nowhere/profile.json"], "nowhere/profile.json cannot be written"),
        (["no_such_module:make"], "no module 'no_such_module', in this folder or installed"),
        (["json:dumps"], "json:dumps fails: TypeError"),
    ],
)
def test_mistakes(words: list[str], says: str, call: Call, tmp_path: Path) -> None:
    assert_refused(call("profile", *words), says.replace("?", r"\?"), tmp_path)


@pytest.mark.parametrize(
    ("factory", "words", "says"),
    [
        ("mak", [], "Did you mean 'make'? It has: Net, alone, broken, labelled, make, raises, text."),
        ("NUMBER", [], "is a int, not a function"),
        ("text", [], "returned a str. A factory returns a model, or a model and a batch"),
        ("raises", [], "raises fails: KeyError: 'weights'"),
        ("alone", [], "returned a model without a batch"),
        ("alone", ["--input", "3xx"], "--input takes sizes of 1 or more with x between"),
        ("alone", ["--input", "2x5x5"], "the model fails in forward, in Conv2d: RuntimeError"),
        ("make", ["--input", "8"], "returned a batch: --input is for factories that return none"),
        ("broken", [], "the model fails in forward, in '1' (Linear): RuntimeError"),
    ],
)
def test_mistakes_of_factories(factory: str, words: list[str], says: str, call: Call, nets: str) -> None:
    ended = call("profile", f"{nets}:{factory}", *words)
    assert ended.status == 2
    assert says in ended.err.replace("\n", " ")
    assert "Traceback" not in ended.err


def test_a_module_that_cannot_be_imported(call: Call, tmp_path: Path) -> None:
    (tmp_path / "unfinished_net.py").write_text("import no_such_library\n")
    ended = call("profile", "unfinished_net:make")
    assert ended.status == 2
    assert "module 'unfinished_net' cannot be imported: ModuleNotFoundError" in ended.err
