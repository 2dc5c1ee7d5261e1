"""Poseidon (Zhang et al. 2015, in Kim 2016): wait-free back-propagation, factors for matrices, and staleness.

`speed_ups` simulates training by sizes alone, computing as long as a K20 would; `staleness` does so with workers that
are late; `poseidon_traffic` counts what is sent, and `poseidon_lab` runs small stand-ins for real.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from reproductions.context import ReproductionContext, machine
from reproductions.poseidon import lab as poseidon_lab
from reproductions.poseidon import traffic as poseidon_traffic
from reproductions.poseidon.report import write_report
from tutti.cluster import Cluster, Compute, Link, Pauses
from tutti.launch.lab.lab import missing
from tutti.recipes.models import AlexNet, CifarQuick, GoogLeNet
from tutti.recipes.step_times import k20
from tutti.simulation.runs.scaling import IMAGE, ScalingCase, scaling
from tutti.simulation.workload import Workload
from tutti.strategies import Poseidon, Strategy, parse

LATENCY = "20us"
SLOW = 1.5
"""How many times as long the slow worker takes."""
PAUSE_EVERY, PAUSE = 20, 3
"""Steps of computing between two stops of a worker, and how many a stop lasts, on average."""
_STALE_BUCKETS = 64 * 2**20


@dataclass(frozen=True)
class Way:
    """How replicas stay together."""

    name: str
    strategy: Poseidon
    most_workers: int = 32
    """The priced rule measures links first, which takes long to simulate."""

    def as_dict(self) -> dict[str, str]:
        return {"name": self.name, "text": str(self.strategy)}


WAYS = (
    Way("plain back-propagation", Poseidon("full", overlap=False)),
    Way("DWBP", Poseidon("full")),
    Way("DWBP + SACP", Poseidon("sacp")),
    Way("DWBP, rule by price", Poseidon(), most_workers=16),
)


@dataclass(frozen=True)
class Model:
    """What is trained, and the batch of a worker: those of Caffe's solvers."""

    make: Callable[[], nn.Module]
    sample: tuple[int, ...]
    batch_size: int
    bucket_bytes: int = 4 * 2**20


MODELS = {
    # All of it is less than a bucket would be otherwise, and nothing would travel before the end of backward.
    "cifar-quick": Model(CifarQuick, (3, 32, 32), 100, bucket_bytes=2**16),
    "alexnet": Model(AlexNet, IMAGE, 256),
    "googlenet": Model(GoogLeNet, IMAGE, 32),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to do."""

    models: tuple[str, ...] = tuple(MODELS)
    workers: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rates: tuple[str, ...] = ("40gbit", "1gbit")
    bounds: tuple[int, ...] = (0, 1, 2, 3, 5, 10, 20)
    """Of staleness."""
    stale_rate: str = "40gbit"
    stale_workers: int = 8
    stale_steps: int = 120
    stale_seeds: int = 5
    bytes_workers: int = 8
    bytes_rows: tuple[int, ...] = (16, 256)
    lab_models: tuple[str, ...] = tuple(MODELS)
    lab_workers: tuple[int, ...] = (2, 4, 8)
    lab_rate: str = "1gbit"
    lab_narrower: int = 4
    lab_rounds: int = 5
    lab_round_s: float = 0.5


QUICK = Plan(
    models=("cifar-quick", "alexnet"), workers=(1, 4), rates=("1gbit",), bounds=(0, 3), stale_workers=4,
    stale_steps=40, stale_seeds=1, bytes_rows=(16,), lab_models=("alexnet",),
    lab_workers=(2,), lab_narrower=16, lab_rounds=1, lab_round_s=0.01,
)  # fmt: skip


def reproduce(context: ReproductionContext) -> str:
    """Do all of it; the report, in Markdown."""
    plan = QUICK if context.quick else Plan()
    if (lacking := missing()) is not None:
        context.progress(f"without the lab: {lacking}")
    rows = in_lab(plan, context.progress) if lacking is None else []
    return conclude(plan, rows, lacking, context)


def conclude(plan: Plan, lab: list[dict[str, Any]], lab_missing: str | None, context: ReproductionContext) -> str:
    """Simulate, and write down all of it, with what the lab has given; the report."""
    link = Cluster(link=Link("1gbit", LATENCY))
    result: dict[str, Any] = {
        "machine": machine(),
        "quick": context.quick,
        "plan": asdict(plan),
        "latency": LATENCY,
        "slow": SLOW,
        "pauses": [PAUSE_EVERY, PAUSE],
        "ways": [way.as_dict() for way in WAYS],
        "computing": {name: _computing(name) for name in plan.models},
        "lab_missing": lab_missing,
        "lab": lab,
        "parameters": poseidon_traffic.parameters(),
        "layers": poseidon_traffic.layer_by_layer(plan.bytes_workers, MODELS["alexnet"].batch_size),
        "rows": speed_ups(plan, context.progress),
        "staleness": staleness(plan, context.progress),
    }
    context.progress("counting what is sent")
    result["bytes"] = [
        row for number in plan.bytes_rows for row in poseidon_traffic.counted(plan.bytes_workers, number, link)
    ]
    (context.folder / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    return write_report(result, context.folder)


def compute(name: str) -> Compute:
    """How long a K20 would take for a sample. Of `cifar-quick` nobody says: as many operations a second as AlexNet."""
    if name != "cifar-quick":
        return k20(name)
    alexnet_s = k20("alexnet").sample_s
    assert alexnet_s is not None
    return Compute(sample_s=alexnet_s * _workload(name).forward_flops / _workload("alexnet").forward_flops)


def _workload(name: str) -> Workload:
    model = MODELS[name]
    with torch.device("meta"):
        return Workload.from_model(model.make(), (torch.empty(1, *model.sample),), {})


def _computing(name: str) -> dict[str, float]:
    seconds, batch_size = compute(name).sample_s, MODELS[name].batch_size
    assert seconds is not None
    speed = 3 * _workload(name).forward_flops / seconds
    made = {"batch_size": batch_size, "images_per_s": 1 / seconds, "step_s": seconds * batch_size, "flops": speed}
    return {**made, "bucket_bytes": MODELS[name].bucket_bytes}


def _case(name: str, cluster: Cluster, strategy: Strategy, steps: int) -> ScalingCase:
    model = MODELS[name]
    return ScalingCase(
        model=model.make,
        sample=model.sample,
        cluster=cluster,
        strategy=strategy,
        batch_size=model.batch_size,
        steps=steps,
    )


def speed_ups(plan: Plan, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every model, link, way and number of workers, by sizes alone."""
    rows = []
    for name in plan.models:
        for rate in plan.rates:
            cluster = Cluster(link=Link(rate, LATENCY), compute=compute(name))
            for way in WAYS:
                say(f"simulating {name}, {rate}, {way.name}")
                numbers = [number for number in plan.workers if number <= way.most_workers]
                strategy = replace(way.strategy, bucket_bytes=MODELS[name].bucket_bytes)
                for row in scaling(_case(name, cluster, strategy, steps=3), numbers):
                    speed_up = row.workers * row.efficiency
                    about = {"model": name, "rate": rate, "way": way.name, "speed_up": speed_up}
                    rows.append({**about, **row.as_dict()})
    return rows


def staleness(plan: Plan, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Time a step of AlexNet under servers, by how far workers may be apart and by what makes them late."""
    sample_s = compute("alexnet").sample_s
    assert sample_s is not None
    step_s = sample_s * MODELS["alexnet"].batch_size
    even = Cluster(link=Link(plan.stale_rate, LATENCY), compute=compute("alexnet"))
    places = {
        "even": even,
        "one slow": replace(even, slow={plan.stale_workers - 1: SLOW}),
        "pauses": replace(even, pauses=Pauses(PAUSE_EVERY * step_s, PAUSE * step_s)),
    }
    rows = []
    for late, cluster in places.items():
        say(f"simulating bounded staleness, {late}")
        for bound in plan.bounds:
            text = f"ps:ssp={bound},bucket_bytes={_STALE_BUCKETS}"
            seconds = []
            for seed in range(plan.stale_seeds if late == "pauses" else 1):
                case = _case("alexnet", replace(cluster, seed=seed), parse(text), plan.stale_steps)
                seconds += [row.step_s for row in scaling(case, [plan.stale_workers])]
            rows.append({"late": late, "bound": bound, "strategy": text, "computing_s": step_s, "step_s": seconds})
    return rows


def in_lab(plan: Plan, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Small stand-ins for the models on real hosts; of AlexNet's layers, every rule, to count what they send."""
    texts = tuple(str(way.strategy) for way in WAYS)
    rules = tuple(text for rule in poseidon_traffic.RULES if (text := f"poseidon:rule={rule}") not in texts)
    all_texts = {name: texts + rules if name == "alexnet" else texts for name in plan.lab_models}
    request = poseidon_lab.Request(all_texts, plan.lab_narrower, plan.lab_rounds, plan.lab_round_s)
    return poseidon_lab.measure(request, plan.lab_workers, plan.lab_rate, say)
