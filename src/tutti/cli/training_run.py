"""Checks before a run, its summary, and the verdict on its accuracy: shared by `tutti train` and `tutti simulate`.

This module imports torch; commands import it when they run.
"""

from collections.abc import Callable
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tutti.data import GlobalBatches
from tutti.errors import ConfigError, TargetMissed, TuttiError, UnknownName
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
    # One worker trains without exchange, so that no number of ranks is wrong for it.
    if workers > 1:
        strategy.check_size(workers + strategy.num_dedicated_servers)
    if workers < 1:
        raise ConfigError(f"workers must be 1 or more, got {workers}.")
    splits = made.data(Path(config.data) if config.data else None)
    # Made only for its checks: a batch that cannot be divided among the workers is refused here, before they start.
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
        **{"lr_option": config.lr, "torch": torch.__version__, **result.as_dict()},
    }


def result_with_accuracy(results: list[TrainingResult | None]) -> TrainingResult:
    """The result of the rank that measured the accuracy. Servers and lost ranks have none."""
    # Ranks that did not evaluate have NaN as accuracy.
    known = [result for result in results if result is not None and not isnan(result.accuracy)]
    if not known:
        raise TuttiError("all ranks that measured the accuracy were lost, so the run has no result.")
    return known[0]


def warn_of_rate(config: TrainingConfig, workers: int) -> None:
    """Print a warning if the recipe's learning rate is used and is known not to fit the strategy."""
    rule = parse(config.strategy).learning_rate(workers)
    if config.lr is None and rule.factor != 1:
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(f"[yellow]warning:[/] {rule.reason} This run keeps the recipe's rate; --lr auto changes it.")


def check_target(summary: dict[str, Any], made: Recipe, again: Callable[..., str]) -> None:
    """Raise if a run of the recipe's number of epochs or more missed its target accuracy, and say what to try.

    Args:
        again: returns the command line of the run, with the given words after it.
    """
    # A shorter run is not expected to get there, and is no failure.
    if summary["epochs"] < made.epochs or summary["accuracy"] >= made.target:
        return
    rule = parse(summary["strategy"]).learning_rate(summary["workers"])
    option, reason = summary["lr_option"], ""
    if option == "auto" or (option is None and rule.factor == 1):
        # `again` leaves `--lr` out, and a rate that was asked for has to be asked for again.
        kept = () if option is None else ("--lr", option)
        longer = again(*kept, "--epochs", str(2 * summary["epochs"]))
        # A rate of the user's own comes with the recipe's momentum, so that half of one that was chosen together with
        # a lower momentum may be more than before.
        advice = (
            f"Try half the learning rate: {again('--lr', format(summary['lr'] / 2, '.2g'))}\nor train for longer: "
            if rule.momentum_factor == 1
            else "Train for longer: "
        ) + longer
    else:
        reason = f"{rule.reason} " if rule.reason else ""
        advice = f"Try: {again(*(() if rule.factor == 1 else ('--lr', 'auto')))}"
    raise TargetMissed(
        f"test accuracy {summary['accuracy']:.2%} is below the recipe's target of {made.target:.0%}. {reason}{advice}"
    )
