"""The command line: one module per command."""

import signal
import sys
from types import FrameType

import typer
from rich.console import Console

from tutti.cli import bench, doctor, lab, plan, profile, reproduce, run, simulate, train
from tutti.errors import TuttiError, WorkerFailed

app = typer.Typer(
    name="tutti",
    help="Train PyTorch models on many processes and machines, over any network.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})(run.run)
app.command("train")(train.train)
app.command("profile")(profile.profile)
app.command("plan")(plan.planned)
app.command("doctor")(doctor.doctor)
app.command("reproduce")(reproduce.reproduce)
app.add_typer(simulate.app, name="simulate")
app.add_typer(bench.app, name="bench")
app.add_typer(lab.app, name="lab")


def main() -> None:
    """Run a command; errors become one message and an exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    errors = Console(stderr=True, soft_wrap=True)
    try:
        app()
    except WorkerFailed as error:
        print(f"error: {_whole(error)}", file=sys.stderr)
        sys.exit(error.status)
    except TuttiError as error:
        errors.print(f"[bold red]error:[/] {_plain(_whole(error))}", highlight=False)
        sys.exit(2)
    except _Stopped as stopped:
        print("; ".join(["stopped", *_notes(stopped)]), file=sys.stderr)
        sys.exit(130)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _whole(error: TuttiError) -> str:
    return "\n".join([str(error), *_notes(error)])


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


class _Stopped(BaseException):
    """Ctrl-C or SIGTERM: unwinds everything, so that workers are stopped and reaped."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped
