"""`tutti reproduce`: finding the source checkout, the list, and reports from stored results."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tutti
from command import Call
from reproductions import REPRODUCTIONS
from tutti.cli.reproduce import find_checkout

ROOT = Path(__file__).parents[2]


def test_without_a_name_all_are_listed(call: Call) -> None:
    ended = call("reproduce")
    assert ended.status == 0
    assert [line.split()[0] for line in ended.out.splitlines()] == list(REPRODUCTIONS)


def test_the_registry_needs_neither_torch_nor_tutti() -> None:
    script = "import sys, reproductions; print([name for name in ('torch', 'tutti') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_the_command_needs_torch_only_to_run() -> None:
    """Neither its help nor the list: the package `tutti.cli`, which has the other commands too, is left out."""
    script = """
import sys, types, tutti
package = types.ModuleType("tutti.cli")
package.__path__ = [tutti.__path__[0] + "/cli"]
sys.modules["tutti.cli"] = package
import tutti.cli.reproduce
print("torch" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def test_the_registry_and_the_folders_agree() -> None:
    folders = {path.parent.name for path in (ROOT / "reproductions").glob("*/run.py")}
    assert folders == {entry.folder for entry in REPRODUCTIONS.values()}
    for entry in REPRODUCTIONS.values():
        assert (entry.stored_folder / "results.json").is_file()


def test_an_installed_package_finds_a_checkout_around_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setattr(tutti, "__file__", str(tmp_path / "lib" / "site-packages" / "tutti" / "__init__.py"))
    ended = call("reproduce")
    assert ended.status == 2
    assert "reproductions are part of the source checkout" in ended.err
    assert "git clone" in ended.err
    other = tmp_path / "other"
    (other / "reproductions").mkdir(parents=True)
    (other / "reproductions" / "__init__.py").touch()
    (other / "pyproject.toml").write_text('[project]\nname = "other"\n')
    monkeypatch.chdir(other)
    assert call("reproduce").status == 2, "another project's folder of that name is not ours"
    (other / "pyproject.toml").write_text('[project]\nname = "tutti-train"\n')
    (other / "below").mkdir()
    monkeypatch.chdir(other / "below")
    assert find_checkout() == other


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_the_committed_report_is_what_the_code_writes(
    name: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures are drawn by the test of each reproduction's quick form; to draw them takes longer than all else here."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
    entry = REPRODUCTIONS[name]
    (tmp_path / "runs" / "stored").mkdir(parents=True)
    shutil.copy(entry.stored_folder / "results.json", tmp_path / "runs" / "stored")
    ended = call("reproduce", name, "--report-only", "--name", "stored")
    assert ended.status == 0, ended.err
    written = {path.name for path in (tmp_path / "runs" / "stored").iterdir()}
    committed = {path.name for path in entry.stored_folder.iterdir() if path.suffix in (".md", ".png", ".json")}
    assert written == committed
    report = (tmp_path / "runs" / "stored" / "report.md").read_text()
    assert report == (entry.stored_folder / "report.md").read_text()
