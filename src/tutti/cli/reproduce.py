"""`tutti reproduce`: run the reproduction of a published experiment, from a source checkout."""

import importlib
import os
import shutil
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

import tutti
from tutti.cli.run_folder import new_folder
from tutti.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from reproductions import Reproduction

_NOT_HERE = (
    "reproductions are part of the source checkout, which was found neither in the working directory and its parents "
    "nor beside the installed package. Get it with git clone and run `tutti reproduce` in it."
)
_MEASURING = ("quick", "rate", "data")
"""Options that say what to measure: useless where nothing is measured."""


def reproduce(
    context: typer.Context,
    reproduction: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of the reproduction; without it, all are listed.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", metavar="", help="Run a small form that takes a minute or two.")
    ] = False,
    report_only: Annotated[
        bool,
        typer.Option(
            "--report-only",
            metavar="",
            help="Rewrite report and figures from stored results: those of runs/<--name>, or the committed ones.",
        ),
    ] = False,
    rate: Annotated[str, typer.Option(help="Rate of the lab's links; only for allreduce-mnist.")] = "100mbit",
    data: Annotated[Path | None, typer.Option(envvar="TUTTI_DATA", help="Folder with the datasets.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run's folder under runs/.")] = None,
) -> None:
    """Reproduce a published experiment: results, figures and a report in a folder under runs/."""
    with _importable(find_checkout()):
        known: dict[str, Reproduction] = importlib.import_module("reproductions").REPRODUCTIONS
        # The list of reproductions is in the checkout, so that options can only be judged once it is imported.
        given = _given_options(context)
        if reproduction is None:
            if given:
                raise ConfigError(f"{_listed(given)} needs the NAME of a reproduction: {', '.join(known)}.")
            _print_list(known)
            return
        if reproduction not in known:
            raise UnknownName("reproduction", reproduction, known)
        _check_options(reproduction, known[reproduction], given)
        if report_only:
            _rewrite_report(known[reproduction], name)
            return
        _run(reproduction, known[reproduction], name, quick=quick, rate=rate, data=data)


def find_checkout() -> Path:
    """Return the root of the source checkout; raise `ConfigError` where there is none.

    It is the checkout that this package is imported from, or one that contains the working directory.
    """
    # src/tutti/__init__.py in a checkout that is installed in editable mode, or is on the path.
    source = Path(tutti.__file__).resolve().parents[2]
    for folder in (source, Path.cwd(), *Path.cwd().parents):
        if (folder / "reproductions" / "__init__.py").is_file() and _is_checkout(folder):
            return folder
    raise ConfigError(_NOT_HERE)


def _is_checkout(folder: Path) -> bool:
    """Return whether the folder's `pyproject.toml` is Tutti's: other projects may have a folder of that name too."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text())
    except (OSError, ValueError):
        return False
    return project.get("project", {}).get("name") == "tutti-train"


@contextmanager
def _importable(root: Path) -> Iterator[None]:
    """Put the checkout on the module search path of this process and of those it starts.

    Workers of `tutti.launch` receive `sys.path` itself; ranks under mpirun only inherit `PYTHONPATH`.
    """
    before = os.environ.get("PYTHONPATH")
    # In front, so that no installed package of the same name is found first.
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = str(root) if not before else f"{root}{os.pathsep}{before}"
    try:
        yield
    finally:
        sys.path.remove(str(root))
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _given_options(context: typer.Context) -> list[str]:
    """Return the names of the options on the command line; defaults and environment variables do not count."""
    parameters = [name for name in context.params if name != "reproduction"]
    sources = {name: context.get_parameter_source(name) for name in parameters}
    # By name: typer may use click's enumeration or a copy of its own.
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def _check_options(name: str, entry: "Reproduction", given: list[str]) -> None:
    """Refuse every option that would change nothing."""
    if "report_only" in given:
        unused = [option for option in given if option in _MEASURING]
        if unused:
            raise ConfigError(f"{_listed(unused)} has no effect with --report-only, which measures nothing.")
    unused = [option for option in given if option in ("rate", "data") and option not in entry.options]
    if unused:
        raise ConfigError(f"the reproduction '{name}' does not use {_listed(unused)}. Leave it out.")


def _listed(options: list[str]) -> str:
    """Names of parameters as the options of the command line."""
    return " and ".join(f"--{option.replace('_', '-')}" for option in options)


def _print_list(known: "dict[str, Reproduction]") -> None:
    """Print all reproductions, one to a line."""
    width = max(map(len, known))
    for name, entry in known.items():
        print(f"{name:{width}}  {entry.summary} ({entry.source})")


def _run(name: str, entry: "Reproduction", run_name: str | None, *, quick: bool, rate: str, data: Path | None) -> None:
    """Measure, and write results, figures and report into a new folder."""
    from tutti.launch.lab.lab import LabSpec
    from tutti.report.plots import check_plot

    # Both take milliseconds here; a reproduction runs for minutes or hours before it would find out.
    LabSpec.parse(f"rate={rate}")  # An invalid rate or a missing matplotlib must be reported before the measurements.
    check_plot(Path("figure.png"))
    folder = new_folder(run_name, name)
    console = Console()
    with console.status("starting") as status:

        def progress(line: str) -> None:
            status.update(line)
            console.print(f"{time.strftime('%H:%M:%S')} {line}")

        module = _import(entry.run_module)
        settings = _import("reproductions.context").ReproductionContext(
            folder=folder, data=data if "data" in entry.options else None, quick=quick, rate=rate, progress=progress
        )
        try:
            module.reproduce(settings)
        except BaseException:
            shutil.rmtree(folder)  # An incomplete report would mislead.
            raise
    console.print(f"report: {folder / 'report.md'}")


def _rewrite_report(entry: "Reproduction", run_name: str | None) -> None:
    """Write report and figures again from `results.json` in the folder of a run, or of the reproduction itself."""
    from tutti.report.plots import check_plot

    check_plot(Path("figure.png"))
    folder = entry.stored_folder if run_name is None else Path("runs") / run_name
    if not (folder / "results.json").is_file():
        raise ConfigError(
            f"there are no stored results in {folder}: expected results.json, as `tutti reproduce` writes."
        )
    _import(entry.report_module).report_only(folder)
    print(f"report: {folder / 'report.md'}")


def _import(module: str) -> ModuleType:
    """Import a module of the checkout, which is on the path only while the command runs."""
    return importlib.import_module(module)
