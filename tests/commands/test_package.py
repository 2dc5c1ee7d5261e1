"""The package as users get it: built from a checkout, installed into an empty environment."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import tutti

CHECKOUT = Path(__file__).parents[2]

BUILD = """
import sys
from setuptools import build_meta
folder, *kinds = sys.argv[1:]  # setuptools changes them.
for kind in kinds:
    getattr(build_meta, f"build_{kind}")(folder)
"""

IMPORT = """
import importlib.metadata, json, tutti
installed = importlib.metadata.distribution("tutti-train")
points = {point.name: point.value for point in installed.entry_points}
print(json.dumps([tutti.__file__, tutti.__version__, installed.version, points]))
"""


def _run(*words: str | Path, folder: Path) -> str:
    # Without PYTHONPATH, in which the checkout may be.
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(words, cwd=folder, env=clean, capture_output=True, text=True, check=False, timeout=50)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel built from a copy of the checkout, and one built from the sdist of the same copy."""
    folder = tmp_path_factory.mktemp("package")
    copy, dist, again = folder / "copy", folder / "dist", folder / "again"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, copy)
    shutil.copytree(CHECKOUT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    _run(sys.executable, "-c", BUILD, dist, "sdist", "wheel", folder=copy)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(again, filter="data")
    (unpacked,) = again.iterdir()
    _run(sys.executable, "-c", BUILD, again, "wheel", folder=unpacked)
    return wheel, next(again.glob("*.whl"))


def test_the_sdist_builds_the_same_wheel(wheels: tuple[Path, Path]) -> None:
    from_checkout, from_sdist = map(_contents, wheels)
    assert from_checkout.keys() == from_sdist.keys()
    assert from_checkout == from_sdist


def test_the_wheel_has_all_files(wheels: tuple[Path, Path]) -> None:
    package = CHECKOUT / "src" / "tutti"
    wanted = {
        f"tutti/{file.relative_to(package)}"
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {"tutti/py.typed", "tutti/recipes/digits.npz"} <= wanted
    assert {name for name in _contents(wheels[0]) if ".dist-info/" not in name} == wanted


def test_installed_into_an_empty_environment(wheels: tuple[Path, Path], tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    _run(sys.executable, "-m", "venv", "--without-pip", environment, folder=tmp_path)
    python = environment / "bin" / "python"
    install = ("install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    _run(sys.executable, "-m", "pip", "--python", python, *install, wheels[0], folder=tmp_path)
    # torch and the others come from this environment: they are not what is tested.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    file, version, installed, points = json.loads(_run(python, "-c", IMPORT, folder=tmp_path))
    assert Path(file).is_relative_to(site)
    assert version == installed == tutti.__version__
    assert points == {"tutti": "tutti.cli:main"}
    assert _run(environment / "bin" / "tutti", "--version", folder=tmp_path) == f"tutti {version}\n"
