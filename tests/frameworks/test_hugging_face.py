"""Accelerate, the Trainer of Transformers and Fabric with strategies of Tutti's, beside plain DDP."""

from collections import Counter
from itertools import chain
from typing import Any

import pytest
from started import results

for needed in ("accelerate", "transformers", "lightning"):
    pytest.importorskip(needed)

STRATEGIES = ["native", "bmuf:every=4", "gossip", "ps:bsp"]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """What runs on two ranks end with, which `tutti run` starts."""
    tasks = [f"{task}={strategy}" for task in ("accelerate", "transformers", "fabric") for strategy in STRATEGIES]
    # DDP comes last: Accelerate keeps what it finds about the processes for the whole of their life.
    tasks += ["digits=native", "digits=onebit", "transformers=ddp", "accelerate=ddp"]
    return results("-m", "tutti", "run", "--workers", "2", "--spawn", "loops.py", *tasks)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("framework", ["accelerate", "transformers", "fabric"])
def test_ranks_end_alike(trained: dict[str, Any], framework: str, strategy: str) -> None:
    run = trained[f"{framework}={strategy}"]
    assert run["parameters"][0] == run["parameters"][1]
    if "seen" in run:
        assert Counter(chain(*run["seen"])) == dict.fromkeys(range(96), 3)


@pytest.mark.parametrize("framework", ["accelerate", "transformers"])
def test_exact_strategies_end_as_ddp(trained: dict[str, Any], framework: str) -> None:
    """With accumulation and clipping."""
    ours, theirs = (trained[f"{framework}={each}"]["parameters"][0] for each in ("native", "ddp"))
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-6


@pytest.mark.parametrize("strategy", [*STRATEGIES, "ddp"])
def test_the_trainer_resumes_exactly(trained: dict[str, Any], strategy: str) -> None:
    run = trained[f"transformers={strategy}"]
    assert run["resumed"] == run["parameters"][0]
    assert ("tutti.pt" in run["files"]) == (strategy != "ddp")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fabric_saves_what_ranks_agree_on(trained: dict[str, Any], strategy: str) -> None:
    run = trained[f"fabric={strategy}"]
    assert run["loaded"] == run["parameters"][0]


@pytest.mark.parametrize("strategy", ["native", "onebit"])
def test_real_data(trained: dict[str, Any], strategy: str) -> None:
    assert trained[f"digits={strategy}"] > 0.92
