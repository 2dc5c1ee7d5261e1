"""Every script in examples/ runs, is short, and prints what it promises."""

import difflib
import re
from pathlib import Path

import pytest
from test_docs import run_python

from command import Call

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.rglob("*.py"))

PRINTED = {
    "one_host.py": "4 workers:",
    "one_call.py": "digits are misread",
    "slow_network.py": "bmuf:every=8+onebit",
    "stragglers.py": "ps:async",
    "pipeline.py": "two stages: last loss",
    "simulate_then_run.py": "equal to the last bit: True",
    "custom_strategy.py": "loss",
    "custom_codec.py": "loss",
    "resume.py": "3 workers, ring: from step 60 to step 120",
}
"""What each script that runs by itself prints."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_is_short(script: Path) -> None:
    assert len(script.read_text().splitlines()) <= 60


RUN_ALL = """if True:
    import runpy, sys
    for name in sys.argv[1:]:
        print("---", name, flush=True)
        runpy.run_path(name, run_name="__main__")
"""


@pytest.mark.parametrize("names", [list(PRINTED)[:3], list(PRINTED)[3:]], ids=",".join)
def test_run(names: list[str]) -> None:
    """Several in one process, which has one fork server: to import torch takes longer than most of them."""
    printed = re.split("^--- (.*)\n", run_python(EXAMPLES, "-c", RUN_ALL, *names), flags=re.MULTILINE)[1:]
    by_name = dict(zip(printed[::2], printed[1::2], strict=True))
    assert list(by_name) == names
    for name, text in by_name.items():
        assert PRINTED[name] in text, f"{name}: {text}"


def test_every_example_is_run() -> None:
    run_otherwise = {"own_model.py", "ddp.py", "tutti_version.py"}
    assert {path.name for path in SCRIPTS if path.parent.name != "frameworks"} == PRINTED.keys() | run_otherwise


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
