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


number = 3
"""


def test_train_a_recipe_of_ones_own(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    ended = call("train", "mine:tiny", "--option", "width=8", "--workers", "2", "--check", "--name", "own")
    assert ended.status == 0, ended.err
    assert "2 workers matched one" in ended.out
    summary = json.loads((tmp_path / "runs" / "own" / "summary.json").read_text())
    assert (summary["recipe"], summary["options"], summary["epochs"]) == ("mine:tiny", {"width": 8}, 2)


REFUSED = {
    "no module": ("nowhere:tiny", r"no module 'nowhere', in this folder or installed"),
    "no function": ("wrong:tyni", r"unknown factory in module 'wrong' 'tyni'. Known: .*tiny"),
    "not callable": ("wrong:number", r"wrong:number is a int, and no function. .* returns a tutti.recipes.Recipe"),
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
