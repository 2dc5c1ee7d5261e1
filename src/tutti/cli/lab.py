"""`tutti lab`: emulated hosts on this machine, made from network namespaces with shaped links."""

import json
import shutil
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tutti.cluster import format_rate
from tutti.errors import ConfigError

app = typer.Typer(
    help="Emulate several hosts on one Linux machine: network namespaces with shaped links. Needs root and iproute2.",
    no_args_is_help=True,
)


# Without interspersed arguments: everything after the command's name is the command's.
@app.command("run", context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str], typer.Argument(metavar="CMD", help="Command to run on every host, with its arguments, after --.")
    ],
    hosts: Annotated[int, typer.Option(help="Number of hosts, from 1 to 250.")] = 2,
    rate: Annotated[
        str,
        typer.Option(help="Rate of each host's link, such as 100mbit; or one rate per host, such as 1gbit/100mbit."),
    ] = "1gbit",
    latency: Annotated[
        str | None, typer.Option(help="One-way latency between hosts, such as 1ms. Needs a kernel with netem.")
    ] = None,
    ranks_per_host: Annotated[int, typer.Option(help="Number of processes on each host.")] = 1,
    name: Annotated[str | None, typer.Option(help="Name of the lab, which `tutti lab list` shows.")] = None,
) -> None:
    """Make hosts, run a command on each of them, and remove them.

    Example: tutti lab run --hosts 4 --rate 100mbit -- python script.py

    The command gets torchrun's variables: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on.

    So tutti.init() and torch.distributed.init_process_group() connect the ranks.

    Every line of output starts with its rank. The exit status is that of the first process that failed.
    """
    from tutti.launch.lab.lab import lab as make_lab
    from tutti.launch.local import run_command

    # Before hosts are made: on each of them the same command would fail.
    if shutil.which(command[0]) is None:
        raise ConfigError(f"there is no command '{command[0]}' to run on the hosts.")
    with make_lab(hosts, rate.split("/"), latency=latency, ranks_per_host=ranks_per_host, name=name) as lab:
        run_command(command, lab)


@app.command("list")
def list_labs() -> None:
    """List the labs on this machine, their owners and the rates of their hosts' links."""
    from tutti.launch.lab import ownership

    _check_possible()
    labs = ownership.existing()
    if not labs:
        print("There are no labs on this machine.")
        return
    table = Table()
    for heading in ("lab", "hosts", "rates", "owner"):
        table.add_column(heading, overflow="fold")
    for claim in labs:
        # Read from the namespaces that exist, not from a record: of a lab whose owner was killed, some may be gone.
        hosts = [name for name in claim.namespaces() if name != claim.switch]
        note = "" if claim.alive else "; `tutti lab clear` removes it"
        table.add_row(claim.name, str(len(hosts)), _rates(hosts), claim.owner() + note)
    Console().print(table)


@app.command("clear")
def clear() -> None:
    """Remove the labs of processes that have ended. Every new lab does so too."""
    from tutti.launch.lab import ownership

    _check_possible()
    cleared = ownership.remove_orphans()
    for claim in cleared:
        print(f"removed lab '{claim.name}' of process {claim.pid}, which has ended")
    if not cleared:
        print("There was nothing to clear.")


def _check_possible() -> None:
    """Refuse on a machine that can have no labs: an empty list would look like an answer."""
    from tutti.launch.lab import namespaces

    if (lacking := namespaces.missing()) is not None:
        raise ConfigError(lacking)


def _rates(hosts: list[str]) -> str:
    """The rates of hosts' links, read from the kernel; a single rate if all are equal."""
    rates = [_rate(host) for host in hosts]
    return "/".join(rates if len(set(rates)) > 1 else rates[:1])


def _rate(host: str) -> str:
    """The rate to which the kernel shapes a host's link; `tc` gives bytes per second."""
    from tutti.launch.lab import namespaces

    answer = namespaces.query("tc", "-netns", host, "-json", "qdisc", "show", "dev", "eth0")
    for discipline in json.loads(answer or "[]"):
        if discipline["kind"] == "tbf":
            return format_rate(8 * discipline["options"]["rate"])
    return "unshaped"
