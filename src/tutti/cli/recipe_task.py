"""What `tutti train` and `tutti simulate` ask about a recipe, and the task it makes."""

import json
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tutti.errors import ConfigError, TuttiError
from tutti.recipes import RECIPES, Recipe, recipe
from tutti.recipes.training import GlobalBatches, TrainingConfig, TrainingResult
from tutti.strategies import parse

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help=f"One of {', '.join(RECIPES)}.")]
StrategyText = Annotated[
    str, typer.Option("--strategy", help="How replicas stay together, such as ring, onebit or ps:ssp=3.")
]
DataFolder = Annotated[Path | None, typer.Option("--data", envvar="TUTTI_DATA", help="Folder with datasets.")]
Epochs = Annotated[
    int | None, typer.Option("--epochs", min=1, help="Passes over the data; the recipe's own by default.")
]
Options = Annotated[
    list[str] | None, typer.Option("--option", help="Of the recipe, such as second_hidden=800; repeatable.")
]
Seed = Annotated[int, typer.Option("--seed", help="Of the initial parameters and the shuffle.")]
LrScale = Annotated[
    float, typer.Option("--lr-scale", help="Times the recipe's learning rate; stale updates need a lower one.")
]
RunName = Annotated[str | None, typer.Option("--name", help="The run's folder under runs/.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the summary here.")]


def parse_options(texts: list[str] | None) -> dict[str, Any]:
    """The recipe's own options, from texts such as second_hidden=800."""
    pairs = [text.partition("=") for text in texts or []]
    try:
        return {key: json.loads(value) for key, _, value in pairs}
    except json.JSONDecodeError:
        raise ConfigError(f"--option takes NAME=NUMBER, got {', '.join(texts or [])}.") from None


def checked(task: TrainingConfig, workers: int) -> tuple[Recipe, TrainingConfig]:
    """The recipe, and the task with its strategy spelt out; what no worker could do is refused here, once."""
    made = recipe(task.recipe, **task.options)
    parsed = parse(task.strategy)
    if workers > 1:
        parsed.check_size(workers + parsed.num_dedicated_servers)
    strategy = str(parsed)
    if not 0 < task.lr_scale < float("inf"):
        raise ConfigError(f"--lr-scale must be a number above 0 such as 0.25, got {task.lr_scale}.")
    if workers < 1:
        raise ConfigError(f"workers must be 1 or more, got {workers}.")
    splits = made.data(Path(task.data) if task.data else None)
    GlobalBatches(len(splits.train), made.batch_size, workers, task.seed)
    return made, replace(task, recipe=made.name, strategy=strategy)


def summarise(task: TrainingConfig, made: Recipe, workers: int, outcome: TrainingResult) -> dict[str, Any]:
    """What was asked for, and what came of it."""
    return {
        **{"recipe": task.recipe, "options": task.options, "strategy": task.strategy, "workers": workers},
        **{"seed": task.seed, "epochs": task.epochs or made.epochs, "double": task.double, "lr_scale": task.lr_scale},
        **{"torch": torch.__version__, **outcome.as_dict()},
    }


def outcome_of(outcomes: list[TrainingResult | None]) -> TrainingResult:
    """What the rank found that knows the accuracy; servers and ranks that were lost have found nothing."""
    found = [each for each in outcomes if each is not None and not isnan(each.accuracy)]
    if not found:
        raise TuttiError("the ranks that knew how the run went have died, and their models with them.")
    return found[0]


def judge(summary: dict[str, Any], made: Recipe) -> None:
    """Raise if a whole run of a recipe did not reach its target."""
    own = summary["epochs"] >= made.epochs and summary["lr_scale"] == 1
    if own and summary["accuracy"] < made.target:
        raise TuttiError(
            f"test accuracy {summary['accuracy']:.2%} is below the target of {made.target:.0%} that "
            f"'{made.name}' reaches with its own settings."
        )
