"""`tutti doctor`: what this machine has, and what it lacks."""

import importlib.metadata
import os
import platform
import shutil
import socket
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from tutti.cli.json_file import check_writable, write_json
from tutti.cli.place import check_one_place, described, lab_if_any
from tutti.cluster import format_rate, format_time
from tutti.collectives import LinkMeasurement
from tutti.errors import ConfigError
from tutti.job import measure_link
from tutti.launch import init, launch
from tutti.launch.lab.lab import missing
from tutti.launch.mpirun import available as mpi_available


class Finding(NamedTuple):
    """One line of the report. `ok` is None where it is neither good nor bad."""

    what: str
    ok: bool | None
    detail: str


def doctor(
    network: Annotated[bool, typer.Option("--network", help="Measure links between workers instead.")] = False,
    workers: Annotated[
        int | None,
        typer.Option("--workers", "-n", min=2, help="With --network: processes here; 2 by default."),
    ] = None,
    lab: Annotated[
        str | None, typer.Option(metavar="SPEC", help="With --network: on hosts such as hosts=4,rate=100mbit.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the findings here.")] = None,
) -> None:
    """Show what Tutti finds on this machine: torch, backends, cores, shared memory, network, the lab."""
    check_writable(json_file)
    if not network and (workers is not None or lab is not None):
        raise ConfigError("--workers and --lab say where to measure links: give --network too.")
    if network:
        check_one_place(workers, lab)
        write_json(json_file, _measure(workers or 2, lab))
        return
    findings = examine()
    table = Table(show_header=False)
    mark = {True: "[green]✓[/]", False: "[yellow]✗[/]", None: " "}
    for finding in findings:
        table.add_row(mark[finding.ok], finding.what, finding.detail)
    Console().print(table)
    write_json(json_file, [finding._asdict() for finding in findings])


def _measure(workers: int, spec: str | None) -> list[dict[str, Any]]:
    """Ping-pong between workers, on this machine or in a lab, as a table."""
    console = Console()
    with lab_if_any(spec) as lab:
        where = described(workers, lab)
        with console.status(f"measuring, {where}"):
            measured = launch(measure_own_link, workers=workers if lab is None else None, lab=lab)[0]
    table = Table(title=f"links between ranks, {where}")
    for heading in ("ranks", "latency", "rate", "residual"):
        table.add_column(heading, justify="right")
    for (one, two), fit in measured.fits.items():
        numbers = (format_time(fit.link.latency_s), format_rate(fit.link.bits_per_s), f"{fit.residual:.0%}")
        table.add_row(f"{one} – {two}", *numbers)
    console.print(table)
    console.print(f"cost formulas go by the slowest: {measured.link}")
    return [{"ranks": list(pair), **fit.as_dict()} for pair, fit in measured.fits.items()]


def measure_own_link() -> LinkMeasurement:
    """What each worker of `tutti doctor --network` runs."""
    return measure_link(world=init())


def examine() -> list[Finding]:
    """Everything `tutti doctor` reports."""
    return [*_software(), *_backends(), *_machine(), *_network(), _lab()]


def _software() -> list[Finding]:
    versions = {name: _version(name) for name in ("torch", "numpy", "numba")}
    missing = [name for name, version in versions.items() if version is None]
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return [
        Finding("tutti", True, f"{_version('tutti') or 'from source'} on Python {platform.python_version()}"),
        Finding("libraries", not missing, text + (f"; missing: {', '.join(missing)}" if missing else "")),
    ]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backends() -> list[Finding]:
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    mpi = mpi_available()
    return [
        Finding("Gloo", dist.is_gloo_available(), "sums of tensors that are not in shared memory"),
        Finding("NCCL", dist.is_nccl_available() or None, "GPU tensors" if gpus else "not needed: no GPU here"),
        Finding("Open MPI", mpi or None, "mpi4py and mpirun found" if mpi else "pip install 'tutti[mpi]' to have it"),
        Finding("GPUs", bool(gpus) or None, ", ".join(gpus) or "none"),
    ]


def _machine() -> list[Finding]:
    cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = [Finding("cores", None, f"{cores} usable, {memory_gib:.0f} GiB of memory")]
    shares = hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()
    detail = "anonymous memory: not limited by /dev/shm" if shares else "needs Linux: ranks of a host will use sockets"
    if Path("/dev/shm").is_dir():
        detail += f" ({shutil.disk_usage('/dev/shm').total / 2**20:,.0f} MiB there, for DataLoader workers)"
    return [*found, Finding("shared memory", shares, detail)]


def _network() -> list[Finding]:
    names = [name for _, name in socket.if_nameindex()]
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "no address: other hosts cannot find this one by name"
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    return [
        Finding("network interfaces", None, ", ".join(names) + (f"; GLOO_SOCKET_IFNAME={chosen}" if chosen else "")),
        Finding("host name", None, f"{socket.gethostname()} is {address}"),
    ]


def _lab() -> Finding:
    """Whether hosts can be made on this machine from network namespaces."""
    lacking = missing()
    return Finding("lab", lacking is None, lacking or "network namespaces can be made here")
