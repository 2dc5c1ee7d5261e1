"""What the documentation says: its examples run, its links lead somewhere, its tree is the real one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from command import Call
from tutti.cluster import Cluster

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def examples(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_readmes_examples_run(tmp_path: Path) -> None:
    (example,) = examples(ROOT / "README.md")
    (tmp_path / "example.py").write_text(example)
    ended = subprocess.run(
        [sys.executable, "-W", "error", "example.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert all(f"rank {rank} of 4: loss" in ended.stdout for rank in range(4)), ended.stdout


def test_the_readmes_example_under_tutti_run(tmp_path: Path, call: Call) -> None:
    (example,) = examples(ROOT / "README.md")
    last = "tutti.launch(train, workers=4)"
    assert last in example
    (tmp_path / "script.py").write_text(example.replace(last, "train()"))
    ended = call("run", "--workers", "2", "script.py")
    assert ended.status == 0, ended.err
    assert "[rank 1] rank 1 of 2: loss" in ended.out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_every_page_is_listed() -> None:
    readme = (ROOT / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"docs/{page.name}" in readme, f"{page.name} is not in the README"


def test_the_readmes_tree_is_the_real_one() -> None:
    tree = re.search(r"```\nsrc/tutti/\n(.*?)tests/", (ROOT / "README.md").read_text(), re.DOTALL)
    assert tree is not None
    listed = {
        line.split()[0].rstrip("/") for line in tree.group(1).splitlines() if line.startswith("  ") and line[2] != " "
    }
    package = ROOT / "src" / "tutti"
    real = {entry.name for entry in package.iterdir() if (entry / "__init__.py").exists() or entry.suffix == ".py"}
    assert listed == real - {"__init__.py"}


def test_the_clusters_in_the_docs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "simulation.md").read_text()
    four, uneven = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "four.toml").write_text(four)
    cluster = Cluster.load(tmp_path / "four.toml")
    assert [host.name for host in cluster.place(8)][::2] == ["host0", "host1", "host2", "host3"]
    (in_python,) = [each for each in examples(ROOT / "docs" / "simulation.md") if "Tier(" in each]
    names: dict[str, object] = {}
    exec(in_python, names)
    assert names["cluster"] == cluster
    (tmp_path / "uneven.toml").write_text(uneven)
    assert [host.name for host in Cluster.load(tmp_path / "uneven.toml").place(6)] == ["lagos"] * 4 + ["cairo"] * 2
