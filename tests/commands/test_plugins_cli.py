"""Strategies, codecs and recipes of an installed package, at the command line."""

import os
import subprocess
from pathlib import Path

import pytest

import warm
from plugin_package import CODE, GROUPS, install


@pytest.fixture
def command(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Run a command with the package on the path of all its processes."""
    install(tmp_path / "packages", "my-tutti", GROUPS, CODE)
    path = os.pathsep.join([str(tmp_path / "packages"), os.environ.get("PYTHONPATH", "")])

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*warm.main_of("tutti.cli"), *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=55,
            check=False,
        )

    return run


@pytest.mark.parametrize("strategy", ["vote:scale=2.0", "half"])
def test_train_with_a_packages_recipe_and_strategy(strategy: str, command) -> None:  # type: ignore[no-untyped-def]
    ended = command("train", "small-digits", "--strategy", strategy, "--workers", "2")
    assert ended.returncode == 0, ended.stderr
    assert f"small-digits, 2 workers, {strategy}" in ended.stdout
    assert ("votes" in ended.stdout) == strategy.startswith("vote"), "what the exchange reports of itself"


def test_plan_with_a_packages_strategies(command) -> None:  # type: ignore[no-untyped-def]
    ended = command("plan", "small-digits", "--workers", "4", "--cluster", "ethernet-1g", "--allow", "lossy")
    assert ended.returncode == 0, ended.stderr
    assert "no prediction for vote: my_tutti.MajorityVote has no cost" in ended.stdout


def test_an_unknown_name_is_a_mistake_explained_in_a_line(command) -> None:  # type: ignore[no-untyped-def]
    ended = command("train", "small-digits", "--strategy", "votes")
    assert ended.returncode == 2
    assert "Did you mean 'vote'?" in ended.stderr
    assert "Traceback" not in ended.stderr
