"""`tutti workers`: more or fewer workers for a run of this machine."""

from datetime import timedelta
from typing import Annotated

import typer

from tutti.errors import ConfigError

app = typer.Typer(
    help="Add workers to a running job that was started with --workers MIN:MAX, or remove some.", no_args_is_help=True
)

_ANSWER_S = 10.0
"""How long to wait for the launcher of the run."""

Run = Annotated[
    int | None,
    typer.Option("--run", metavar="PID", help="Process id of the launcher. Default: the only run on this machine."),
]


@app.command("add")
def add(
    count: Annotated[int, typer.Argument(metavar="N", min=1, help="Number of workers to start.")] = 1,
    run: Run = None,
) -> None:
    """Start more workers, which join the others while training goes on.

    Example: tutti workers add 2
    """
    _ask(run, "add", count)


@app.command("remove")
def remove(
    rank: Annotated[int, typer.Argument(min=0, help="Rank of the worker, as `tutti status` shows it.")],
    run: Run = None,
) -> None:
    """Let a worker leave between two steps. The others continue training without it.

    Example: tutti workers remove 3
    """
    _ask(run, "remove", rank)


def _ask(pid: int | None, action: str, number: int) -> None:
    """Ask the launcher of a run for a change, and print what it answers."""
    from tutti.cli.status import choose_run
    from tutti.coordination import MemberDescription, Secret
    from tutti.coordination.link import Endpoint, connect_member
    from tutti.launch.run_registry import running

    chosen = choose_run(running(), pid, f"tutti workers {action} --run")
    observer = MemberDescription.this_process(-1, "observer", "observer")
    secret, limit = Secret(chosen.secret, encrypt=chosen.encrypt), timedelta(seconds=_ANSWER_S)
    member = connect_member(observer, Endpoint(chosen.address, chosen.port), secret, timeout=limit)
    try:
        answer = member.request({"op": "manage", "action": action, "number": number}, _ANSWER_S)
    finally:
        member.close()
    if answer is None:
        raise ConfigError(f"the launcher has not answered for {_ANSWER_S:g} s: its process is stopped, or has ended.")
    done, text = answer
    if not done:
        raise ConfigError(f"{text}.")
    typer.echo(text)
