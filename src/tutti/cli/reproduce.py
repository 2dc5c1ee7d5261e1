"""`tutti reproduce`: an experiment of a paper, done again, with a report."""

import shutil
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tutti.cli.run_folder import new_folder
from tutti.errors import UnknownName
from tutti.experiments import EXPERIMENTS, Setting
from tutti.launch.lab.lab import LabSpec
from tutti.report.plots import check_plot


def reproduce(
    experiment: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(EXPERIMENTS)}.")],
    quick: Annotated[bool, typer.Option("--quick", help="A small form, of a minute or two.")] = False,
    rate: Annotated[str, typer.Option(help="Of the lab's links.")] = "100mbit",
    data: Annotated[Path | None, typer.Option(envvar="TUTTI_DATA", help="Folder with datasets.")] = None,
    name: Annotated[str | None, typer.Option(help="The run's folder under runs/.")] = None,
) -> None:
    """Do the experiment NAME again: figures, numbers and a report in a folder under runs/."""
    if experiment not in EXPERIMENTS:
        raise UnknownName("experiment", experiment, EXPERIMENTS)
    LabSpec.parse(f"rate={rate}")  # A rate that cannot be is better said now than by the lab.
    check_plot(Path("figure.png"))
    folder = new_folder(name, experiment)
    console = Console()
    with console.status("starting") as status:

        def say(line: str) -> None:
            status.update(line)
            console.print(f"{time.strftime('%H:%M:%S')} {line}")

        try:
            EXPERIMENTS[experiment](Setting(folder=folder, data=data, quick=quick, rate=rate, say=say))
        except BaseException:
            shutil.rmtree(folder)  # Half a report would only mislead.
            raise
    console.print(f"reported in {folder / 'report.md'}")
