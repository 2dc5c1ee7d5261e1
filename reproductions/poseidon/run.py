"""Poseidon (Zhang et al. 2015, in Kim 2016): wait-free back-propagation, sufficient factors, and bounded staleness.

`simulate_speed_ups` simulates training by sizes alone (no gradients are computed), with the compute time of a K20.
`simulate_staleness` does so with late workers. `traffic` counts the bytes sent, and `lab` runs small models on real
hosts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from reproductions.context import ReproductionContext, machine
from reproductions.poseidon import traffic
from reproductions.poseidon.claims import COST_BASED, DWBP, DWBP_SACP, PLAIN
from reproductions.poseidon.lab import LabRequest, measure
from reproductions.poseidon.models import MODELS, assumed_compute, compute, sample_seconds
from reproductions.poseidon.report import write_report
from reproductions.poseidon.results import (
    BoundedStalenessTime,
    LabRun,
    LateWorkers,
    PoseidonConfig,
    PoseidonResults,
    PoseidonVariant,
    SimulatedSpeedUp,
)
from reproductions.records import save
from tutti.cluster import Cluster, Link, Pauses
from tutti.launch.lab.lab import missing
from tutti.simulation.runs.scaling import ScalingCase, scaling
from tutti.strategies import Poseidon, Strategy, parse

LATENCY = "20us"
SLOWDOWN = 1.5
"""How many times as long the slow worker computes."""
PAUSE_EVERY_STEPS, PAUSE_STEPS = 20, 3
"""Mean steps of computation between two pauses of a worker, and mean length of a pause in such steps."""
_STALE_BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class SimulatedVariant:
    """A form of Poseidon to simulate."""

    name: str
    strategy: Poseidon
    max_workers: int = 32
    """Largest number of workers: the cost-based rule first measures links, which takes long to simulate."""


VARIANTS = (
    SimulatedVariant(PLAIN, Poseidon("full", overlap=False)),
    SimulatedVariant(DWBP, Poseidon("full")),
    SimulatedVariant(DWBP_SACP, Poseidon("sacp")),
    SimulatedVariant(COST_BASED, Poseidon(), max_workers=16),
)

QUICK = PoseidonConfig(
    models=("cifar-quick", "alexnet"), workers=(1, 4), rates=("1gbit",), bounds=(0, 3), stale_workers=4,
    stale_steps=40, stale_seeds=1, traffic_rows=(16,), lab_models=("alexnet",),
    lab_workers=(2,), lab_narrowing=16, lab_rounds=1, lab_round_s=0.01,
)  # fmt: skip


def reproduce(context: ReproductionContext) -> str:
    """Simulate and measure everything, and write results, figures and report; return the report."""
    config = QUICK if context.quick else PoseidonConfig()
    lab_missing = missing()
    if lab_missing is not None:
        context.progress(f"without the lab: {lab_missing}")
    lab = tuple(measure_in_lab(config, context.progress)) if lab_missing is None else ()
    speed_ups = tuple(simulate_speed_ups(config, context.progress))
    staleness = tuple(simulate_staleness(config, context.progress))
    context.progress("counting the traffic")
    cluster = Cluster(link=Link("1gbit", LATENCY))
    counted = [traffic.count_traffic(config.traffic_workers, rows, cluster) for rows in config.traffic_rows]
    results = PoseidonResults(
        machine=machine(),
        quick=context.quick,
        config=config,
        latency=LATENCY,
        slowdown=SLOWDOWN,
        pause_every_steps=PAUSE_EVERY_STEPS,
        pause_steps=PAUSE_STEPS,
        variants=tuple(PoseidonVariant(variant.name, str(variant.strategy)) for variant in VARIANTS),
        compute={name: assumed_compute(name) for name in config.models},
        lab_missing=lab_missing,
        lab=lab,
        parameters=tuple(traffic.count_parameters()),
        layers=tuple(traffic.layer_traffic(config.traffic_workers, MODELS["alexnet"].batch_size)),
        speed_ups=speed_ups,
        staleness=staleness,
        traffic=tuple(row for rows in counted for row in rows),
    )
    save(results, context.folder / "results.json")
    return write_report(results, context.folder)


def _scaling_case(name: str, cluster: Cluster, strategy: Strategy, steps: int) -> ScalingCase:
    model = MODELS[name]
    return ScalingCase(
        model=model.make,
        sample=model.sample,
        cluster=cluster,
        strategy=strategy,
        batch_size=model.batch_size,
        steps=steps,
    )


def simulate_speed_ups(config: PoseidonConfig, progress: Callable[[str], None]) -> Iterator[SimulatedSpeedUp]:
    """Simulate every model, link rate, variant and number of workers."""
    for name in config.models:
        for rate in config.rates:
            cluster = Cluster(link=Link(rate, LATENCY), compute=compute(name))
            for variant in VARIANTS:
                progress(f"simulating {name}, {rate}, {variant.name}")
                numbers = [number for number in config.workers if number <= variant.max_workers]
                strategy = replace(variant.strategy, bucket_bytes=MODELS[name].bucket_bytes)
                for row in scaling(_scaling_case(name, cluster, strategy, steps=3), numbers):
                    speed_up = row.workers * row.efficiency
                    yield SimulatedSpeedUp(
                        model=name, rate=rate, variant=variant.name, speed_up=speed_up, **row.as_dict()
                    )


def simulate_staleness(config: PoseidonConfig, progress: Callable[[str], None]) -> Iterator[BoundedStalenessTime]:
    """Simulate AlexNet under parameter servers, for every bound of staleness and kind of late workers."""
    compute_s = sample_seconds("alexnet") * MODELS["alexnet"].batch_size
    even = Cluster(link=Link(config.stale_rate, LATENCY), compute=compute("alexnet"))
    clusters: dict[LateWorkers, Cluster] = {
        "even": even,
        "one slow": replace(even, slow={config.stale_workers - 1: SLOWDOWN}),
        "pauses": replace(even, pauses=Pauses(PAUSE_EVERY_STEPS * compute_s, PAUSE_STEPS * compute_s)),
    }
    for name, cluster in clusters.items():
        progress(f"simulating bounded staleness, {name}")
        for bound in config.bounds:
            text = f"ps:ssp={bound},bucket_bytes={_STALE_BUCKET_BYTES}"
            seconds: list[float] = []
            for seed in range(config.stale_seeds if name == "pauses" else 1):
                case = _scaling_case("alexnet", replace(cluster, seed=seed), parse(text), config.stale_steps)
                seconds += [row.step_s for row in scaling(case, [config.stale_workers])]
            yield BoundedStalenessTime(
                cluster=name, bound=bound, strategy=text, compute_s=compute_s, step_s=tuple(seconds)
            )


def measure_in_lab(config: PoseidonConfig, progress: Callable[[str], None]) -> Iterator[LabRun]:
    """Run small models on real hosts; for AlexNet's layers with every rule, to count the bytes."""
    texts = tuple(str(variant.strategy) for variant in VARIANTS)
    rules = tuple(text for rule in traffic.RULES if (text := f"poseidon:rule={rule}") not in texts)
    strategies = {name: texts + rules if name == "alexnet" else texts for name in config.lab_models}
    request = LabRequest(strategies, config.lab_narrowing, config.lab_rounds, config.lab_round_s)
    return measure(request, config.lab_workers, config.lab_rate, progress)
