"""`tutti bench overhead`: one rank under Tutti beside the bare training step, on CPU or GPU, eager and compiled."""

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from tutti.errors import ConfigError, UnknownName
from tutti.job import distribute
from tutti.launch import init
from tutti.recipes import OWN_RECIPE, recipe

Case = tuple[str, dict[str, int]]
"""A recipe, and samples per step by device."""

CASES: dict[str, Case] = {
    "convolutional": ("cifar-quick", {"cpu": 64, "cuda": 4096}),
    "transformer": ("char-gpt", {"cpu": 16, "cuda": 4096}),
}
"""A recipe's model, and samples per step: enough that the device, not Python, takes the time."""

PRECISIONS: dict[str, Callable[[str], AbstractContextManager[Any]]] = {
    "float32": lambda device: nullcontext(),
    "bf16 autocast": lambda device: torch.autocast(device, torch.bfloat16),
}

STEPS_PER_ROUND = {"cpu": 2, "cuda": 20}
"""Steps between two readings of the clock: more on a GPU, where waiting for it at the end would otherwise count."""


def case_from_recipe(name: str) -> Case:
    """Return the case of a recipe's name or "module:factory", with the recipe's own batch size."""
    try:
        made = recipe(name)
    except UnknownName as error:
        error.add_note(OWN_RECIPE)
        raise
    return name, dict.fromkeys(STEPS_PER_ROUND, made.batch_size)


def measure(device: str, rounds: int, compiled: bool, cases: Mapping[str, Case] = CASES) -> list[dict[str, Any]]:
    """Measure the median seconds per step, bare and under Tutti, of every model and precision, eager and compiled.

    The ratio is the median of the rounds' ratios. Both halves of a round are close in time, so a disturbance mostly
    affects both.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here; use --device cpu.")
    world = init()
    assert world.size == 1  # There is nobody to communicate with: all that differs from the bare step is overhead.
    try:
        return _measure_cases(device, rounds, compiled, cases)
    finally:
        world.close()  # The command runs in the caller's process, which may want another world later.


def _measure_cases(device: str, rounds: int, compiled: bool, cases: Mapping[str, Case]) -> list[dict[str, Any]]:
    """Return one row for each model and precision, eager and compiled."""
    rows = []
    for title, case in cases.items():
        for precision in PRECISIONS:
            for use_compile in (False, True) if compiled else (False,):
                samples = _measure_case(case, precision, use_compile, device, rounds)
                pairs = zip(samples["tutti"], samples["bare"], strict=True)
                rows.append(
                    {
                        "case": title,
                        "precision": precision,
                        "compiled": use_compile,
                        "device": device,
                        "seconds": {name: statistics.median(values) for name, values in samples.items()},
                        "ratio": statistics.median(tutti / bare for tutti, bare in pairs),
                    }
                )
    return rows


def _measure_case(case: Case, precision: str, use_compile: bool, device: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds per step of every round, bare and under Tutti."""
    name, batch_sizes = case
    made = recipe(name)
    model = made.model().to(device)
    batch = tuple(tensor.to(device) for tensor in made.example(batch_sizes[device]))
    candidates = {}
    for candidate in ("bare", "tutti"):
        replica = copy.deepcopy(model)  # Both start from the same parameters.
        optimizer = made.optimizer(replica)
        if candidate == "tutti":
            distribute(replica, optimizer)
        # Compiled after `distribute`, so that the compiled model includes its hooks.
        runner = torch.compile(replica) if use_compile else replica
        candidates[candidate] = _stepper(runner, optimizer, (batch, made.loss), lambda: PRECISIONS[precision](device))
    return _interleaved(candidates, device, rounds)


def _stepper(
    model: nn.Module | Callable[..., Any], optimizer: torch.optim.Optimizer, work: Any, precision: Callable[[], Any]
) -> Callable[[], None]:
    """Return a training step; only forward is under autocast, as torch advises."""
    (x, y), loss = work

    def step() -> None:
        with precision():
            value = loss(model(x), y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _interleaved(candidates: dict[str, Callable[[], None]], device: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds per step of each candidate in every round."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    # Warm-up: compilation, allocation, and the choice of kernels.
    for step in candidates.values():
        for _ in range(5):
            step()
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        # Every other round the other way round: what comes second finds a warmer machine.
        for name in sorted(candidates, reverse=bool(number % 2)):
            wait()
            start = time.perf_counter()
            for _ in range(STEPS_PER_ROUND[device]):
                candidates[name]()
            wait()
            samples[name].append((time.perf_counter() - start) / STEPS_PER_ROUND[device])
    return samples
