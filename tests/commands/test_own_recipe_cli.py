"""`tutti train MODULE:FACTORY`: a recipe of the user's own, and mistakes explained."""

import json
from pathlib import Path

import pytest

from command import Call, assert_refused
from tutti.errors import ConfigError
from tutti.recipes import recipe

MODULE = """
from dataclasses import replace
import torch
from tutti.recipes import digits


def tiny(width=16):
    model = lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.Linear(width, 10))
    return replace(digits(), name="tiny", model=model, epochs=2, target=0.5)


def no_recipe():
    return torch.nn.Linear(1, 1)


def fails():
    raise LookupError("no data")


class Net(torch.nn.Linear):
    pass


number = 3
"""


def test_train_a_recipe_of_ones_own(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    ended = call("train", "mine:tiny", "--option", "width=8", "--workers", "2", "--check", "--name", "own")
    assert ended.status == 0, ended.err
    assert "2 workers matched one" in ended.out
    summary = json.loads((tmp_path / "runs" / "own" / "summary.json").read_text())
    assert (summary["recipe"], summary["options"], summary["epochs"]) == ("mine:tiny", {"width": 8}, 2)


def test_benchmarks_take_a_recipe_of_ones_own(call: Call, tmp_path: Path) -> None:
    (tmp_path / "timed.py").write_text(MODULE)
    words = ["--strategies", "native", "--rounds", "1", "--json", "strategies.json"]
    ended = call("bench", "strategies", "timed:tiny", *words)
    assert ended.status == 0, ended.err
    assert "timed:tiny" in ended.out
    (run,) = json.loads((tmp_path / "strategies.json").read_text())["runs"]
    assert run["seconds"]["native"] > 0
    ended = call("bench", "overhead", "timed:tiny", "--no-compiled", "--rounds", "1", "--json", "overhead.json")
    assert ended.status == 0, ended.err
    assert {row["case"] for row in json.loads((tmp_path / "overhead.json").read_text())} == {"timed:tiny"}
    ended = call("bench", "strategies", "timed:no_recipe")
    assert ended.status == 2
    assert "timed:no_recipe returned a Linear" in ended.err


REFUSED = {
    "no module": ("nowhere:tiny", r"no module 'nowhere', in this folder or installed"),
    "no function": (
        "wrong:tyni",
        r"module 'wrong' has no function 'tyni'. It has: fails, no_recipe, tiny\.\n",
    ),
    "not callable": ("wrong:number", r"wrong:number is a int, not a function. .* returns a tutti.recipes.Recipe"),
    "a class": ("wrong:Net", r"wrong:Net is a class, not a function. .* returns a tutti.recipes.Recipe"),
    "no recipe": ("nosuch", r"unknown recipe 'nosuch'[^\n]*\nA recipe of your own is MODULE:FACTORY"),
    "another type": ("wrong:no_recipe", r"wrong:no_recipe returned a Linear. .* returns a tutti.recipes.Recipe"),
    "an error": ("wrong:fails", r"wrong:fails fails: LookupError: no data"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(text: str, message: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "wrong.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(folder))
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    assert_refused(call("train", text), message, empty)


def test_recipe_takes_a_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "another.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    assert recipe("another:tiny", width=4).name == "tiny"
    with pytest.raises(ConfigError, match="fails: TypeError"):
        recipe("another:tiny", depth=4)
