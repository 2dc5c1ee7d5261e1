"""Lightning's Trainer and Fabric with strategies of Tutti's."""

from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("lightning")

from lightning_training import BATCH_SIZE, EPOCHS, INPUTS, LABELS, NUM_SAMPLES, net, parameters
from started import results

from tutti.data.samplers import shuffled

STRATEGIES = ["native", "onebit", "bmuf:every=4", "gossip", "ps:bsp", "peers"]
EXACT = {"native", "ps:bsp"}

pytestmark = pytest.mark.timeout(300)


def one_worker(accumulate: int = 1, clip: float | None = None) -> list[float]:
    """The parameters that a plain loop of one process ends with, on the batches of two ranks."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    size = 2 * BATCH_SIZE
    for epoch in range(EPOCHS):
        order = shuffled(NUM_SAMPLES, 0, epoch)
        batches = [order[first : first + size] for first in range(0, NUM_SAMPLES, size)]
        for number, batch in enumerate(batches, 1):
            (F.cross_entropy(model(INPUTS[batch]), LABELS[batch]) / accumulate).backward()
            if number % accumulate == 0 or number == len(batches):
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
    return parameters(model)


def distance(first: list[float], second: list[float]) -> float:
    return float((torch.tensor(first) - torch.tensor(second)).abs().max())


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """What runs on two ranks end with, which Lightning starts."""
    tasks = [f"train={strategy}" for strategy in [*STRATEGIES, "tutti"]]
    others = ["accumulate", "bfloat16", "manual", "limited", "predict", "refused"]
    return results("lightning_training.py", "2", *tasks, *(f"{task}=native" for task in others))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_sample_comes_once_and_metrics_are_those_of_the_whole_data(
    trained: dict[str, Any], strategy: str
) -> None:
    run = trained[f"train={strategy}"]
    assert run["parameters"][0] == run["parameters"][1]
    assert Counter(chain(*run["seen"])) == dict.fromkeys(range(NUM_SAMPLES), EPOCHS)
    assert run["tested"] == pytest.approx(run["loss of the model"], rel=1e-6)
    assert run["loss of the model"] < 1.08


@pytest.mark.parametrize("task", ["train=native", "train=ps:bsp", "train=tutti", "manual=native"])
def test_two_workers_give_the_result_of_one(trained: dict[str, Any], task: str) -> None:
    assert distance(trained[task]["parameters"][0], one_worker()) < 1e-10


def test_accumulation_and_clipping(trained: dict[str, Any]) -> None:
    # Steps of three batches; the weights of batches are those of their samples, also of the last one.
    run = trained["accumulate=native"]
    assert run["parameters"][0] == run["parameters"][1]
    assert run["steps"] == EPOCHS * 4


def test_other_options(trained: dict[str, Any]) -> None:
    assert trained["bfloat16=native"]["parameters"][0] == trained["bfloat16=native"]["parameters"][1]
    assert [len(each) for each in trained["limited=native"]["seen"]] == [EPOCHS * 4 * BATCH_SIZE] * 2
    assert sum(trained["predict=native"]) >= NUM_SAMPLES
    assert "one optimiser, got 2" in trained["refused=native"]


def test_resumed_runs_end_where_others_do() -> None:
    """In the middle of an epoch and at its end, on the processes of `tutti run`."""
    strategies = [each for each in STRATEGIES if each != "peers"]  # Which no run repeats: it depends on time.
    tasks = [f"resume={strategy}" for strategy in strategies]
    found = results("-m", "tutti", "run", "--workers", "2", "--spawn", "lightning_training.py", "2", *tasks)
    for strategy in strategies:
        run = found[f"resume={strategy}"]
        assert "tutti" in run["keys"]
        assert run["files"] == ["end.ckpt", "middle.ckpt"]
        for end in run["resumed"]:
            assert end == run["whole"], strategy
