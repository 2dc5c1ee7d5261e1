"""Malik et al. (2018): three networks on up to 400 GPUs, with ring all-reduce as in Horovod and parameter servers.

`simulate_all` simulates the steps by sizes alone (no gradients are computed), with the compute time of a K80.
`compare_in_lab` runs small models on four real hosts, and simulates the same steps.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from reproductions.context import ReproductionContext, machine
from reproductions.horovod_scaling.report import write_report
from reproductions.horovod_scaling.results import (
    HorovodConfig,
    HorovodResults,
    LabComparison,
    SimulatedScaling,
    SynchronisationMethod,
)
from reproductions.records import save
from tutti.bench.fidelity import compare
from tutti.cluster import Cluster
from tutti.launch.lab.lab import missing
from tutti.recipes.step_times import k80
from tutti.simulation.runs.scaling import ScalingCase, scaling
from tutti.strategies import parse

METHODS = (
    SynchronisationMethod("ring all-reduce", "ring:bucket_bytes=67108864", lab_strategy="ring"),
    SynchronisationMethod(
        "one parameter server",
        "ps:bsp,servers=1,bucket_bytes=67108864",
        num_servers=1,
        lab_strategy="ps:bsp,servers=1",
    ),
    SynchronisationMethod(
        "parameter servers on all workers", "ps:bsp,bucket_bytes=67108864", max_workers=64, lab_strategy="ps:bsp"
    ),
)
"""The methods compared; the first is Horovod's."""

QUICK = HorovodConfig(
    models=("alexnet", "googlenet"), batches=(64, 512), workers=(1, 4), lab_models=("digits",), lab_steps=3
)


def reproduce(context: ReproductionContext) -> str:
    """Simulate and measure everything, and write results, figures and report; return the report."""
    config = QUICK if context.quick else HorovodConfig()
    lab_missing = missing()
    if lab_missing is not None:
        context.progress(f"without the lab: {lab_missing}")
    results = HorovodResults(
        machine=machine(),
        quick=context.quick,
        config=config,
        methods=METHODS,
        lab_missing=lab_missing,
        lab=tuple(compare_in_lab(config, context.progress)) if lab_missing is None else (),
        simulated=tuple(simulate_all(config, context.progress)),
    )
    save(results, context.folder / "results.json")
    return write_report(results, context.folder)


def simulate_all(config: HorovodConfig, progress: Callable[[str], None]) -> Iterator[SimulatedScaling]:
    """Simulate every model, batch size, method and number of workers."""
    cluster = Cluster.load(config.cluster)
    for model in config.models:
        for batch_size in config.batches:
            for method in METHODS:
                progress(f"simulating {model}, {batch_size} images per worker, {method.name}")
                smallest = batch_size == config.batches[0]
                numbers = [number for number in config.workers if number <= method.max_workers or smallest]
                case = ScalingCase(
                    model=model,
                    cluster=replace(cluster, compute=k80(model, batch_size)),
                    strategy=parse(method.strategy),
                    batch_size=batch_size,
                    steps=config.steps,
                )
                for row in scaling(case, numbers):
                    yield SimulatedScaling(model=model, batch_size=batch_size, method=method.name, **row.as_dict())


def compare_in_lab(config: HorovodConfig, progress: Callable[[str], None]) -> Iterator[LabComparison]:
    """Run steps of small models on real hosts, and simulate the same steps with links and compute measured there."""
    names = {method.lab_strategy or method.strategy: method.name for method in METHODS}
    pairs = [(model, strategy) for model in config.lab_models for strategy in names]
    for row in compare({(config.lab_rate, 1): pairs}, config.lab_steps, progress):
        yield LabComparison(
            model=row.model,
            method=names[row.strategy],
            strategy=row.strategy,
            rate=row.rate,
            ranks_per_host=row.ranks,
            real_s=row.real_s,
            simulated_s=row.simulated_s,
            same_bits=row.same_bits,
        )
