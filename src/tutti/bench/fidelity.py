"""The simulator against reality: the same job in the lab and in virtual time, step by step and bit by bit."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tutti.errors import UnknownName
from tutti.launch import init, launch
from tutti.launch.lab.lab import Lab, LabSpec
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.plan.network import measure_network
from tutti.recipes import recipe
from tutti.simulation.runs.calibrate import cluster_of, measure_training, train_steps
from tutti.simulation.runs.simulate import simulate

MODELS = ("mnist-mlp", "cifar-quick", "char-gpt")
STRATEGIES = {"ring": 1, "tree": 1, "butterfly": 1, "hierarchical": 2}
"""And how many ranks a host has: with one, the last would have one level only."""
RATES = ("100mbit", "1gbit")
HOSTS = 4


@dataclass(frozen=True)
class SimulationCheck:
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


def in_lab(pairs: list[tuple[str, str]], steps: int) -> dict[str, Any]:
    """All that is done on the hosts of one lab: links and computing measured, and every job, on this rank."""
    transport, reporter = init().transport, SupervisorPipe()
    found: dict[str, Any] = {"network": measure_network(transport), "training": {}, "jobs": {}}
    for number, (model, strategy) in enumerate(pairs):
        reporter.progress(done=number, total=len(pairs), job=f"{model}, {strategy}")
        if model not in found["training"]:
            found["training"][model] = measure_training(model, transport)
        found["jobs"][model, strategy] = train_steps(model, strategy, steps)
    return found


JobsByLab = dict[tuple[str, int], list[tuple[str, str]]]
"""For a rate and a number of ranks per host: pairs of model and strategy."""


def jobs_by_lab(models: list[str], strategies: list[str], rates: list[str]) -> JobsByLab:
    """All combinations, sorted by the lab that they need."""
    for model in models:
        recipe(model)
    for strategy in strategies:
        if strategy not in STRATEGIES:
            raise UnknownName("strategy", strategy, STRATEGIES)
    found: JobsByLab = {}
    for rate in rates:
        LabSpec.parse(f"rate={rate}")
        for model in models:
            for strategy in strategies:
                found.setdefault((rate, STRATEGIES[strategy]), []).append((model, strategy))
    return found


def compare(cases: JobsByLab, steps: int, say: Callable[[str], None]) -> list[SimulationCheck]:
    """Run and simulate everything."""
    rows = []
    for (rate, ranks), pairs in cases.items():
        spec = LabSpec.parse(f"hosts={HOSTS},rate={rate},ranks={ranks}")

        def show(rank: int, values: dict[str, Any], spec: LabSpec = spec) -> None:
            if rank == 0:
                say(f"lab {spec}: {values['job']}, {values['done'] + 1} of {values['total']}")

        say(f"lab {spec}: measuring its links")
        with Lab(spec) as lab:
            real = launch(in_lab, pairs, steps, lab=lab, watch=show)
        for model, strategy in pairs:
            say(f"simulating {spec}: {model}, {strategy}")
            cluster = cluster_of(real[0]["network"] | real[0]["training"][model])
            simulated = simulate(train_steps, model, strategy, steps, workers=spec.num_workers, cluster=cluster).results
            lived = [mine["jobs"][model, strategy] for mine in real]
            bits = {digest for _, digest in (*lived, *simulated) if digest}
            seconds = [max(step_s for step_s, _ in run) for run in (lived, simulated)]
            rows.append(SimulationCheck(model, strategy, rate, ranks, seconds[0], seconds[1], len(bits) == 1))
    return rows
