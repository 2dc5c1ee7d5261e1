"""The supported versions of torch and Python: stated alike everywhere, and refused with words outside."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tutti
from command import Call, assert_refused
from tutti import versions
from tutti.errors import TuttiError, UnsupportedVersion
from tutti.versions import PYTHON, TORCH, check_torch, in_range

CHECKOUT = Path(__file__).parents[2]

Install = Callable[[str], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Let a version of torch seem to be installed."""

    def pretend(version: str) -> None:
        monkeypatch.setattr(versions, "version", {"torch": version}.__getitem__)

    return pretend


def _before_next(supported: tuple[str, str]) -> str:
    major, minor = supported[1].split(".")
    return f">={supported[0]},<{major}.{int(minor) + 1}"


def test_stated_alike() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert f"torch{_before_next(TORCH)}" in project["dependencies"]
    assert project["requires-python"] == _before_next(PYTHON)
    readme = (CHECKOUT / "README.md").read_text()
    assert f"Python {PYTHON[0]} to {PYTHON[1]}" in readme
    assert f"torch {TORCH[0]} to {TORCH[1]}" in readme


def test_the_matrix_covers_both_ends() -> None:
    listed = re.search(r"^TORCH_VERSIONS \?= (.+)$", (CHECKOUT / "Makefile").read_text(), re.MULTILINE)
    assert listed is not None
    releases = [version.rpartition(".")[0] for version in listed[1].split()]
    assert (releases[0], releases[-1]) == TORCH


@pytest.mark.parametrize("version", ["2.9.0", "2.9.1", "2.13.0+cpu", "2.15.3", "2.15.0a0+git1234"])
def test_supported(version: str, install: Install) -> None:
    assert in_range(version, ("2.9", "2.15"))
    install(version)
    check_torch()


@pytest.mark.parametrize("version", ["1.13.1", "2.8.0", "2.90.0", "3.0.0.dev20270101"])
def test_not_supported(version: str, install: Install) -> None:
    assert not in_range(version, ("2.9", "2.15"))
    install(version)
    with pytest.raises(UnsupportedVersion) as raised:
        check_torch()
    assert str(raised.value) == (
        f"torch {version} is installed, and Tutti supports torch {TORCH[0]} to {TORCH[1]}. "
        f"Install one of these: pip install 'torch{_before_next(TORCH)}'"
    )
    assert isinstance(raised.value, ImportError)


def test_refused_where_it_is_needed(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("distribute", "TuttiError"):
        monkeypatch.delitem(vars(tutti), name, raising=False)
    install("2.8.0")
    with pytest.raises(UnsupportedVersion, match=r"torch 2\.8\.0 is installed"):
        _ = tutti.distribute
    assert tutti.TuttiError is TuttiError  # Who catches it must be able to name it.
    store: Any = dist.HashStore()
    with pytest.raises(UnsupportedVersion, match=r"torch 2\.8\.0 is installed"):
        dist.init_process_group("tutti", store=store, rank=0, world_size=1)


def test_commands_refuse_and_doctor_reports(install: Install, call: Call, tmp_path: Path) -> None:
    install("2.8.0")
    assert_refused(call("train", "digits"), r"torch 2\.8\.0 is installed, and Tutti supports torch", tmp_path)
    assert "Install one of these" in " ".join(call("doctor").out.split())
