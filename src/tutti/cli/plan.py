"""`tutti plan`: what every strategy would cost, which to use, and whether to use any."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tutti.cli import mesh_plan, per_layer, target_accuracy
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.recipe_task import DataFolder, Epochs, Options, parse_options
from tutti.cli.subject import find_subject
from tutti.cluster import PRESETS, Cluster, Link, format_size, format_time
from tutti.cost.placement import restricted_to
from tutti.errors import ConfigError, UnknownName
from tutti.launch import init, launch
from tutti.plan import Plan, Prediction, Profile, plan
from tutti.plan.mesh import Parts, plan_meshes
from tutti.plan.network import measure_network
from tutti.plan.profile import profile as profile_model
from tutti.plan.profile.problem import Problem
from tutti.plan.scaling import Profiles, share_of, sharing_cores, worker_profile
from tutti.recipes import RECIPES, recipe
from tutti.recipes.training import GlobalBatches, TrainingConfig
from tutti.simulation.runs.dry_run import dry_run
from tutti.simulation.runs.time_to_accuracy import time_to_accuracy
from tutti.strategies import Strategy

MEASURED = "measured"

ALLOWED = ("lossy",)

_MOST_ROWS = 20
_MOST_SIMULATED_RANKS = 32
"""More send too many messages to wait for."""
_MEASURED_RANKS = 2


def planned(
    subject: Annotated[
        str,
        typer.Argument(metavar="RECIPE|MODULE:FACTORY", help=f"What to train: {', '.join(RECIPES)}, or a function."),
    ],
    workers: Annotated[int, typer.Option("--workers", "-n", help="That train; servers come to them.")] = 16,
    cluster_text: Annotated[
        str,
        typer.Option(
            "--cluster",
            metavar="NAME|FILE",
            help=f"{', '.join(PRESETS)}, a TOML file, or '{MEASURED}': processes on this machine.",
        ),
    ] = "ethernet-1g",
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", metavar="lossy", help="Also what does not do exactly what one worker would."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Samples of each worker; the recipe's batch by default.")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", min=1, help="Samples of all workers together, instead.")
    ] = None,
    input_shape: Annotated[
        str | None,
        typer.Option("--input", metavar="SHAPE", help="Of a sample, such as 3x224x224, for a factory without a batch."),
    ] = None,
    option: Options = None,
    target: Annotated[
        float | None,
        typer.Option(
            "--target-accuracy",
            metavar="FRACTION",
            help="Also how long until a recipe is so accurate, such as 0.97: it is trained, in virtual time.",
        ),
    ] = None,
    epochs: Epochs = None,
    data: DataFolder = None,
    layers: Annotated[bool, typer.Option("--per-layer", help="Also how poseidon would exchange each layer.")] = False,
    meshes: Annotated[
        bool, typer.Option("--meshes", help="Also whether to split layers, or the sequence of them, over workers.")
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="Of a worker, such as 16GiB: meshes must fit. Implies --meshes."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the plan here.")] = None,
) -> None:
    """Measure a step here, price every strategy for it on a cluster, and say which to use, or that none pays.

    Computing takes as long as on this machine, divided by the speed of the cluster's hosts.
    """
    check_writable(json_file)
    lossy = _allowed(allow)
    if batch is not None and global_batch is not None:
        raise ConfigError("give --batch or --global-batch, not both: the one divides by the workers to the other.")
    if workers < 1:
        raise ConfigError(f"workers must be 1 or more, got {workers}.")
    if target is not None:
        asked = workers * batch if batch is not None else global_batch
        global_batch = _batch_of_training(subject, parse_options(option), target, asked, workers, data)
    elif epochs is not None:
        raise ConfigError("--epochs is how long to train for --target-accuracy, which was not given.")
    batch = share_of(global_batch, workers) if batch is None and global_batch is not None else batch
    limit = mesh_plan.memory_limit(memory)
    console = Console()
    with console.status("measuring links") as status:
        cluster = _measured() if cluster_text == MEASURED else Cluster.load(cluster_text)
        cluster = restricted_to(cluster, workers)
        cluster.place(workers)
        status.update(f"measuring a step of {subject}")
        profiled = partial(profile_of, subject, parse_options(option), batch, input_shape)
        profile = _sharing_here(profiled) if cluster_text == MEASURED else profiled()
        status.update("pricing")
        simulated = partial(_simulated, worker_profile(profile, workers, global_batch), workers, cluster, status.update)
        made = plan(
            profile,
            workers,
            cluster,
            allow_lossy=lossy,
            global_batch=global_batch,
            simulator=simulated if workers <= _MOST_SIMULATED_RANKS else None,
        )
    where = str(cluster).splitlines()[0]
    console.print(f"{subject}, {workers} workers of {made.best.num_samples} samples a step, {where}", highlight=False)
    _show(made, console)
    written = {"subject": subject, "cluster": cluster.to_toml(), **made.as_dict()}
    if layers:
        own = worker_profile(profile, workers, global_batch)
        found = per_layer.decisions(own, workers, cluster)
        console.print(per_layer.table_of(found, own, workers))
        written["layers"] = per_layer.as_dicts(found, workers)
    if meshes or limit is not None:
        own = worker_profile(profile, workers, global_batch)
        parts = _parts_of(subject, parse_options(option), batch, input_shape)
        total = global_batch or workers * own.num_samples
        arranged = plan_meshes(parts, own, workers, cluster, total_samples=total, memory_bytes=limit)
        mesh_plan.show(arranged, total, console)
        written["meshes"] = arranged.as_dict()
    if target is not None:
        task = TrainingConfig(
            recipe=subject, options=parse_options(option), data=str(data) if data else None, epochs=epochs,
            batch_size=global_batch, until=target,
        )  # fmt: skip
        with console.status("training") as status:
            reaches = time_to_accuracy(
                made, worker_profile(profile, workers, global_batch), cluster, task, status.update
            )
        console.print(target_accuracy.table_of(reaches, target))
        console.print(target_accuracy.in_words(reaches, target, epochs or recipe(subject).epochs), highlight=False)
        written["reaches"] = [each.as_dict() for each in reaches]
    write_json(json_file, written)


def _batch_of_training(
    subject: str, options: dict[str, Any], target: float, batch: int | None, workers: int, data: Path | None
) -> int:
    """Samples of all workers together, the recipe's if none are asked for; what cannot be trained is refused now."""
    if not 0 < target <= 1:
        raise ConfigError(f"--target-accuracy is a fraction such as 0.97, got {target:g}.")
    if ":" in subject:
        raise ConfigError("--target-accuracy needs data to train on, which a recipe has and a factory has not.")
    made = recipe(subject, **options)
    batch = batch or made.batch_size
    GlobalBatches(len(made.data(data).train), batch, workers, seed=0)
    return batch


def _allowed(words: list[str] | None) -> bool:
    for word in words or []:
        if word not in ALLOWED:
            raise UnknownName("thing to --allow", word, ALLOWED)
    return bool(words)


def measure_here() -> dict[str, Any]:
    """What each rank runs to measure the links between them."""
    return measure_network(init().transport)


def _measured() -> Cluster:
    """This machine, as a cluster of one host."""
    found = launch(measure_here, workers=_MEASURED_RANKS)[0]
    return Cluster(name=MEASURED, hosts=1, within=Link(*found["links"]["within"]))


def _sharing_here(measure: Callable[[], Profile]) -> Profiles:
    """Profiles of workers that share the cores of this machine."""
    whole, threads = measure(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        single = measure()
    finally:
        torch.set_num_threads(threads)
    return sharing_cores(single, whole, len(os.sched_getaffinity(0)))


def profile_of(subject: str, options: dict[str, Any], batch: int | None, input_shape: str | None) -> Profile:
    """A step of what `subject` names, measured here."""
    found = find_subject(subject, options, batch, input_shape)
    return profile_model(found.model, found.batch, loss=found.loss, optimizer=found.optimizer)


def _parts_of(subject: str, options: dict[str, Any], batch: int | None, input_shape: str | None) -> Parts:
    """What ranks of meshes would do of a step, tried out here."""
    found = find_subject(subject, options, batch, input_shape)
    args = Problem.of(found.model, found.batch, found.loss).args
    return Parts(found.model, args if len(args) > 1 else args[0])


def _simulated(profile: Profile, workers: int, cluster: Cluster, say: Any, strategy: Strategy) -> float:
    say(f"simulating {strategy}")
    return dry_run(strategy, profile, workers, cluster)


def _show(made: Plan, console: Console) -> None:
    console.print(_table(made))
    if (left := len(made.predictions) - _MOST_ROWS) > 0:
        console.print(f"and {left} slower ones; --json has them")
    for name, why in made.not_priced.items():
        console.print(f"not priced: {name} ({why})", highlight=False)
    console.print(made.reason, highlight=False)
    console.print(_scaling_table(made))
    console.print(made.scaling.reason, highlight=False)


def _table(made: Plan) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption = "~ not exact; * simulated; exposed: not hidden under computing; busy: computing; memory: about"
    table.add_column("", overflow="fold")
    for heading in ("step", "exposed", "busy", "samples/s", "sent", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row("one worker", *_numbers(made.alone))
    for prediction in made.predictions[:_MOST_ROWS]:
        mark = "" if prediction.exact else "~"
        table.add_row(f"{mark}{prediction.strategy}", *_numbers(prediction))
    return table


def _scaling_table(made: Plan) -> Table:
    """Throughput by number of workers, each with the fastest strategy for it."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption = "speed-up: samples/s relative to one worker; efficiency: speed-up divided by workers"
    for heading in ("workers", "samples/s", "speed-up", "efficiency"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("strategy", overflow="fold")
    for row in made.scaling.rows:
        numbers = f"{row.workers:,}", f"{row.samples_per_s:,.0f}", f"{row.speed_up:.3g}", f"{row.efficiency:.0%}"
        table.add_row(*numbers, row.strategy)
    return table


def _numbers(found: Prediction) -> list[str]:
    return [
        format_time(found.step_s) + ("*" if found.simulated else ""),
        format_time(found.exposed_s),
        f"{found.efficiency:.0%}",
        f"{found.samples_per_s:,.0f}",
        format_size(round(found.bytes_per_step)),
        format_size(round(found.memory_bytes)),
    ]
