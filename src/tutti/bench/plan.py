"""`tutti bench plan`: the planner's predictions from measurements in a lab, beside measured step times."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tutti.bench import strategies
from tutti.bench.models import check_model_names
from tutti.bench.planner_accuracy import PredictionCheck
from tutti.bench.planner_inputs import PlannerInputs, measure_planner_inputs, profile_with_overhead, reference_jobs
from tutti.bench.strategies import StrategyBenchmark
from tutti.cluster import Cluster, Link
from tutti.errors import ConfigError, NotPriced
from tutti.launch import init, launch
from tutti.launch.lab.lab import Lab, LabSpec
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.plan import Overhead, price
from tutti.plan.candidates import has_cost
from tutti.strategies import parse

HOSTS = 4
"""Workers of every comparison, each on a host of a lab. Dedicated servers have further hosts."""

STRATEGIES = (
    "native",
    "butterfly",
    "tree",
    "recursive_doubling",
    "poseidon",
    "ps:bsp",
    "ps:bsp,servers=1",
    "bf16",
    "fp8",
    "quantize:4",
    "onebit",
    "topk",
    "lowrank",
    "ps:ssp=3",
    "ps:async",
    "bmuf:every=16",
    "bmuf:every=16+onebit",
    "bmuf:every=16,overlap=1",
    "gossip",
    "peers+threshold",
)
"""Strategies that the planner considers, without those that differ little or take minutes to measure."""


@dataclass(frozen=True)
class PlanComparison:
    """Predicted and measured step times of one model on one link."""

    rows: list[PredictionCheck]
    link: Link
    overhead: Overhead
    input_s: dict[str, float]
    """Measured seconds per step that the predictions use: without exchange ("solo"), and of the reference jobs."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and derived numbers as JSON types."""
        link = {"bits_per_s": self.link.bits_per_s, "latency_s": self.link.latency_s}
        where = {"model": self.rows[0].model, "rate": self.rows[0].rate}
        return {**where, "link": link, "overhead": asdict(self.overhead), "input_s": self.input_s}


def check(models: list[str], rates: list[str], texts: list[str]) -> None:
    """Refuse models, rates and strategies that cannot be compared, before anything is measured.

    A lab takes minutes, so mistakes must be found first.
    """
    check_model_names(models)
    for rate in rates:
        if len(set(LabSpec.parse(f"hosts={HOSTS},rate={rate}").rates)) > 1:
            raise ConfigError(f"'{rate}' has several rates, for which the cost formulas do not hold: give one rate.")
    for text in texts:
        strategy = parse(text)
        if not has_cost(strategy):
            raise NotPriced(f"strategy '{text}' has no cost formula: nothing to compare its measurement with.")
        strategy.check_size(HOSTS + strategy.num_dedicated_servers)


def in_lab(benchmark: StrategyBenchmark) -> tuple[PlannerInputs, dict[str, float]]:
    """Measure the planner's inputs and the step times of every strategy, on one rank of a lab. Collective."""
    reporter = SupervisorPipe()
    reporter.progress(doing="measuring links and a step")
    inputs = measure_planner_inputs(benchmark.model, init().transport)
    return inputs, strategies.measure(benchmark)["seconds"]


def compare(model: str, rate: str, texts: list[str], rounds: int, show: Callable[[str], None]) -> PlanComparison:
    """Measure every strategy in a lab with such links, and predict each from measurements in the same lab."""
    jobs = reference_jobs(model, HOSTS)
    # In one lab, interleaved. A strategy with dedicated servers needs more hosts, and so a lab of its own.
    without_servers = [text for text in texts if not parse(text).num_dedicated_servers]
    benchmark = StrategyBenchmark(model, tuple(dict.fromkeys((*without_servers, *jobs))), rounds)
    by_rank = _launched(in_lab, benchmark, rate, HOSTS, show)
    seconds = dict(by_rank[0][1])  # Those of the slowest rank, the same on all.
    for text in texts:
        if num_servers := parse(text).num_dedicated_servers:
            single = StrategyBenchmark(model, (text,), rounds)
            measured = _launched(strategies.measure, single, rate, HOSTS + num_servers, show)[0]
            seconds[text] = measured["seconds"][text]
    # All ranks wait for the slowest, so its profile is the one to predict from.
    slowest = max((inputs for inputs, _ in by_rank), key=lambda inputs: inputs.profile.seconds)
    # Only the reference jobs calibrate the overhead, and not the measurements that predictions are compared with.
    profile, link = profile_with_overhead(slowest, HOSTS, seconds, jobs)
    cluster = Cluster(name=rate, link=link)
    rows = [PredictionCheck(model, rate, price(parse(text), profile, HOSTS, cluster), seconds[text]) for text in texts]
    return PlanComparison(rows, link, profile.overhead, {text: seconds[text] for text in ("solo", *jobs)})


def _launched(
    function: Callable[[StrategyBenchmark], Any],
    benchmark: StrategyBenchmark,
    rate: str,
    hosts: int,
    show_activity: Callable[[str], None],
) -> list[Any]:
    """Run a function on every host of a lab with such links, and show what rank 0 reports."""

    def show(rank: int, values: dict[str, Any]) -> None:
        if rank == 0 and "doing" in values:
            show_activity(f"{benchmark.model}, {hosts} hosts at {rate}: {values['doing']}")

    show_activity(f"{benchmark.model}, {hosts} hosts at {rate}: starting")
    with Lab(LabSpec.parse(f"hosts={hosts},rate={rate}")) as lab:
        return launch(function, benchmark, on=lab, watch=show)
