"""Checks before a run, its summary, and the verdict on its accuracy: shared by `tutti train` and `tutti simulate`.

This module imports torch; commands import it when they run.
"""

from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import torch

from tutti.data import GlobalBatches
from tutti.errors import ConfigError, TuttiError, UnknownName
from tutti.recipes import OWN_RECIPE, Recipe, recipe
from tutti.recipes.training import TrainingConfig, TrainingResult
from tutti.strategies import parse


def prepare(config: TrainingConfig, workers: int) -> tuple[Recipe, TrainingConfig]:
    """Make the recipe, and refuse a configuration that cannot be trained before any worker is started.

    Returns the recipe, and the configuration with the canonical spelling of the strategy.
    """
    try:
        made = recipe(config.recipe, **config.options)
    except UnknownName as error:
        error.add_note(OWN_RECIPE)
        raise
    strategy = parse(config.strategy)
    if workers > 1:
        strategy.check_size(workers + strategy.num_dedicated_servers)
    if not 0 < config.lr_scale < float("inf"):
        raise ConfigError(f"--lr-scale must be a number above 0 such as 0.25, got {config.lr_scale}.")
    if workers < 1:
        raise ConfigError(f"workers must be 1 or more, got {workers}.")
    splits = made.data(Path(config.data) if config.data else None)
    GlobalBatches(len(splits.train), made.batch_size, workers, config.seed)
    return made, replace(config, strategy=str(strategy))


def num_ranks(config: TrainingConfig, workers: int) -> int:
    """Ranks to start: the workers, and the dedicated servers of the strategy if there is more than one worker."""
    return workers + (parse(config.strategy).num_dedicated_servers if workers > 1 else 0)


def summarise(config: TrainingConfig, made: Recipe, workers: int, result: TrainingResult) -> dict[str, Any]:
    """The contents of `summary.json`: the configuration and the result."""
    return {
        **{"recipe": config.recipe, "options": config.options, "strategy": config.strategy, "workers": workers},
        **{"seed": config.seed, "epochs": config.epochs or made.epochs, "double": config.double},
        **{"lr_scale": config.lr_scale, "torch": torch.__version__, **result.as_dict()},
    }


def result_with_accuracy(results: list[TrainingResult | None]) -> TrainingResult:
    """The result of the rank that measured the accuracy. Servers and lost ranks have none."""
    known = [result for result in results if result is not None and not isnan(result.accuracy)]
    if not known:
        raise TuttiError("all ranks that measured the accuracy were lost, so the run has no result.")
    return known[0]


def check_target(summary: dict[str, Any], made: Recipe) -> None:
    """Raise if a run with the recipe's own number of epochs and learning rate did not reach its target accuracy."""
    own_settings = summary["epochs"] >= made.epochs and summary["lr_scale"] == 1
    if own_settings and summary["accuracy"] < made.target:
        raise TuttiError(f"test accuracy {summary['accuracy']:.2%} is below the recipe's target of {made.target:.0%}.")
