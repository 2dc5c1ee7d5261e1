"""The documentation: its examples run, its links and its navigation are right, its tree is the real one."""

import importlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_options import OPTIONS

import warm
from command import Call
from tutti.cluster import Cluster

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
GENERATED = {DOCS / "reference" / "cli.md"}
"""Pages that the site's hooks make."""


def examples(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def run_python(folder: Path, *words: str, command: Sequence[str] | None = None) -> str:
    """Run a script with warnings as errors, and return what it printed; `command`: the interpreter."""
    command = [*(command or warm.python()), "-W", "error", *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_readme_example_runs(tmp_path: Path) -> None:
    (example,) = examples(ROOT / "README.md")
    (tmp_path / "example.py").write_text(example)
    printed = run_python(tmp_path, "example.py", command=[sys.executable])
    assert all(f"rank {rank} of 4: loss" in printed for rank in range(4)), printed


def test_readme_example_under_tutti_run(tmp_path: Path, call: Call) -> None:
    (example,) = examples(ROOT / "README.md")
    last = "tutti.launch(train, workers=4)"
    assert last in example
    (tmp_path / "script.py").write_text(example.replace(last, "train()"))
    ended = call("run", "--workers", "2", "script.py")
    assert ended.status == 0, ended.err
    assert "[rank 1] rank 1 of 2: loss" in ended.out


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_tutorial_scripts_run(tmp_path: Path, call: Call) -> None:
    plain, distributed = examples(DOCS / "tutorial.md")
    (tmp_path / "plain.py").write_text(plain)
    (tmp_path / "train.py").write_text(distributed)
    assert "epoch 2: loss" in run_python(tmp_path, "plain.py")
    assert "epoch 2: loss" in run_python(tmp_path, "train.py")
    for strategy in re.findall(r"--strategy (\S+) train.py", (DOCS / "tutorial.md").read_text()):
        ended = call("run", "--workers", "2", "--strategy", strategy, "train.py")
        assert ended.status == 0, ended.err
        assert "epoch 2: loss" in ended.out


def test_guide_of_fit_runs(tmp_path: Path) -> None:
    first, *_ = examples(DOCS / "guides" / "fit.md")
    (tmp_path / "script.py").write_text(first)
    printed = run_python(tmp_path, "script.py")
    assert "epoch 3/3: loss" in printed
    assert "samples per s" in printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            path = (page.parent / target).resolve()
            if path.is_relative_to(DOCS / "reproductions") and not path.exists():
                path = ROOT / path.relative_to(DOCS)  # The site takes reports from where they are made.
            assert path.exists() or path in GENERATED, f"{page.name} links to {target}, which is not there"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert page.relative_to(DOCS).as_posix() in navigation, f"{page.name} is not in mkdocs.yml"


def test_page_of_commands_has_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    page = importlib.import_module("hooks").command_page()
    for command, options in OPTIONS.items():
        path = command.removesuffix(" run") if command == "simulate run" else command
        _, found, section = page.partition(f"## `tutti {path}`\n")
        assert found, f"`tutti {path}` is not on the page"
        for option in options.split():
            if option.startswith("--"):
                assert f"`{option}`" in section.split("\n## ")[0], f"{option} of `tutti {path}` is not on the page"


def test_readme_tree_is_the_real_one() -> None:
    tree = re.search(r"```\nsrc/tutti/\n(.*?)tests/", (ROOT / "README.md").read_text(), re.DOTALL)
    assert tree is not None
    listed = {
        line.split()[0].rstrip("/") for line in tree.group(1).splitlines() if line.startswith("  ") and line[2] != " "
    }
    package = ROOT / "src" / "tutti"
    real = {entry.name for entry in package.iterdir() if (entry / "__init__.py").exists() or entry.suffix == ".py"}
    assert listed == {name for name in real if not name.startswith("__")}


def test_clusters_in_the_docs(tmp_path: Path) -> None:
    text = (DOCS / "simulation.md").read_text()
    four, uneven = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "four.toml").write_text(four)
    cluster = Cluster.load(tmp_path / "four.toml")
    assert [host.name for host in cluster.place(8)][::2] == ["host0", "host1", "host2", "host3"]
    (in_python,) = [each for each in examples(DOCS / "simulation.md") if "Tier(" in each]
    names: dict[str, object] = {}
    exec(in_python, names)
    assert names["cluster"] == cluster
    (tmp_path / "uneven.toml").write_text(uneven)
    assert [host.name for host in Cluster.load(tmp_path / "uneven.toml").place(6)] == ["lagos"] * 4 + ["cairo"] * 2
