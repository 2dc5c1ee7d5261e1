"""Options of `tutti run` and `tutti join`, with their help texts."""

from typing import Annotated

import typer

Script = Annotated[str, typer.Argument(help="Python script that calls tutti.init() and tutti.distribute().")]
Arguments = Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")]
WorkersText = Annotated[
    str | None,
    typer.Option(
        "--workers",
        "-n",
        metavar="N|MIN:MAX",
        help="Number of processes. Default: one per core. With MIN:MAX, MAX are started, training begins when MIN are "
        "there, lost ones are replaced, and others may join.",
    ),
]
StrategyText = Annotated[
    str | None, typer.Option("--strategy", help="Synchronisation strategy, which overrides the script's own.")
]
Timeout = Annotated[
    str | None,
    typer.Option("--timeout", metavar="DURATION", help="Time to wait for ranks to start: seconds, or 40s, 5m, 1h."),
]
Start = Annotated[
    int | None,
    typer.Option(
        "--start",
        metavar="N",
        help="Number of workers to start here, with --workers MIN:MAX. Default: MAX. Others may join later.",
    ),
]
RestartsLimit = Annotated[
    int | None,
    typer.Option(
        "--restarts",
        help="Number of workers that are started in place of lost ones, with --workers MIN:MAX. Default: 10.",
    ),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        metavar="HOST[:N],...",
        help="Start N workers on each host over ssh, 1 if no number is given: a:2,user@b:4. Working folder, script, "
        "Python and versions must be the same as here. Short for --on ssh:HOSTS.",
    ),
]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="LAUNCHER[:OPTIONS]",
        help="Where workers are started: local (the default), lab:OPTIONS, ssh:HOSTS, slurm:N "
        "inside a Slurm job, or one that another package "
        "offers.",
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen",
        metavar="ADDRESS[:PORT]",
        help="Address of this host on which `tutti join` on other hosts reaches the run, with --workers MIN:MAX. "
        "Default: only this machine reaches it.",
    ),
]
ChaosText = Annotated[
    str | None,
    typer.Option(
        "--chaos",
        metavar="TEXT",
        help='Cause failures on purpose, with --workers MIN:MAX: "kill any every 20s; stop 2 for 3s at 10s; join at '
        '30s; leave 1 at 40s; seed 7", and in a lab "cut host 0 for 5s".',
    ),
]
Spawn = Annotated[
    bool,
    typer.Option(
        "--spawn", metavar="", help="Start each worker as a new Python process, instead of forking them from one."
    ),
]
