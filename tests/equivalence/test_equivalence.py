"""N workers equal one, to 1e-10 in float64 and 1e-4 in float32, all ranks bit for bit.

Processes take 20 steps. Threads take fewer: enough for every state to have been used and changed again.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

import tutti
from equivalence.scenarios import (
    BY_NAME,
    EXACT,
    FACTORED,
    OWN,
    SCENARIOS,
    SERVED,
    Scenario,
    assert_close,
    assert_same_bits,
    device,
    train,
    train_plainly,
)
from support import TRANSPORTS, run_ok

FLOAT64_TOLERANCE = 1e-10
FLOAT32_TOLERANCE = 1e-4

reference = cache(train_plainly)

threads_suffice = pytest.mark.skipif(
    device() == "cuda", reason="ranks that are threads share torch's one backward thread per GPU: they would deadlock"
)


# Only what a transport does in a way of its own differs between transports; the rest is messages.
CASES = [
    *(("allreduce", "shared_memory", size) for size in (1, 2, 3, 4)),
    *(("allreduce", transport, size) for transport in ("sockets", "hosts") for size in (3, 4)),
    *(("allreduce, many buckets", transport, 3) for transport in (*TRANSPORTS, "hosts")),
    *((name, "simulated_hosts", size) for name, size in zip(OWN, (2, 3), strict=True)),
    *((name, "hosts", 3 + place % 2) for place, name in enumerate(BY_NAME)),
    *zip(FACTORED, ("sockets", "shared_memory", "simulated_hosts"), (3, 3, 4), strict=True),
    *((name, transport, 3) for name in SERVED for transport in ("shared_memory", "hosts")),
    *(("servers, many buckets", transport, 4) for transport in ("shared_memory", "sockets", "simulated_hosts")),
]


def each_scenario_with_each_strategy() -> list[tuple[str, str, int, str]]:
    """Every case with all options together, and every strategy with every option alone, at its cases in turn.

    What an option does to a strategy happens before and after its messages: it need not be seen on every transport
    again. The algorithms of `BY_NAME` are one strategy.
    """
    found = [(*case, "all together") for case in CASES]
    for names in (*([name] for name in (*OWN, *FACTORED, *SERVED)), list(BY_NAME)):
        places = [case for case in CASES if case[0] in names]
        alone = [name for name in SCENARIOS if name != "all together"]
        found += [(*places[number % len(places)], name) for number, name in enumerate(alone)]
    return found


@threads_suffice
@pytest.mark.parametrize(("strategy", "transport", "size", "name"), each_scenario_with_each_strategy())
def test_threads(strategy: str, transport: str, size: int, name: str) -> None:
    scenario = replace(SCENARIOS[name], steps=10 if name == "all together" else 5)
    if "soft-sync" in strategy and scenario.clip:
        pytest.skip("under soft-sync each update is clipped by itself, not their mean")
    states = run_ok(train, EXACT[strategy], scenario, size=size, transport=transport)
    assert_same_bits(states)
    assert_close(states[0], reference(scenario), FLOAT64_TOLERANCE)


@threads_suffice
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", ["momentum", "all together"])
def test_float32(name: str, transport: str) -> None:
    scenario = replace(SCENARIOS[name], dtype=torch.float32)
    states = run_ok(train, EXACT["allreduce"], scenario, size=3, transport=transport)
    assert_same_bits(states)
    assert_close(states[0], reference(scenario), FLOAT32_TOLERANCE)


def work(scenarios: list[str]) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """Every strategy with all options together, and all-reduce with `scenarios`, in one launch."""
    torch.set_num_threads(1)
    world = tutti.init()
    return {
        (strategy, name): {key: tensor.cpu() for key, tensor in train(world, EXACT[strategy], scenario).items()}
        for strategy in EXACT
        for name, scenario in SCENARIOS.items()
        if (strategy == "allreduce" and name in scenarios) or (name == "all together" and "soft-sync" not in strategy)
    }


@pytest.mark.parametrize(("size", "transport"), [(2, "sockets"), (3, "shared_memory")])
def test_processes(size: int, transport: str) -> None:
    by_rank = tutti.launch(work, list(SCENARIOS) if transport == "sockets" else [], workers=size, transport=transport)
    for strategy, name in by_rank[0]:
        states = [outcome[strategy, name] for outcome in by_rank]
        expected = {key: tensor.cpu() for key, tensor in reference(SCENARIOS[name]).items()}
        assert_same_bits(states)
        assert_close(states[0], expected, FLOAT64_TOLERANCE)


@threads_suffice
def test_the_reference_is_sensitive() -> None:
    """A gradient summed instead of averaged, or one sample too few, would be seen."""
    scenario = SCENARIOS["sgd"]
    wrong = run_ok(_train_on_less, scenario, size=2, transport="sockets")[0]
    with pytest.raises(AssertionError, match="relative difference"):
        assert_close(wrong, reference(scenario), FLOAT64_TOLERANCE)


def _train_on_less(world: tutti.World, scenario: Scenario) -> dict[str, torch.Tensor]:
    return train(world, EXACT["allreduce"], replace(scenario, uneven=True))
