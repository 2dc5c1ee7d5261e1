"""`tutti status`: what the ranks of a running job are doing."""

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tutti.errors import ConfigError

if TYPE_CHECKING:
    from tutti.coordination.link import ConnectedMember
    from tutti.launch.run_registry import RunningRun

_ANSWER_S = 5.0
"""How long to wait for the coordinator."""


def status(
    run: Annotated[
        int | None,
        typer.Argument(help="Process id of the launcher. Default: the only run of this user on this machine."),
    ] = None,
    stack: Annotated[int | None, typer.Option(metavar="RANK", help="Also print the Python stack of this rank.")] = None,
    json_output: Annotated[bool, typer.Option("--json", metavar="", help="Print the table as JSON.")] = False,
) -> None:
    """Show what each rank of a running job is doing, and which rank the others wait for.

    Example: tutti status --stack 2
    """
    from tutti.coordination.diagnosis import diagnose
    from tutti.launch.run_registry import running

    chosen = choose_run(running(), run)
    member = _observe(chosen)
    try:
        if stack is not None:
            member.ask_stack(stack)
        rows = _table(member, stack)
        if stack is not None and stack not in (ranks := [row["rank"] for row in rows]):
            raise ConfigError(f"--stack needs a rank of this run, got {stack}. Ranks: {', '.join(map(str, ranks))}.")
        for row in rows:
            if row["rank"] != stack:
                row["stack"] = ""  # Of an earlier question.
    finally:
        member.close()
    if json_output:
        typer.echo(_as_json(rows))
        return
    console = Console()
    console.print(f"run {chosen.pid}: {escape(chosen.command)}, {chosen.workers} workers", highlight=False)
    if not rows:
        console.print("no rank has reported yet: they are starting")
        return
    console.print(_as_table(rows))
    for each in diagnose(rows):
        console.print(escape(str(each)), highlight=False)
    if stack is not None:
        text = next((row["stack"] for row in rows if row["rank"] == stack), "")
        console.print(f"stack of rank {stack}:", highlight=False)
        typer.echo(text or "(none: it does not answer)")  # Not by rich, which would break its lines.


def choose_run(runs: "list[RunningRun]", pid: int | None, command: str = "tutti status") -> "RunningRun":
    """The run that the user means. `command` is what takes its process id, for the message."""
    known = "; ".join(f"{run.pid} ({run.command})" for run in runs)
    if pid is not None:
        found = [run for run in runs if run.pid == pid]
        if not found:
            raise ConfigError(f"there is no run with launcher {pid}. Known: {known or 'none'}.")
        return found[0]
    if not runs:
        raise ConfigError(
            "no run of this user is under way on this machine. Runs that tutti run, tutti train or tutti.launch "
            "started are shown on the machine of their launcher; in others, call job.status()."
        )
    if len(runs) > 1:
        raise ConfigError(f"several runs are under way; say which: {command} {runs[-1].pid}. Known: {known}.")
    return runs[0]


def _observe(run: "RunningRun") -> "ConnectedMember":
    """Connect to the coordinator of a run, without taking part."""
    from tutti.coordination import MemberDescription, Secret
    from tutti.coordination.link import Endpoint, connect_member

    observer = MemberDescription.this_process(-1, "observer", "observer")
    secret, limit = Secret(run.secret, encrypt=run.encrypt), timedelta(seconds=_ANSWER_S)
    return connect_member(observer, Endpoint(run.address, run.port), secret, timeout=limit)


def _table(member: "ConnectedMember", stack: int | None) -> list[dict[str, Any]]:
    """What the coordinator knows of every rank; after the rank has sent its stack, if one is asked for."""
    deadline = time.monotonic() + 2.0
    while True:
        rows = member.table(_ANSWER_S)
        if rows is None:
            raise ConfigError(
                f"the coordinator has not answered for {_ANSWER_S:g} s: its process is stopped, or has ended."
            )
        here = stack is None or any(row["rank"] == stack and row["stack"] for row in rows)
        if here or time.monotonic() > deadline:
            return rows
        time.sleep(0.05)


def _as_table(rows: list[dict[str, Any]]) -> Table:
    from tutti.coordination.diagnosis import ranks_text

    table = Table("rank", "host", "process", "step", "phase", "for", "usually", "waits for")
    for row in rows:
        state = row["status"]
        waits = [wait for wait in state.get("waits", []) if not wait["background"]]
        whom = "; ".join(f"{ranks_text(wait['ranks'])}: {wait['s']:.1f} s" for wait in waits)
        silent = f"silent for {row['silent_s']:.0f} s" if row["silent_s"] > 1.5 or not row["connected"] else None
        table.add_row(
            str(row["rank"]),
            escape(row["host"]),
            f"{row['pid']}{'' if row['process'] in (None, 'running') else ', ' + row['process']}",
            str(state.get("step", 0)),
            silent or state.get("phase", "starting"),
            f"{state.get('phase_s', 0.0):.1f} s",
            f"{state['usual_s']:.3g} s" if state.get("usual_s") else "",
            whom,
        )
    return table


def _as_json(rows: list[dict[str, Any]]) -> str:
    import json

    return json.dumps(rows, indent=2)
