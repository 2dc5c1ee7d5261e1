"""`tutti checkpoints`: the checkpoints of a run, their verification, and the export of a model."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tutti.cluster import format_size
from tutti.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from tutti.checkpoint.index import CheckpointInfo


def checkpoints(
    run: Annotated[Path, typer.Argument(help="Folder of the run, which holds folders such as step-00000100.")],
    check: Annotated[
        bool,
        typer.Option("--verify", metavar="", help="Read all files and compare their checksums with the index."),
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Export the model of the newest complete checkpoint to a safetensors file."),
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="With --to: export the checkpoint of this step instead.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", metavar="", help="With --to: replace the file if it exists.")
    ] = False,
) -> None:
    """List the checkpoints of a run, verify them, or export a model.

    The exit status is 1 if --verify finds a damaged checkpoint.

    Example: tutti checkpoints runs/mnist --to model.safetensors
    """
    if to is None and (step is not None or overwrite):
        raise ConfigError("--step and --overwrite are for the export of a model: give --to FILE too.")
    if to is not None and check:
        raise ConfigError("--verify and --to exclude each other: an export verifies the checkpoint that it takes.")
    found = _found(run)
    if to is not None:
        _export(_chosen(run, found, step), to, overwrite)
        return
    if check:
        found = [_verified(info) for info in found]
    console = Console()
    console.print(_table(found))
    damaged = [info for info in found if info.problem is not None]
    for info in damaged:
        console.print(f"step {info.steps}: {escape(info.problem or '')}", highlight=False, soft_wrap=True)
    if check and damaged:
        raise typer.Exit(1)


def _found(run: Path) -> "list[CheckpointInfo]":
    """The checkpoints of a run; an error if there are none."""
    from tutti.checkpoint.index import INDEX, checkpoints

    found = checkpoints(run)
    if not found:
        here = f" It is a checkpoint itself: give {run.resolve().parent}." if (run / INDEX).exists() else ""
        raise CheckpointError(f"{run} holds no checkpoints: there is no folder such as step-00000100 in it.{here}")
    return found


def _verified(info: "CheckpointInfo") -> "CheckpointInfo":
    """The same with all problems that reading every file shows."""
    from dataclasses import replace

    from tutti.checkpoint.index import verify

    return info if info.problem else replace(info, problem="; ".join(verify(info.folder)) or None)


def _table(found: "list[CheckpointInfo]") -> Table:
    table = Table("step", "time", "size", "strategy", "workers", "state")
    for info in found:
        state = "complete" if info.problem is None else "[red]damaged[/]"
        if info.index is None:
            table.add_row(str(info.steps), "", "", "", "", state)
            continue
        written = info.index.time.replace("T", " ").replace("+00:00", " UTC")
        strategy, workers = escape(info.index.strategy), str(info.index.world_size)
        table.add_row(str(info.steps), written, format_size(info.size), strategy, workers, state)
    return table


def _chosen(run: Path, found: "list[CheckpointInfo]", step: int | None) -> Path:
    """The folder of the checkpoint to export, every file of which is as it was written."""
    from tutti.checkpoint.index import newest_complete, verify

    if step is None:
        folder = newest_complete(run)
        if folder is None:
            raise CheckpointError(f"the checkpoints of {run} were deleted meanwhile. Start the command again.")
        return folder
    chosen = next((info for info in found if info.steps == step), None)
    if chosen is None:
        known = ", ".join(str(info.steps) for info in found)
        raise CheckpointError(f"{run} holds no checkpoint of step {step}. Known: {known}.")
    if problems := verify(chosen.folder):
        raise CheckpointError(f"the checkpoint of step {step} is damaged: {'; '.join(problems)}. Choose another step.")
    return chosen.folder


def _export(folder: Path, to: Path, overwrite: bool) -> None:
    """Copy the model of a checkpoint to a file, which appears only when it is complete."""
    from tutti.checkpoint.durable import explained_errors
    from tutti.checkpoint.index import MODEL

    if to.is_dir():
        raise ConfigError(f"--to needs the name of a file, and {to} is a folder. Give {to / MODEL}.")
    if to.exists() and not overwrite:
        raise ConfigError(f"{to} exists already. Give another file, or --overwrite to replace it.")
    beside = to.with_name(f".{to.name}.new")
    with explained_errors(f"write {to}"):
        try:
            _copy_model(folder, beside)
            beside.replace(to)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    typer.echo(f"exported the model of {folder} to {to} ({format_size(to.stat().st_size)})")


def _copy_model(folder: Path, to: Path) -> None:
    """Copy the model of a checkpoint as it is, or put it together from the parts that several ranks have written."""
    from tutti.checkpoint.index import MODEL, read_index

    if read_index(folder).parts == 1:
        shutil.copyfile(folder / MODEL, to)
    else:
        from tutti.checkpoint.storage import write_model  # Imports torch.

        write_model(folder, to)
