"""`tutti bench fidelity`: the same jobs in a lab and in virtual time; step times and parameters are compared."""

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

STRATEGIES = {"ring": 1, "tree": 1, "butterfly": 1, "hierarchical": 2}
"""Strategies, with the ranks per host: with one rank per host, hierarchical would have one level only."""
HOSTS = 4
"""Hosts of every lab."""


@dataclass(frozen=True)
class SimulationCheck:
    """One job, measured in the lab and simulated."""

    model: str
    strategy: str
    rate: str
    ranks: int
    """Ranks per host."""
    real_s: float
    """Seconds per step in the lab."""
    simulated_s: float
    """Seconds per step in virtual time."""
    same_bits: bool
    """Whether all final parameters are bit-identical."""

    @property
    def error(self) -> float:
        """Relative error of the simulated step time."""
        return self.simulated_s / self.real_s - 1

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and derived numbers as JSON types."""
        return {**asdict(self), "error": self.error}


def in_lab(pairs: list[tuple[str, str]], steps: int) -> dict[str, Any]:
    """Measure links and computation, and run every job, on one rank of a lab. Collective."""
    transport, reporter = init().transport, SupervisorPipe()
    results: dict[str, Any] = {"network": measure_network(transport), "training": {}, "jobs": {}}
    for number, (model, strategy) in enumerate(pairs):
        reporter.progress(done=number, total=len(pairs), job=f"{model}, {strategy}")
        if model not in results["training"]:  # The same for all strategies of a model.
            results["training"][model] = measure_training(model, transport)
        results["jobs"][model, strategy] = train_steps(model, strategy, steps)
    return results


JobsByLab = dict[tuple[str, int], list[tuple[str, str]]]
"""Pairs of model and strategy, by the lab that they need: its rate, and its ranks per host."""


def jobs_by_lab(models: list[str], strategies: list[str], rates: list[str]) -> JobsByLab:
    """Return all combinations of models, strategies and rates, grouped by the lab that they need."""
    for model in models:
        recipe(model)  # Raises for an unknown name now, not after minutes in a lab.
    for strategy in strategies:
        if strategy not in STRATEGIES:
            raise UnknownName("strategy", strategy, STRATEGIES)
    jobs: JobsByLab = {}
    for rate in rates:
        LabSpec.parse(f"rate={rate}")  # Also to find mistakes now.
        for model in models:
            for strategy in strategies:
                jobs.setdefault((rate, STRATEGIES[strategy]), []).append((model, strategy))
    return jobs


def compare(jobs: JobsByLab, steps: int, show_activity: Callable[[str], None]) -> list[SimulationCheck]:
    """Run every job in its lab, simulate it on the cluster that was measured there, and compare both."""
    rows = []
    for (rate, ranks), pairs in jobs.items():
        spec = LabSpec.parse(f"hosts={HOSTS},rate={rate},ranks={ranks}")

        def show(rank: int, values: dict[str, Any], spec: LabSpec = spec) -> None:
            if rank == 0:
                show_activity(f"lab {spec}: {values['job']}, {values['done'] + 1} of {values['total']}")

        show_activity(f"lab {spec}: measuring its links")
        with Lab(spec) as lab:
            by_rank = launch(in_lab, pairs, steps, on=lab, watch=show)
        for model, strategy in pairs:
            show_activity(f"simulating {spec}: {model}, {strategy}")
            # Calibrated by a reference job in the same lab, so that only the strategy's own simulation is checked.
            cluster = cluster_of(by_rank[0]["network"] | by_rank[0]["training"][model])
            simulated = simulate(train_steps, model, strategy, steps, workers=spec.num_workers, cluster=cluster).results
            measured = [results["jobs"][model, strategy] for results in by_rank]
            digests = {digest for _, digest in (*measured, *simulated) if digest}  # A dedicated server has none.
            real_s, simulated_s = (max(step_s for step_s, _ in run) for run in (measured, simulated))
            rows.append(SimulationCheck(model, strategy, rate, ranks, real_s, simulated_s, len(digests) == 1))
    return rows
