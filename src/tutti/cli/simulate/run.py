"""The arguments of `tutti simulate RECIPE`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import (
    ClusterText,
    DataFolder,
    Epochs,
    JsonFile,
    LearningRateText,
    PlotFile,
    RecipeOptions,
    RunName,
    Seed,
    StrategyText,
    given_again,
    is_given,
    parse_lr,
    parse_recipe_options,
    refuse_given,
)
from tutti.cli.simulate.cluster_options import JitterSpread, Slow, load_cluster
from tutti.cluster import Cluster
from tutti.errors import ConfigError
from tutti.recipes import RECIPES

if TYPE_CHECKING:
    from tutti.recipes.training import TrainingConfig

_DEFAULT_WORKERS = 16

_TRAINING_OPTIONS = (
    "chaos", "cluster", "strategy", "slow", "jitter", "data", "epochs", "option", "seed", "lr", "name", "json_file",
    "mtbf", "repair", "plot",
)  # fmt: skip
"""Options that `--calibrate` does not use."""

_WITHOUT_TRAINING = (
    "chaos", "jitter", "data", "epochs", "option", "seed", "lr", "name", "calibration", "lab",
)  # fmt: skip
"""Options that `--mtbf` does not use."""

_Recipe = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE|MODULE:FACTORY",
        help=f"Recipe to train: {', '.join(RECIPES)}, or a function that returns a tutti.recipes.Recipe.",
    ),
]
_Workers = Annotated[
    str | None,
    typer.Option(
        "--workers",
        "-n",
        metavar="N|MIN:MAX",
        help="Number of training workers. Dedicated servers are added on top. With MIN:MAX, or failures (--chaos), "
        "workers come and go.",
        show_default=str(_DEFAULT_WORKERS),
    ),
]
_Chaos = Annotated[
    str | None,
    typer.Option(
        "--chaos",
        metavar="TEXT",
        help='Cause failures on purpose, in virtual time: "kill any every 20s; stop 2 for 3s at 10s; '
        'cut host 0 for 5s; join at 30s; leave 1 at 40s; seed 7".',
    ),
]
_Mtbf = Annotated[
    str | None,
    typer.Option(
        "--mtbf",
        metavar="DURATION",
        help="Train nothing: predict the share of useful work if a worker fails this often on average, such as 2h. "
        "--workers and --strategy may be lists with commas between.",
    ),
]
_Repair = Annotated[
    str | None,
    typer.Option(
        "--repair", metavar="DURATION", help="With --mtbf: time until a lost worker is replaced.", show_default="10m"
    ),
]
_CalibrationFile = Annotated[
    Path | None,
    typer.Option(
        "--calibrate",
        metavar="FILE",
        help="Measure this machine (or --lab) instead, and write a cluster that simulates it to this TOML file.",
    ),
]
_Lab = Annotated[
    str | None,
    typer.Option(metavar="SPEC", help="Emulated hosts to --calibrate on, such as hosts=4,rate=100mbit."),
]


def run(
    context: typer.Context,
    recipe: _Recipe = None,
    workers: _Workers = None,
    chaos: _Chaos = None,
    cluster: ClusterText = "ethernet-1g",
    strategy: StrategyText = "native",
    slow: Slow = None,
    jitter: JitterSpread = None,
    data: DataFolder = None,
    epochs: Epochs = None,
    option: RecipeOptions = None,
    seed: Seed = 0,
    lr: LearningRateText = None,
    name: RunName = None,
    json_file: JsonFile = None,
    calibration: _CalibrationFile = None,
    lab: _Lab = None,
    mtbf: _Mtbf = None,
    repair: _Repair = None,
    plot: PlotFile = None,
) -> None:
    """Train a recipe on a simulated cluster, with real gradients in virtual time, in one process.

    The model learns what it would learn on the cluster. The time is computed from the cluster's links and speeds.

    The same command always gives the same numbers. The run is recorded under runs/, with figures.

    Example: tutti simulate digits --workers 64 --cluster ethernet-1g --slow 3=2.0
    """
    # A calibration measures and trains nothing, so every option about training is refused, not ignored.
    if calibration is not None:
        refuse_given(context, _TRAINING_OPTIONS, "changes nothing with --calibrate, which trains nothing.")
        from tutti.cli.simulate.calibrate import calibrate

        calibrate(recipe or "mnist-mlp", calibration, _fixed_number(workers), lab)
        return
    if mtbf is None:
        refuse_given(context, ("repair", "plot"), "changes nothing without --mtbf.")
    elif recipe is not None:
        _predict_goodput(context, recipe, load_cluster(cluster, slow, None), (mtbf, repair or "10m"))
        return
    if recipe is None or lab is not None:
        wanted = "a RECIPE, such as digits" if recipe is None else "--lab only with --calibrate"
        raise ConfigError(f"tutti simulate takes {wanted}; see tutti simulate --help.")
    from tutti.recipes.training import TrainingConfig

    config = TrainingConfig(
        recipe=recipe,
        options=parse_recipe_options(option),
        strategy=strategy,
        data=str(data) if data else None,
        epochs=epochs,
        seed=seed,
        lr=parse_lr(lr),
    )
    _train(context, config, load_cluster(cluster, slow, jitter))


def _train(context: typer.Context, config: "TrainingConfig", cluster: Cluster) -> None:
    """Train in virtual time, with the command's other options."""
    from tutti.cli.simulate.training import simulate_training
    from tutti.launch.elastic_run import with_chaos

    options = context.params
    check_writable(options["json_file"])
    workers = _DEFAULT_WORKERS if options["workers"] is None else options["workers"]
    simulate_training(
        config,
        with_chaos(workers, options["chaos"]),
        cluster,
        options["name"],
        partial(given_again, context),
        lambda summary: write_json(options["json_file"], summary),
    )


def _predict_goodput(context: typer.Context, recipe: str, cluster: Cluster, rates: tuple[str, str]) -> None:
    """Predict the share of useful work under failures, with the command's other options."""
    refuse_given(context, _WITHOUT_TRAINING, "changes nothing with --mtbf, which trains nothing.")
    options = context.params
    check_writable(options["json_file"])
    from tutti.cli.simulate.goodput import goodput_curves

    strategies = options["strategy"] if is_given(context, "strategy") else None
    written = goodput_curves(recipe, options["workers"], strategies, cluster, rates, options["plot"])
    write_json(options["json_file"], written)


def _fixed_number(workers: str | None) -> int | None:
    """Return a number of workers that stays the same."""
    from tutti.launch.elastic_run import ElasticRun, parse_workers

    number = parse_workers(workers, "--workers")
    if isinstance(number, ElasticRun):
        raise ConfigError(f"--calibrate takes a fixed number of workers, got --workers {workers}.")
    return number
