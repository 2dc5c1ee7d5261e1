"""Malik et al. (2018): three networks on up to 400 GPUs, by ring all-reduce as in Horovod and by parameter servers.

`simulate_all` simulates the steps by sizes alone, computing as long as a K80 would; `check_in_lab` runs a small model
for real on four hosts, and simulates the same.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from reproductions.context import ReproductionContext, machine
from reproductions.horovod_scaling.report import write_report
from tutti.bench.fidelity import compare
from tutti.cluster import Cluster
from tutti.launch.lab.lab import missing
from tutti.recipes.step_times import k80
from tutti.simulation.runs.scaling import ScalingCase, scaling
from tutti.strategies import parse


@dataclass(frozen=True)
class Way:
    """How replicas stay together."""

    name: str
    text: str
    """Of the strategy, in the simulation: buckets as large as Horovod's."""
    servers: int = 0
    """Ranks that are added to the workers and only serve."""
    most_workers: int = 400
    """At all but the smallest batch size: what takes long to simulate is left out at the others."""
    lab_text: str = ""
    """In the lab, whose models are small; as in the simulation by default."""


WAYS = (
    Way("ring all-reduce", "ring:bucket_bytes=67108864", lab_text="ring"),
    Way("one parameter server", "ps:bsp,servers=1,bucket_bytes=67108864", servers=1, lab_text="ps:bsp,servers=1"),
    Way("parameter servers on all workers", "ps:bsp,bucket_bytes=67108864", most_workers=64, lab_text="ps:bsp"),
)
"""Everything that is compared, in figures, tables and the lab; the first is Horovod's."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to do."""

    models: tuple[str, ...] = ("alexnet", "googlenet", "resnet50")
    batches: tuple[int, ...] = (64, 128, 256, 512)
    workers: tuple[int, ...] = (1, 4, 16, 64, 128, 256, 400)
    steps: int = 2
    cluster: str = "infiniband-edr"
    lab_models: tuple[str, ...] = ("mnist-mlp", "cifar-quick")
    lab_rate: str = "1gbit"
    lab_steps: int = 30


QUICK = Plan(models=("alexnet", "googlenet"), batches=(64, 512), workers=(1, 4, 8), lab_models=("digits",), lab_steps=3)


def reproduce(context: ReproductionContext) -> str:
    """Do all of it; the report, in Markdown."""
    plan = QUICK if context.quick else Plan()
    result: dict[str, Any] = {
        "machine": machine(),
        "plan": asdict(plan),
        "quick": context.quick,
        "ways": [asdict(way) for way in WAYS],
        "lab_missing": missing(),
    }
    if (lacking := result["lab_missing"]) is not None:
        context.progress(f"without the lab: {lacking}")
    result["lab"] = check_in_lab(plan, WAYS, context.progress) if lacking is None else []
    result["rows"] = simulate_all(plan, WAYS, context.progress)
    (context.folder / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    return write_report(result, context.folder)


def simulate_all(plan: Plan, ways: tuple[Way, ...], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every model, batch size, way and number of workers."""
    place, rows = Cluster.load(plan.cluster), []
    for model in plan.models:
        for batch_size in plan.batches:
            for way in ways:
                say(f"simulating {model}, {batch_size} images a worker, {way.name}")
                numbers = [n for n in plan.workers if n <= way.most_workers or batch_size == plan.batches[0]]
                case = ScalingCase(
                    model=model,
                    cluster=replace(place, compute=k80(model, batch_size)),
                    strategy=parse(way.text),
                    batch_size=batch_size,
                    steps=plan.steps,
                )
                found = scaling(case, numbers)
                rows += [{"model": model, "batch_size": batch_size, "way": way.name, **row.as_dict()} for row in found]
    return rows


def check_in_lab(plan: Plan, ways: tuple[Way, ...], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Steps of small models on real hosts, and the same steps simulated from a calibration there."""
    names = {way.lab_text or way.text: way.name for way in ways}
    pairs = [(model, text) for model in plan.lab_models for text in names]
    rows = compare({(plan.lab_rate, 1): pairs}, plan.lab_steps, say)
    return [{**row.as_dict(), "way": names[row.strategy]} for row in rows]
