"""What Tutti costs a run that does not need it: one rank beside the bare step, on CPU or GPU, plain and compiled."""

import copy
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from tutti.errors import ConfigError
from tutti.job import distribute
from tutti.launch import init
from tutti.recipes import recipe

CASES = {
    "convolutional": ("cifar-quick", {"cpu": 64, "cuda": 4096}),
    "transformer": ("char-gpt", {"cpu": 16, "cuda": 4096}),
}
"""A recipe's model, and samples per step: enough that the device is what takes the time."""

PRECISIONS: dict[str, Callable[[str], AbstractContextManager[Any]]] = {
    "float32": lambda device: nullcontext(),
    "bf16 autocast": lambda device: torch.autocast(device, torch.bfloat16),
}

STEPS_PER_ROUND = {"cpu": 2, "cuda": 20}


def measure(device: str, rounds: int, compiled: bool) -> list[dict[str, Any]]:
    """Median seconds a step, bare and under Tutti, of every case, precision and way to run.

    The ratio is the median over rounds of each round's own ratio: the two halves of a round are neighbours
    in time, so what disturbs one mostly disturbs the other.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here; use --device cpu.")
    world = init()
    rows = []
    for case in CASES:
        for precision in PRECISIONS:
            for compile_it in (False, True) if compiled else (False,):
                samples = _measure_case(case, precision, compile_it, device, rounds)
                pairs = zip(samples["tutti"], samples["bare"], strict=True)
                rows.append(
                    {
                        "case": case,
                        "precision": precision,
                        "compiled": compile_it,
                        "device": device,
                        "seconds": {name: statistics.median(values) for name, values in samples.items()},
                        "ratio": statistics.median(tutti / bare for tutti, bare in pairs),
                    }
                )
    assert world.size == 1
    return rows


def _measure_case(case: str, precision: str, compile_it: bool, device: str, rounds: int) -> dict[str, list[float]]:
    name, batch_sizes = CASES[case]
    made = recipe(name)
    model = made.model().to(device)
    batch = tuple(tensor.to(device) for tensor in made.example(batch_sizes[device]))
    ways = {}
    for way in ("bare", "tutti"):
        own = copy.deepcopy(model)
        optimizer = made.optimizer(own)
        if way == "tutti":
            distribute(own, optimizer)
        runner = torch.compile(own) if compile_it else own
        ways[way] = _stepper(runner, optimizer, (batch, made.loss), lambda: PRECISIONS[precision](device))
    return _interleaved(ways, device, rounds)


def _stepper(
    model: nn.Module | Callable[..., Any], optimizer: torch.optim.Optimizer, work: Any, precision: Callable[[], Any]
) -> Callable[[], None]:
    (x, y), loss = work

    def step() -> None:
        with precision():
            value = loss(model(x), y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _interleaved(ways: dict[str, Callable[[], None]], device: str, rounds: int) -> dict[str, list[float]]:
    """Seconds a step of each way in every round."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for step in ways.values():
        for _ in range(5):
            step()
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in sorted(ways, reverse=bool(number % 2)):
            wait()
            start = time.perf_counter()
            for _ in range(STEPS_PER_ROUND[device]):
                ways[name]()
            wait()
            samples[name].append((time.perf_counter() - start) / STEPS_PER_ROUND[device])
    return samples
