"""The work of `tutti plan`: measure a step, predict every strategy, and print tables and a recommendation."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tutti.cli.model_argument import load_model
from tutti.cli.plan import layers, target_accuracy
from tutti.cli.plan import meshes as mesh_output
from tutti.cli.plan.request import MEASURED, PlanRequest
from tutti.cli.strategy_cell import StrategyCell
from tutti.cluster import Cluster, Link, format_size, format_time
from tutti.cost.placement import restricted_to
from tutti.errors import DataError
from tutti.launch import init, launch
from tutti.plan import Plan, Prediction, Profile, RunSize, plan
from tutti.plan.mesh import ModelParts, plan_meshes
from tutti.plan.network import measure_network
from tutti.plan.profile import profile as profile_model
from tutti.plan.profile.training_pass import TrainingPass
from tutti.plan.scaling import Profiles, sharing_cores, worker_profile
from tutti.recipes import recipe
from tutti.recipes.training import TrainingConfig
from tutti.simulation.runs.dry_run import dry_run
from tutti.simulation.runs.time_to_accuracy import time_to_accuracy
from tutti.strategies import Strategy

_MOST_ROWS = 20
_MOST_SIMULATED_RANKS = 32
"""Strategies without a cost formula are simulated up to this many ranks; more send too many messages to wait for."""
# Two have a link between them, and all ranks of one machine share the same memory.
_MEASURED_RANKS = 2


@dataclass(frozen=True)
class _Planned:
    """A plan, and the measurements that it is based on."""

    plan: Plan
    profile: Profile
    """A step of one worker."""
    cluster: Cluster
    doubts: tuple[str, ...]
    """Why measurements should not be trusted, one sentence each; empty if they can be."""


def run(request: PlanRequest) -> dict[str, Any]:
    """Make the plan that `request` asks for, print it, and return it for `--json`."""
    console = Console()
    planned = _make_plan(request, console)
    where = str(planned.cluster).splitlines()[0]
    num_samples = planned.plan.best.num_samples
    console.print(
        f"{request.model}, {request.workers} workers, {num_samples} samples per worker, {where}", highlight=False
    )
    spread = planned.profile.spread
    if spread is not None:
        step_s = format_time(planned.profile.seconds)
        console.print(f"step of one worker: {step_s}; forward and backward {spread}", highlight=False)
    _show(planned.plan, console)
    for doubt in planned.doubts:
        console.print(f"[yellow]{doubt}[/]", highlight=False)
    # For `--json`: how far the measurements can be trusted.
    measured = {"spread": None if spread is None else asdict(spread), "doubts": planned.doubts}
    written = {"subject": request.model, "cluster": planned.cluster.to_toml(), **measured, **planned.plan.as_dict()}
    # Further answers, each where it was asked for.
    if request.per_layer:
        written["layers"] = _show_layers(request, planned, console)
    if request.meshes:
        written["meshes"] = _show_meshes(request, planned, console)
    if request.target_accuracy is not None:
        written["reaches"] = _show_target_accuracy(request, planned, console)
    return written


def _make_plan(request: PlanRequest, console: Console) -> _Planned:
    """Measure or read the cluster, measure a step of one worker, and predict every strategy."""
    with console.status("measuring links") as status:
        # 1. The cluster: measured here, or read.
        cluster, doubts = _measure_cluster() if request.cluster == MEASURED else (Cluster.load(request.cluster), [])
        cluster = restricted_to(cluster, request.workers)
        # Before a step is measured, which takes seconds.
        cluster.place(request.workers)  # Refuses more ranks than the hosts have room for.
        # 2. A step of one worker, without communication.
        status.update(f"measuring a step of {request.model}")
        measure = partial(profile_step, request.model, request.options, request.batch, request.input_shape)
        # On this machine workers share cores and slow each other down; hosts of a cluster have their own.
        profiles = _profiles_sharing_cores(measure) if request.cluster == MEASURED else measure()
        samples = _run_samples(request)
        run_size = RunSize(global_batch=request.global_batch, num_samples=samples, failures=request.failures)
        profile = worker_profile(profiles, request.workers, run_size)
        # The simulator is asked only where formulas do not hold, and only about the fastest few.
        status.update("predicting step times")
        simulated = partial(_simulate, profile, request.workers, cluster, status.update)
        # 3. All strategies, by formula or simulated.
        made = plan(
            profiles,
            request.workers,
            cluster,
            allow_lossy=request.allow_lossy,
            run=run_size,
            simulator=simulated if request.workers <= _MOST_SIMULATED_RANKS else None,
        )
    doubts += [] if profile.spread is None else [profile.spread.doubt]
    return _Planned(made, profile, cluster, tuple(filter(None, doubts)))


def _run_samples(request: PlanRequest) -> int | None:
    """Return the samples of the whole run; None if not known: only a recipe has data, which may not be here."""
    if ":" in request.model:
        return None
    made = recipe(request.model, **request.options)
    with suppress(DataError):
        return (request.epochs or made.epochs) * len(made.data(request.data).train)
    return None


def measure_here() -> dict[str, Any]:
    """Measure the links between ranks; every rank of `_measure_cluster` runs this."""
    return measure_network(init().transport)


def _measure_cluster() -> tuple[Cluster, list[str]]:
    """This machine as a cluster of one host, with measured links, and why they should not be trusted, if so."""
    network = launch(measure_here, workers=_MEASURED_RANKS)[0]
    return Cluster(name=MEASURED, hosts=1, within=Link(*network["links"]["within"])), network["doubts"]


def _profiles_sharing_cores(measure: Callable[[], Profile]) -> Profiles:
    """Profiles of workers that share the cores of this machine: measured with all threads and with one."""
    whole, threads = measure(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        single = measure()
    finally:
        torch.set_num_threads(threads)
    return sharing_cores(single, whole, len(os.sched_getaffinity(0)))


def profile_step(model: str, options: dict[str, Any], batch: int | None, input_shape: str | None) -> Profile:
    """Measure a training step of a recipe or of a user's model on this machine."""
    loaded = load_model(model, options, batch, input_shape)
    return profile_model(loaded.model, loaded.batch, loss=loaded.loss, optimizer=loaded.optimizer)


def _simulate(
    profile: Profile, workers: int, cluster: Cluster, show: Callable[[str], None], strategy: Strategy
) -> float:
    show(f"simulating {strategy}")
    return dry_run(strategy, profile, workers, cluster)


def _show(made: Plan, console: Console) -> None:
    """Print the tables and the sentences of a plan."""
    console.print(_table(made))
    if (left := len(made.predictions) - _MOST_ROWS) > 0:
        console.print(f"{left} slower ones are not shown; --json has them")
    for name, reason in made.not_priced.items():
        console.print(f"no prediction for {name}: {reason}", highlight=False)
    console.print(made.reason, highlight=False)
    console.print(_scaling_table(made))
    console.print(made.scaling.reason, highlight=False)


def _table(made: Plan) -> Table:
    """One worker, then the strategies: the recommended one first, the others by step time."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)  # Long names of strategies need the width.
    table.caption = (
        "~ changes the result; * simulated; exposed: communication not hidden by computation; busy: share of the step "
        "spent computing; sent: bytes per worker; memory: approximate\n"
        "The recommended strategy comes first after one worker, then the others by step time. Of lossy strategies "
        "within 5% of the fastest, the one nearest to exact is recommended."
    )
    table.add_column("")
    headings = ["step", "exposed", "busy", "samples/s", "sent", "memory"]
    if made.failures is not None:
        headings.append("useful")
        table.caption += f"\nuseful: share of useful work, if {made.failures}"
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row("one worker", *_cells(made.alone))
    for prediction in made.predictions[:_MOST_ROWS]:
        mark = "" if prediction.exact else "~"
        useful = [] if made.failures is None else [f"{prediction.goodput:.1%}"]
        table.add_row(StrategyCell(f"{mark}{prediction.strategy}"), *_cells(prediction), *useful)
    return table


def _scaling_table(made: Plan) -> Table:
    """Throughput by number of workers, each with the fastest strategy for it."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption = "speed-up: samples/s relative to one worker; efficiency: speed-up divided by workers"
    for heading in ("workers", "samples/s", "speed-up", "efficiency"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("strategy")
    for row in made.scaling.rows:
        numbers = f"{row.workers:,}", f"{row.samples_per_s:,.0f}", f"{row.speed_up:.3g}", f"{row.efficiency:.0%}"
        table.add_row(*numbers, StrategyCell(row.strategy))
    return table


def _cells(prediction: Prediction) -> list[str]:
    """The columns of one prediction."""
    return [
        format_time(prediction.step_s) + ("*" if prediction.simulated else ""),
        format_time(prediction.exposed_s),
        f"{prediction.efficiency:.0%}",
        f"{prediction.samples_per_s:,.0f}",
        format_size(round(prediction.bytes_per_step)),
        format_size(round(prediction.memory_bytes)),
    ]


def _show_layers(request: PlanRequest, planned: _Planned, console: Console) -> list[dict[str, Any]]:
    """Print how Poseidon would exchange each layer; return the same as JSON types."""
    decisions = layers.decisions(planned.profile, request.workers, planned.cluster)
    console.print(layers.layer_table(decisions, planned.profile, request.workers))
    return layers.as_dicts(decisions, request.workers)


def _show_meshes(request: PlanRequest, planned: _Planned, console: Console) -> dict[str, Any]:
    """Predict all meshes of the workers, and print them; return them as JSON types."""
    loaded = load_model(request.model, request.options, request.batch, request.input_shape)
    args = TrainingPass.from_batch(loaded.model, loaded.batch, loaded.loss).args
    parts = ModelParts(loaded.model, args if len(args) > 1 else args[0])
    # All meshes are compared for the same samples per step, or they would not be comparable.
    total = request.global_batch or request.workers * planned.profile.num_samples
    mesh_plan = plan_meshes(
        parts,
        planned.profile,
        request.workers,
        planned.cluster,
        total_samples=total,
        memory_bytes=request.memory_bytes,
    )
    mesh_output.show(mesh_plan, total, console)
    return mesh_plan.as_dict()


def _show_target_accuracy(request: PlanRequest, planned: _Planned, console: Console) -> list[dict[str, Any]]:
    """Train the plan's choice and some others in virtual time, and print when each reaches the target."""
    target = request.target_accuracy
    assert target is not None
    config = TrainingConfig(
        recipe=request.model,
        options=request.options,
        data=str(request.data) if request.data else None,
        epochs=request.epochs,
        batch_size=request.global_batch,
        until=target,
        lr="auto",  # Each strategy with the rate that it needs, or stale updates would lose by the recipe's.
    )
    with console.status("training in virtual time") as status:
        reaches = time_to_accuracy(planned.plan, planned.profile, planned.cluster, config, status.update)
    console.print(f"Time to a test accuracy of {target:.2%}, each with the learning rate of --lr auto", highlight=False)
    console.print(target_accuracy.table(reaches))
    epochs = request.epochs or recipe(request.model).epochs
    console.print(target_accuracy.recommendation(reaches, target, epochs), highlight=False)
    return [each.as_dict() for each in reaches]
