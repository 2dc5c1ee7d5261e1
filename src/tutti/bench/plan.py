"""The planner against reality: what it says steps take in the lab, from what was measured there, and what they take."""

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

MODELS = ("mlp-1.9M", "cifar-quick", "char-gpt")
RATES = ("100mbit", "1gbit", "10gbit")
"""The last is more than these cores can send: then it is they that limit it, as where a link is not the problem."""
HOSTS = 4

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
"""What the planner considers, but for those that differ little from these, or take minutes to measure."""


@dataclass(frozen=True)
class PlanComparison:
    """One model on one link."""

    rows: list[PredictionCheck]
    link: Link
    overhead: Overhead
    given_s: dict[str, float]
    """What it follows from: steps without exchange ("solo"), and of the reference jobs."""

    def as_dict(self) -> dict[str, Any]:
        link = {"bits_per_s": self.link.bits_per_s, "latency_s": self.link.latency_s}
        where = {"model": self.rows[0].model, "rate": self.rows[0].rate}
        return {**where, "link": link, "overhead": asdict(self.overhead), "given_s": self.given_s}


def check(models: list[str], rates: list[str], ways: list[str]) -> None:
    """Refuse what cannot be measured, before anything is."""
    check_model_names(models)
    for rate in rates:
        if len(set(LabSpec.parse(f"hosts={HOSTS},rate={rate}").rates)) > 1:
            raise ConfigError(
                f"'{rate}' gives hosts links of their own, for which formulas do not hold: give one rate."
            )
    for way in ways:
        strategy = parse(way)
        if not has_cost(strategy):
            raise NotPriced(f"strategy '{way}' has no cost formula: nothing to compare its measurement with.")
        strategy.check_size(HOSTS + strategy.num_dedicated_servers)


def in_lab(benchmark: StrategyBenchmark) -> tuple[PlannerInputs, dict[str, float]]:
    """What predictions need, and the seconds of every way, measured on this rank and its peers."""
    reporter = SupervisorPipe()
    reporter.progress(doing="measuring links and a step")
    found = measure_planner_inputs(benchmark.model, init().transport)
    return found, strategies.measure(benchmark)["seconds"]


def compare(model: str, rate: str, ways: list[str], rounds: int, say: Callable[[str], None]) -> PlanComparison:
    """Measure every way in a lab of such links, and predict each from the same lab."""
    jobs = reference_jobs(model, HOSTS)
    beside = [way for way in ways if not parse(way).num_dedicated_servers]
    benchmark = StrategyBenchmark(model, tuple(dict.fromkeys((*beside, *jobs))), rounds)
    everyones = _launched(in_lab, benchmark, rate, HOSTS, say)
    seconds = dict(everyones[0][1])
    for way in ways:
        if num_dedicated_servers := parse(way).num_dedicated_servers:
            alone = StrategyBenchmark(model, (way,), rounds)
            measured = _launched(strategies.measure, alone, rate, HOSTS + num_dedicated_servers, say)[0]
            seconds[way] = measured["seconds"][way]
    slowest = max((found for found, _ in everyones), key=lambda found: found.profile.seconds)
    profile, link = profile_with_overhead(slowest, HOSTS, seconds, jobs)
    cluster = Cluster(name=rate, link=link)
    rows = [PredictionCheck(model, rate, price(parse(way), profile, HOSTS, cluster), seconds[way]) for way in ways]
    return PlanComparison(rows, link, profile.overhead, {way: seconds[way] for way in ("solo", *jobs)})


def _launched(
    function: Callable[[StrategyBenchmark], Any],
    benchmark: StrategyBenchmark,
    rate: str,
    hosts: int,
    say: Callable[[str], None],
) -> list[Any]:
    def show(rank: int, values: dict[str, Any]) -> None:
        if rank == 0 and "doing" in values:
            say(f"{benchmark.model}, {hosts} hosts at {rate}: {values['doing']}")

    say(f"{benchmark.model}, {hosts} hosts at {rate}: starting")
    with Lab(LabSpec.parse(f"hosts={hosts},rate={rate}")) as lab:
        return launch(function, benchmark, lab=lab, watch=show)
