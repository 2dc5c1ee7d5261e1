"""Registries: built-in entries, entries of installed packages, and what is said when a package is wrong."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plugin_package import CODE, GROUPS, install
from profiles import lab_perceptron
from tutti.cluster import Cluster, Link
from tutti.codecs import CODECS, ErrorFeedback
from tutti.collectives import ALGORITHMS
from tutti.errors import ConfigError, PluginError, UnknownName
from tutti.plan import plan
from tutti.plugins import Registry
from tutti.recipes import RECIPES, recipe
from tutti.strategies import STRATEGIES, AllReduce, parse

REGISTRIES: list[Registry] = [STRATEGIES, CODECS, ALGORITHMS, RECIPES]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """On the path, with registries that have read nothing yet."""
    monkeypatch.syspath_prepend(str(tmp_path))
    _forget()
    yield tmp_path
    sys.modules.pop("my_tutti", None)
    _forget()


def _forget() -> None:
    importlib.invalidate_caches()
    for registry in REGISTRIES:
        registry.forget_plugins()


def test_a_package_adds_to_every_registry(folder: Path) -> None:
    install(folder, "my-tutti", GROUPS, CODE)
    assert str(parse("vote:scale=2")) == "vote:scale=2.0"
    assert parse("half") == AllReduce(codec=ErrorFeedback(CODECS["half"]()))
    assert parse("again") == AllReduce("again")
    assert recipe("small-digits").epochs == 1
    assert {"vote", "ring"} <= set(STRATEGIES)
    assert STRATEGIES.package_of("vote") == "package 'my-tutti'"
    assert STRATEGIES.package_of("ring") is None


def test_nothing_is_read_for_built_in_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.plugins.entry_points", None)
    assert str(parse("ring")) == "ring"
    assert "digits" in RECIPES
    with pytest.raises(TypeError):
        parse("vote")


def test_strategies_of_packages_are_planned(folder: Path) -> None:
    install(folder, "my-tutti", GROUPS, CODE)
    install(folder, "my-broken", {"tutti.strategies": {"broken": "no_such_module:read"}})
    made = plan(lab_perceptron(0.02), 4, Cluster(link=Link("1gbit", "50us")), allow_lossy=True)
    assert {"priced-vote", "again"} <= {str(prediction.strategy) for prediction in made.predictions}
    assert made.not_priced["vote"] == "my_tutti.MajorityVote has no cost"
    assert "package 'my-broken'" in made.not_priced["broken"]


def test_codecs_of_packages_are_planned(folder: Path) -> None:
    code = CODE + "\n\ndef needs_options(ratio):\n    return Half()\n"
    codecs = {"half": "my_tutti:Half", "optional": "my_tutti:needs_options"}
    install(folder, "my-tutti", {"tutti.codecs": codecs}, code)
    install(folder, "my-broken", {"tutti.codecs": {"broken": "no_such_module:Codec"}})
    made = plan(lab_perceptron(0.02), 4, Cluster(link=Link("1gbit", "50us")), allow_lossy=True)
    strategies = [prediction.strategy for prediction in made.predictions]
    assert AllReduce(codec=ErrorFeedback(CODECS["half"]())) in strategies
    assert "optional" not in map(str, strategies)
    assert "package 'my-broken'" in made.not_priced["broken"]


def test_an_unknown_name_lists_all_and_what_failed(folder: Path) -> None:
    install(folder, "my-tutti", GROUPS, CODE)
    install(folder, "my-broken", {"tutti.strategies": {"broken": "no_such_module:read"}})
    with pytest.raises(UnknownName) as caught:
        parse("votes")
    for words in (
        "Did you mean 'vote'?",
        "Known: again, auto,",
        "package 'my-broken' offers the strategy 'broken' and failed to load (no_such_module:read): ModuleNotFound",
    ):
        assert words in str(caught.value)


def test_a_package_that_fails_to_load_is_named(folder: Path) -> None:
    install(folder, "my-broken", {"tutti.codecs": {"half": "my_tutti:Half"}}, "raise RuntimeError('no such GPU')")
    with pytest.raises(PluginError, match=r"package 'my-broken' .* failed to load \(my_tutti:Half\): RuntimeError: no"):
        parse("half")


def test_two_packages_with_one_name_are_refused(folder: Path) -> None:
    install(folder, "my-tutti", GROUPS, CODE)
    install(folder, "other", {"tutti.codecs": {"half": "my_tutti:again"}})
    assert "half" in CODECS
    with pytest.raises(PluginError, match=r"codec 'half' is offered by .* and .*. Uninstall") as e:
        parse("half")
    assert "'my-tutti' (my_tutti:Half)" in str(e.value)
    assert "'other' (my_tutti:again)" in str(e.value)


WRONG = {
    "a strategy's class": (STRATEGIES, "MajorityVote", "as the class MajorityVote; wanted is a function of options"),
    "a strategy that is a text": (STRATEGIES, "read_wrongly", "made 'a text' of type str; wanted is a tutti"),
    "no codec": (CODECS, "GROUPS", "as .* of type dict; wanted is a subclass of tutti.codecs.Codec"),
    "a function for a codec": (CODECS, "small_digits", "made Recipe.*; wanted is a tutti.codecs.base.Codec"),
    "no collective": (ALGORITHMS, "Half", "as the class Half; wanted is a tutti.collectives.Collective"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_type_is_named(wrong: str, folder: Path) -> None:
    registry, attribute, message = WRONG[wrong]
    install(folder, "my-tutti", {registry.group: {"x": f"my_tutti:{attribute}"}}, CODE + "\nGROUPS = {}\n")
    use = ALGORITHMS.find if registry is ALGORITHMS else parse
    with pytest.raises(PluginError, match=rf"package 'my-tutti' offers .* 'x'.*{message}"):
        use("x")


def test_a_built_in_name_stays_what_it_is(folder: Path) -> None:
    install(folder, "my-tutti", {"tutti.codecs": {"onebit": "my_tutti:Half"}}, CODE)
    with pytest.warns(UserWarning, match="package 'my-tutti' offers the codec 'onebit', which is built in"):
        names = list(CODECS)
    assert names.count("onebit") == 1
    assert CODECS["onebit"].__module__ == "tutti.codecs.onebit"


def test_a_strategy_of_a_package_does_not_take_over_the_text_of_a_built_in_codec(folder: Path) -> None:
    install(folder, "my-tutti", {"tutti.strategies": {"onebit": "my_tutti:read_vote"}}, CODE)
    with pytest.warns(UserWarning, match="package 'my-tutti' offers the strategy 'onebit', which is built in"):
        strategy = parse("onebit")
    assert isinstance(strategy, AllReduce)
    assert "onebit" not in STRATEGIES


def test_it_is_a_mapping() -> None:
    registry = Registry("thing", "tutti.things", {"a": 1, "b": "math:pi"}, callable, "a function")
    assert (list(registry), len(registry), registry["a"]) == (["a", "b"], 2, 1)
    assert registry["b"] == pytest.approx(3.14159, abs=1e-5)
    assert registry.get("c") is None
    with pytest.raises(ConfigError, match=r"unknown thing 'c'\. Known: a, b\."):
        registry.find("c")
