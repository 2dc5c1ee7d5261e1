"""`tutti train --resume`: the configuration of a run, from its newest complete checkpoint. Imports torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from tutti.checkpoint.index import INDEX, newest_complete, read_index
from tutti.cli.options import is_given, refuse_given
from tutti.errors import CheckpointError, ConfigError
from tutti.recipes import recipe
from tutti.recipes.training import TrainingConfig

_FIXED = ("option", "seed", "lr", "name", "check")
"""Options that a run cannot change when it is continued."""


def resumed(
    requested: TrainingConfig, workers: int, run: Path | None, context: typer.Context
) -> tuple[TrainingConfig, int]:
    """Return the configuration of a saved run, with what the command line changes, and the number of workers.

    Without a `run` to continue, it is what was requested.
    """
    if run is None:
        if not requested.recipe:
            raise ConfigError("name a recipe to train, such as digits, or continue a run with --resume RUN.")
        return requested, workers
    refuse_given(context, _FIXED, "cannot be changed when a run is continued: leave it out, or start a new run.")
    folder = newest_complete(run)
    if folder is None:
        here = f" It is a checkpoint itself: give {run.resolve().parent}." if (run / INDEX).exists() else ""
        missing = "holds no checkpoint" if run.exists() else "does not exist"
        raise CheckpointError(f"{run} {missing}. Give the folder of a run, such as runs/digits-2x.{here}")
    index = read_index(folder)
    saved = _saved_config(index.state_tree, folder)
    if requested.recipe and requested.recipe != saved.recipe:
        raise ConfigError(f"{run} is a run of {saved.recipe}, not of {requested.recipe}: leave the recipe out.")
    given = {name for name in context.params if is_given(context, name)}
    changed: dict[str, Any] = {
        name: getattr(requested, name) for name in ("strategy", "epochs", "data", "checkpoint_every") if name in given
    }
    if requested.data is not None:
        changed["data"] = requested.data  # It may come from the environment.
    config = replace(saved, **changed)
    _refuse_complete(run, config, index.state_tree)
    return config, workers if "workers" in given else index.world_size


def _refuse_complete(run: Path, config: TrainingConfig, tree: Any) -> None:
    """Raise if all epochs are trained: the record of the run would be replaced by one of nothing."""
    epochs = config.epochs or recipe(config.recipe, **config.options).epochs
    done = min(epoch for epoch, _ in tree["parts"]["ShardedLoader"]["positions"])
    if done >= epochs:
        raise ConfigError(f"{run} is complete: {done} epochs are trained. Give --epochs with a larger number for more.")


def _saved_config(tree: Any, folder: Path) -> TrainingConfig:
    try:
        return TrainingConfig(**tree["extra"]["config"])
    except (KeyError, TypeError):
        raise CheckpointError(
            f"{folder} was not written by tutti train: it has no configuration. Continue it with the script that wrote "
            "it, which calls job.restore."
        ) from None
