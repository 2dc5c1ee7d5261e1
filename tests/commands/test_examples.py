"""Every script in examples/ runs, is short, and prints what it promises."""

import difflib
from pathlib import Path

import pytest
from test_docs import run_python

from command import Call

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.rglob("*.py"))

PRINTED = {
    "one_host.py": "4 workers:",
    "slow_network.py": "bmuf:every=8+onebit",
    "stragglers.py": "ps:async",
    "pipeline.py": "two stages: last loss",
    "simulate_then_run.py": "equal to the last bit: True",
    "custom_strategy.py": "loss",
    "custom_codec.py": "loss",
}
"""What each script that runs by itself prints."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_is_short(script: Path) -> None:
    assert len(script.read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", PRINTED)
def test_runs(name: str) -> None:
    assert PRINTED[name] in run_python(EXAMPLES, name)


def test_every_example_is_run() -> None:
    run_otherwise = {"own_model.py", "ddp.py", "tutti_version.py"}
    assert {path.name for path in SCRIPTS} == PRINTED.keys() | run_otherwise


def test_port_from_ddp(call: Call) -> None:
    ported = EXAMPLES / "port_from_ddp"
    for name in ("ddp.py", "tutti_version.py"):
        ended = call("run", "--workers", "2", str(ported / name))
        assert ended.status == 0, ended.err
        assert "loss" in ended.out
    before, after = ((ported / name).read_text().splitlines() for name in ("ddp.py", "tutti_version.py"))
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert len(changed) <= 25, "\n".join(changed)


def test_own_model_in_plan_and_train(call: Call, tmp_path: Path) -> None:
    (tmp_path / "own_model.py").write_text((EXAMPLES / "own_model.py").read_text())
    planned = call("plan", "own_model:model_and_batch", "--workers", "4", "--cluster", "ethernet-1g")
    assert planned.status == 0, planned.err
    trained = call("train", "own_model:recipe", "--workers", "2")
    assert trained.status == 0, trained.err
