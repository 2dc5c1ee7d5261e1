"""The simulator against reality: the same job in the lab and in virtual time, step by step and bit by bit."""

import hashlib
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tutti.bench.calibrate import cluster_of, measure
from tutti.cluster import Cluster
from tutti.errors import UnknownName
from tutti.job import distribute
from tutti.launch import init, launch
from tutti.launch.lab import Lab, LabSpec
from tutti.launch.simulate import simulate
from tutti.recipes import recipe
from tutti.strategies import parse

MODELS = ("mnist-mlp", "cifar-quick", "char-gpt")
STRATEGIES = {"ring": 1, "tree": 1, "butterfly": 1, "hierarchical": 2}
"""And how many ranks a host has: with one, the last would have one level only."""
RATES = ("100mbit", "1gbit")
HOSTS = 4

_WARM_UP = 3


@dataclass(frozen=True)
class Row:
    """One job, both ways."""

    model: str
    strategy: str
    rate: str
    ranks: int
    real_s: float
    simulated_s: float
    same_bits: bool

    @property
    def error(self) -> float:
        """How far the simulator is off, relative to reality."""
        return self.simulated_s / self.real_s - 1

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error}


def job(name: str, strategy: str, batch_size: int, steps: int) -> tuple[float, str]:
    """Train for some steps: the median seconds of a step, and a digest of the parameters."""
    world = init()
    made = recipe(name)
    torch.manual_seed(0)
    model = made.model()
    optimizer = made.optimizer(model)
    x, y = made.example(batch_size * world.size)
    x, y = (part[world.rank * batch_size : (world.rank + 1) * batch_size] for part in (x, y))
    times = []
    with distribute(model, optimizer, parse(strategy), world=world):
        for _ in range(_WARM_UP + steps):
            start_s = world.transport.now()
            made.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(world.transport.now() - start_s)
    bits = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    return statistics.median(times[_WARM_UP:]), bits.hexdigest()


Chosen = dict[tuple[str, int], list[tuple[str, str]]]
"""For a rate and a number of ranks per host: pairs of model and strategy."""


def chosen(models: list[str], strategies: list[str], rates: list[str]) -> Chosen:
    """All combinations, sorted by the lab that they need."""
    for model in models:
        recipe(model)
    for strategy in strategies:
        if strategy not in STRATEGIES:
            raise UnknownName("strategy", strategy, STRATEGIES)
    found: Chosen = {}
    for rate in rates:
        LabSpec.parse(f"rate={rate}")
        for model in models:
            for strategy in strategies:
                found.setdefault((rate, STRATEGIES[strategy]), []).append((model, strategy))
    return found


def compare_all(cases: Chosen, steps: int, say: Callable[[str], None]) -> list[Row]:
    """Run and simulate everything."""
    rows = []
    for (rate, ranks), pairs in cases.items():
        with Lab(LabSpec.parse(f"hosts={HOSTS},rate={rate},ranks={ranks}")) as lab:
            for model in dict.fromkeys(model for model, _ in pairs):
                say(f"{model}, {rate}, {lab.spec.num_workers} ranks: measuring")
                batch_size = max(1, recipe(model).batch_size // lab.spec.num_workers)
                cluster = cluster_of(launch(measure, model, batch_size, lab=lab)[0])
                for strategy in [each for name, each in pairs if name == model]:
                    say(f"{model}, {rate}, {lab.spec.num_workers} ranks: {strategy}")
                    real_s, simulated_s, same = _both(lab, cluster, (model, strategy, batch_size, steps))
                    rows.append(Row(model, strategy, rate, ranks, real_s, simulated_s, same))
    return rows


def _both(lab: Lab, cluster: Cluster, args: tuple[str, str, int, int]) -> tuple[float, float, bool]:
    """Seconds of a step, in the lab and simulated, of the slowest rank; and whether all parameters are the same."""
    real = launch(job, *args, lab=lab)
    simulated = simulate(job, *args, workers=lab.spec.num_workers, cluster=cluster).results
    bits = {digest for _, digest in (*real, *simulated)}
    return max(step_s for step_s, _ in real), max(step_s for step_s, _ in simulated), len(bits) == 1
