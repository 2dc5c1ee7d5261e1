"""Options and arguments that several commands share, and the parsing of their texts.

Nothing here imports torch, so that `--help` of every command is quick.
"""

import json
import shlex
from collections.abc import Collection
from math import inf, nan
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tutti.cluster import PRESETS
from tutti.errors import ConfigError
from tutti.recipes import RECIPES

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the results to this file as JSON.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Draw a figure into this .png or .svg file.")]
NumRounds = Annotated[
    int,
    typer.Option("--rounds", min=1, help="Repetitions, interleaved with the other candidates; the median is reported."),
]
LabText = Annotated[
    str | None,
    typer.Option(
        "--lab",
        metavar="SPEC",
        help="Run on emulated hosts with shaped links, such as hosts=4,rate=100mbit. Needs root; see `tutti lab`.",
    ),
]
StrategyText = Annotated[
    str, typer.Option("--strategy", help="Synchronisation strategy, such as ring, onebit or ps:ssp=3.")
]
DataFolder = Annotated[
    Path | None, typer.Option("--data", envvar="TUTTI_DATA", help="Folder that contains the datasets.")
]
Epochs = Annotated[
    int | None,
    typer.Option("--epochs", min=1, help="Number of passes over the training data. Default: the recipe's."),
]
RecipeOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="Option of the recipe or factory, such as second_hidden=800. Can be given several times.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the initial parameters and of the shuffling.")]
LearningRateText = Annotated[
    str | None,
    typer.Option(
        "--lr",
        metavar="RATE|auto",
        help="Learning rate. `auto` changes the recipe's by the strategy's rule. Default: the recipe's.",
    ),
]
CheckpointEvery = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-every",
        metavar="STEPS|DURATION",
        help="How often workers save all state of the run: a number of steps, or 30s, 5m, 1h.",
    ),
]
Grace = Annotated[
    str | None,
    typer.Option(
        "--grace",
        metavar="DURATION",
        help="Time that workers get to write a last checkpoint when the run is stopped by Ctrl-C, SIGTERM or SIGUSR1. "
        "Default: 30s.",
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="RUN",
        help="Continue the run in this folder, such as runs/mnist, from its newest complete checkpoint. Recipe and "
        "options are those of the run, but for --workers, --strategy, --epochs and --data.",
    ),
]
RunName = Annotated[str | None, typer.Option("--name", help="Name of the run's folder under runs/.")]
RecipeText = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|MODULE:FACTORY",
        help=f"Recipe to train: {', '.join(RECIPES)}, or a function that returns a tutti.recipes.Recipe.",
    ),
]
ModelText = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|MODULE:FACTORY",
        help=f"Model: a recipe ({', '.join(RECIPES)}), or a function that returns a model, or a model and a batch.",
    ),
]
InputShape = Annotated[
    str | None,
    typer.Option(
        "--input",
        metavar="SHAPE",
        help="Shape of one sample, such as 3x224x224. Needed if the factory returns no batch.",
    ),
]
ClusterText = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="NAME|FILE",
        help=f"Cluster: {', '.join(PRESETS)}, or a TOML file. `tutti simulate clusters` describes them.",
    ),
]


def parse_recipe_options(texts: list[str] | None) -> dict[str, Any]:
    """Parse the `--option` texts, such as second_hidden=800. Values are JSON."""
    # JSON, because options have types: 800 is a number and "800" a text, and a recipe should not have to guess.
    pairs = [text.partition("=") for text in texts or []]
    try:
        return {key: json.loads(value) for key, _, value in pairs}
    except json.JSONDecodeError:
        raise ConfigError(
            f"--option takes NAME=VALUE, got {', '.join(texts or [])}. VALUE is JSON: 800, 0.5, true or '\"text\"'."
        ) from None


def checked_every(text: str) -> str:
    """Return the `--checkpoint-every` text, which must be a number of steps or a duration."""
    from tutti.checkpoint.interval import parse_every

    parse_every(text, "--checkpoint-every")
    return text.strip()


def parse_lr(text: str | None) -> 'float | Literal["auto"] | None':
    """Parse the `--lr` text: a rate above 0, or "auto"."""
    if text is None or text == "auto":
        return text  # type: ignore[return-value]
    try:
        rate = float(text)
    except ValueError:
        rate = nan
    if not 0 < rate < inf:
        raise ConfigError(f"--lr takes a number above 0 such as 0.05, or auto; got '{text}'.")
    return rate


def given_again(context: typer.Context, *more: str) -> str:
    """Return the command line of `context`, without its output files and `--lr`, followed by `more`."""
    words = context.command_path.split()
    for parameter in context.command.params:
        # `--lr` is left out because the advice in which this appears gives another one.
        if not is_given(context, parameter.name or "") or parameter.name in ("name", "json_file", "lr"):
            continue
        value = context.params[parameter.name or ""]
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [parameter.opts[0]] if parameter.param_type_name == "option" else []
            # A flag has no value: its name says all.
            words += [] if each is True else [str(each)]
    return shlex.join([*words, *more])


def is_given(context: typer.Context, name: str) -> bool:
    """Whether a parameter is on the command line. Defaults and environment variables do not count."""
    source = context.get_parameter_source(name)
    # Compared by name: typer may use click's enumeration or a copy of its own.
    return source is not None and source.name == "COMMANDLINE"


def refuse_given(context: typer.Context, names: Collection[str], reason: str) -> None:
    """Refuse options that would change nothing, if they are on the command line.

    Args:
        names: of the command's parameters. Defaults and environment variables do not count as given.
        reason: the end of the message, after the names of the options.
    """
    given = [name for name in names if is_given(context, name)]
    if given:
        options = {parameter.name: parameter.opts[0] for parameter in context.command.params}
        raise ConfigError(f"{', '.join(options[name] for name in given)} {reason}")


def split_list(text: str) -> list[str]:
    """The items of a comma-separated list, without blanks, empty items and repetitions."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def parse_worker_counts(text: str, least: int, example: str) -> list[int]:
    """The numbers of a comma-separated `--workers` option; each must be `least` or more."""
    try:
        # All mistakes lead to one message, with what was given and an example.
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise ConfigError(
            f"--workers takes numbers of {least} or more with commas between, such as {example}; got '{text}'."
        )
    return numbers
