"""The command line: one module per command, one folder per command group.

How commands are loaded. Importing torch takes seconds, and `--help` must not. Therefore every module that defines a
command is light: at the top it imports only typer, rich and the parts of Tutti that do not import torch
(`tutti.errors`, `tutti.cluster`, the names in `tutti.recipes` and `tutti.bench.models`, `tutti.report.plots`). The
command function imports the rest when it runs, either directly or by importing the module that does the work, such as
`tutti.cli.plan.planning`. Types of the rest are imported under `TYPE_CHECKING` and quoted. The tests in
tests/commands/test_help_is_quick.py fail if the help of a command imports torch.
"""

import errno
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

import tutti
from tutti.cli import (
    bench,
    checkpoints,
    doctor,
    join,
    lab,
    plan,
    profile,
    reproduce,
    run,
    simulate,
    status,
    submit,
    train,
    workers,
)
from tutti.errors import TargetMissed, TuttiError, WorkerFailed
from tutti.versions import check_torch

app = typer.Typer(
    name="tutti",
    help="Train PyTorch models on many processes and machines, over any network.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    """Print the version and leave, before a missing command would be an error."""
    if wanted:
        print(f"tutti {tutti.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Train PyTorch models on many processes and machines, over any network."""
    if context.invoked_subcommand != "doctor":  # It reports the versions, whatever they are.
        check_torch()


# Without interspersed arguments: options after the script are the script's, and not those of `tutti run`.
_SCRIPT_LAST = {"allow_interspersed_args": False, "ignore_unknown_options": False}
app.command("run", context_settings=_SCRIPT_LAST)(run.run)
app.command("join", cls=join.AddressFirst, context_settings=_SCRIPT_LAST)(join.join)
app.command("train")(train.train)
app.command("profile")(profile.profile)
app.command("plan")(plan.plan)
app.command("doctor")(doctor.doctor)
app.command("status")(status.status)
app.command("checkpoints")(checkpoints.checkpoints)
app.command("reproduce")(reproduce.reproduce)
app.add_typer(simulate.app, name="simulate")
app.add_typer(bench.app, name="bench")
app.add_typer(lab.app, name="lab")
app.add_typer(submit.app, name="submit")
app.add_typer(workers.app, name="workers")


def main() -> None:
    """Run a command. An error becomes one message and an exit status.

    The status is 2, or that of the worker that failed, or 3 if training worked and missed the target accuracy.
    """
    with _unwinding_signals():
        _run()


@contextmanager
def _unwinding_signals() -> Iterator[None]:
    """Have SIGINT, SIGTERM and SIGUSR1 unwind the stack, so that supervisors and labs clean up.

    Python's own default for SIGTERM would end the process at once, and leave workers to the kernel.
    """
    before = {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:  # A program may call `main`, and then fork processes that would inherit the handlers.
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not set from Python.


def _run() -> None:
    """Run a command, and end with its exit status."""
    errors = Console(stderr=True, soft_wrap=True)
    try:
        app()
    # Plain print: the message holds a worker's traceback, which rich would wrap and colour.
    except WorkerFailed as error:
        print(f"error: {_with_notes(error)}", file=sys.stderr)
        sys.exit(error.status)
    except TuttiError as error:
        errors.print(f"[bold red]error:[/] {_escape(_with_notes(error))}", highlight=False)
        # A script can tell a run that trained and missed its target from one that could not train.
        sys.exit(3 if isinstance(error, TargetMissed) else 2)
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise  # Not about a file of the user's: a mistake of Tutti's, whose traceback helps.
        what = f"'{error.filename}'" if error.filename else "a file of this run"
        errors.print(
            f"[bold red]error:[/] cannot write or read {_escape(str(what))}: {error.strerror}.", highlight=False
        )
        sys.exit(2)
    except _Stopped as stopped:
        print("; ".join(["stopped", *_notes(stopped)]), file=sys.stderr)
        # As a shell reports a command that was ended by a signal.
        sys.exit(128 + stopped.signal_number)


def _escape(text: str) -> str:
    """Keep rich from reading square brackets as markup."""
    return text.replace("[", r"\[")


def _with_notes(error: TuttiError) -> str:
    """The message of an error, and what was added to it on its way up."""
    return "\n".join([str(error), *_notes(error)])


def _notes(error: BaseException) -> list[str]:
    """The notes of an error; none if it has not been given any."""
    return getattr(error, "__notes__", [])


class _Stopped(BaseException):
    """Ctrl-C, SIGTERM or SIGUSR1. It unwinds every context, so that workers are stopped and reaped."""

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.signal_number = signal_number


def _stop(number: int, frame: FrameType | None) -> None:
    """Handler of SIGINT, of SIGTERM, and of SIGUSR1, by which Slurm can announce a preemption."""
    raise _Stopped(number)
