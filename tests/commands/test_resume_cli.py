"""`tutti train --resume` and `--checkpoint-every`: a run that continues ends where one that never stopped does."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from command import Call

load_file = pytest.importorskip("safetensors.torch").load_file


def model(run: Path, steps: int) -> torch.Tensor:
    tensors = load_file(run / f"step-{steps:08d}" / "model.safetensors")
    return torch.cat([tensor.reshape(-1) for _, tensor in sorted(tensors.items())])


def train(call: Call, *words: str) -> Any:
    ended = call("train", *words)
    assert ended.status in (0, 3), ended.err  # 3: a run of few epochs misses the target.
    return ended


def test_a_run_continues_on_other_workers_and_strategies(call: Call, tmp_path: Path) -> None:
    train(call, "digits", "--epochs", "2", "--name", "whole")
    train(call, "digits", "--epochs", "1", "--name", "first", "--checkpoint-every", "9")
    runs = tmp_path / "runs"
    assert sorted(path.name for path in (runs / "first").glob("step-*")) == [
        f"step-{steps:08d}" for steps in (9, 18, 22)
    ]
    train(call, "--resume", "runs/first", "--epochs", "2", "--workers", "3", "--strategy", "ps:bsp")
    summary = json.loads((runs / "first" / "summary.json").read_text())
    assert (summary["steps"], summary["workers"], summary["strategy"]) == (44, 3, "ps:bsp")
    assert summary["samples"] == json.loads((runs / "whole" / "summary.json").read_text())["samples"] // 2
    torch.testing.assert_close(model(runs / "first", 44), model(runs / "whole", 44), rtol=1e-3, atol=1e-4)
    reported = [json.loads(line)["step"] for line in (runs / "first" / "metrics.jsonl").read_text().splitlines()]
    assert reported == sorted(reported)
    # Once more: nothing is left to train, and the record stays.
    ended = call("train", "--resume", "runs/first")
    assert ended.status == 2
    assert "runs/first is complete: 2 epochs are trained" in ended.err
    assert json.loads((runs / "first" / "summary.json").read_text()) == summary


def test_a_synchronous_start_goes_on_where_it_was(call: Call, tmp_path: Path) -> None:
    """Half of 44 steps is synchronous, and so has one result: one run continues in that half, and one after it."""
    words = ("digits", "--strategy", "ps:ssp=3", "--lr", "auto", "--epochs", "2", "--checkpoint-every")
    train(call, *words, "22", "--name", "whole")
    train(call, *words, "18", "--name", "part")
    runs = tmp_path / "runs"
    for run, steps in (("part", (36, 44)), ("whole", (44,))):
        for number in steps:
            shutil.rmtree(runs / run / f"step-{number:08d}")
        train(call, "--resume", f"runs/{run}", "--checkpoint-every", "22")
    torch.testing.assert_close(model(runs / "part", 22), model(runs / "whole", 22), rtol=1e-4, atol=1e-5)
    for run in ("whole", "part"):
        summary = json.loads((runs / run / "summary.json").read_text())
        assert (summary["steps"], summary["synchronous_steps"]) == (44, 22)
        assert (summary["lr"], summary["momentum"]) == pytest.approx((0.03125, 0.5))


def test_a_run_continues_with_the_rates_of_another_strategy(call: Call, tmp_path: Path) -> None:
    train(call, "digits", "--strategy", "ps:bsp", "--lr", "auto", "--epochs", "1", "--name", "a")
    summary = tmp_path / "runs" / "a" / "summary.json"
    first = json.loads(summary.read_text())
    assert (first["lr"], first["momentum"], first["synchronous_steps"]) == (0.1, 0.9, 0)
    train(call, "--resume", "runs/a", "--epochs", "2", "--strategy", "ps:ssp=3")
    second = json.loads(summary.read_text())
    assert (second["lr"], second["momentum"]) == pytest.approx((0.03125, 0.5))
    assert second["synchronous_steps"] == 22, "they were before"


def test_a_run_whose_only_checkpoint_was_being_replaced_does_not_start_anew(call: Call, tmp_path: Path) -> None:
    train(call, "digits", "--epochs", "1", "--name", "a")
    run = tmp_path / "runs" / "a"
    (run / "step-00000022").rename(run / ".replaced-step-00000022")
    before = json.loads((run / "summary.json").read_text())
    train(call, "--resume", "runs/a", "--epochs", "2")
    after = json.loads((run / "summary.json").read_text())
    assert (after["steps"], after["samples"]) == (44, before["samples"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a recipe to train, such as digits, or continue a run with --resume RUN"),
        (["--resume", "absent"], "absent does not exist"),
        (["mnist-mlp", "--resume", "runs/saved"], "is a run of digits, not of mnist-mlp"),
        (["--resume", "runs/saved", "--seed", "1"], "--seed cannot be changed"),
        (["digits", "--checkpoint-every", "often"], "--checkpoint-every must be"),
        (["digits", "--checkpoint-every", "0"], "--checkpoint-every must be a number of steps"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(words: list[str], message: str, call: Call) -> None:
    if "runs/saved" in words:
        train(call, "digits", "--epochs", "1", "--workers", "1", "--name", "saved")
    ended = call("train", *words)
    assert ended.status == 2, ended
    assert re.search(message, ended.err), ended.err
