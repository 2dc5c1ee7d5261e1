"""`tutti lab`: hosts on this machine, for any command."""

import json
import shutil
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tutti.cluster import format_rate
from tutti.errors import ConfigError
from tutti.launch.lab import namespaces, ownership
from tutti.launch.lab.lab import lab as make_lab
from tutti.launch.local import run_command

app = typer.Typer(
    help="Real hosts on one Linux machine: network namespaces with links as slow as you say. Needs root and iproute2.",
    no_args_is_help=True,
)


@app.command("run", context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="CMD", help="Any command with its arguments, after --.")],
    hosts: Annotated[int, typer.Option(help="How many, from 1 to 250.")] = 2,
    rate: Annotated[
        str, typer.Option(help="Of every host's link, such as 100mbit; or one for each, such as 1gbit/100mbit.")
    ] = "1gbit",
    latency: Annotated[
        str | None, typer.Option(help="One way between hosts, such as 1ms; needs a kernel with netem.")
    ] = None,
    ranks_per_host: Annotated[int, typer.Option(help="How often the command runs on each host.")] = 1,
    name: Annotated[str | None, typer.Option(help="The lab's, as `tutti lab list` shows it.")] = None,
) -> None:
    """Make hosts, run CMD on every one of them, and remove them.

    As in: tutti lab run --hosts 4 --rate 100mbit -- python script.py

    CMD gets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...), so that tutti.init() finds the
    others, and so does torch.distributed.init_process_group(). Its output is prefixed by rank. The exit status is that
    of the first that failed.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(f"there is no command '{command[0]}' to run on the hosts.")
    with make_lab(hosts, rate.split("/"), latency=latency, ranks_per_host=ranks_per_host, name=name) as lab:
        run_command(command, lab)


@app.command("list")
def list_labs() -> None:
    """Show the labs on this machine, who owns them, and their hosts' rates."""
    _check_possible()
    labs = ownership.found()
    if not labs:
        print("There are no labs on this machine.")
        return
    table = Table()
    for heading in ("lab", "hosts", "rates", "owner"):
        table.add_column(heading, overflow="fold")
    for claim in labs:
        hosts = [name for name in claim.namespaces() if name != claim.switch]
        note = "" if claim.alive else "; `tutti lab clear` removes it"
        table.add_row(claim.name, str(len(hosts)), _rates(hosts), claim.owner() + note)
    Console().print(table)


@app.command("clear")
def clear() -> None:
    """Remove what labs of dead processes left behind, and nothing else. Every new lab does so too."""
    _check_possible()
    cleared = ownership.clear()
    for claim in cleared:
        print(f"removed lab '{claim.name}' of process {claim.pid}, which has ended")
    if not cleared:
        print("There was nothing to clear.")


def _check_possible() -> None:
    if (lacking := namespaces.missing()) is not None:
        raise ConfigError(lacking)


def _rates(hosts: list[str]) -> str:
    """The rates of hosts' links, as the kernel has them; one if all are equal."""
    rates = [_rate(host) for host in hosts]
    return "/".join(rates if len(set(rates)) > 1 else rates[:1])


def _rate(host: str) -> str:
    answer = namespaces.query("tc", "-netns", host, "-json", "qdisc", "show", "dev", "eth0")
    for discipline in json.loads(answer or "[]"):
        if discipline["kind"] == "tbf":
            return format_rate(8 * discipline["options"]["rate"])
    return "unshaped"
