"""`tutti doctor`: a report on this machine: libraries, backends, cores, shared memory and links."""

import os
import platform
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

import tutti
from tutti.cli.json_file import check_writable, write_json
from tutti.cli.lab_option import check_workers_or_lab, describe_hosts, launch_arguments, open_lab
from tutti.cli.options import JsonFile
from tutti.cluster import format_rate, format_time
from tutti.errors import ConfigError, UnsupportedVersion
from tutti.versions import PYTHON, TORCH, check_torch, in_range

if TYPE_CHECKING:
    from tutti.collectives import LinkMeasurement


class Finding(NamedTuple):
    """One line of the report."""

    what: str
    """What was examined."""
    ok: bool | None
    """Whether it is as it should be; None where it is neither good nor bad."""
    detail: str


def doctor(
    network: Annotated[
        bool, typer.Option("--network", metavar="", help="Measure the links between workers instead.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option("--workers", "-n", min=2, help="With --network: number of processes on this machine. Default: 2."),
    ] = None,
    lab: Annotated[
        str | None, typer.Option(metavar="SPEC", help="With --network: emulated hosts, such as hosts=4,rate=100mbit.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Report on this machine: libraries, backends, GPUs, cores, shared memory, network and the lab."""
    check_writable(json_file)
    # The report itself starts no workers: these options would change nothing.
    if not network and (workers is not None or lab is not None):
        raise ConfigError("--workers and --lab are for measuring links: give --network too.")
    if network:
        check_workers_or_lab(workers, lab)
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
    """Time ping-pong messages between all pairs of workers, print a table and return it for `--json`."""
    from tutti.launch import launch

    console = Console()
    with open_lab(spec) as lab:
        where = describe_hosts(workers, lab)
        with console.status(f"measuring links, {where}"):
            measured = launch(measure_links_here, **launch_arguments(workers, lab))[0]
    table = Table(title=f"Links between ranks, {where}")
    for heading in ("ranks", "latency", "rate", "deviation"):
        table.add_column(heading, justify="right")
    for (one, two), fit in measured.fits.items():
        numbers = (format_time(fit.link.latency_s), format_rate(fit.link.bits_per_s), f"{fit.residual:.0%}")
        table.add_row(f"{one} – {two}", *numbers)
    console.print(table)
    console.print(
        "deviation: how far single messages are from latency + bytes/rate; above 50 % repeat on a quiet machine",
        highlight=False,
    )
    console.print(f"cost formulas use the link that is slowest for 1 MiB: {measured.link}")
    return [{"ranks": list(pair), **fit.as_dict()} for pair, fit in measured.fits.items()]


def measure_links_here() -> "LinkMeasurement":
    """Measure the links between all ranks; every worker of `tutti doctor --network` runs this."""
    from tutti.job import measure_link
    from tutti.launch import init

    return measure_link(world=init())


def examine() -> list[Finding]:
    """All findings that `tutti doctor` reports."""
    return [*_software(), *_backends(), *_machine(), *_network(), _lab()]


def _software() -> list[Finding]:
    """Versions of Tutti, Python and the libraries it needs, and whether another package has its name."""
    python = platform.python_version()
    found = [
        Finding(
            "tutti",
            in_range(python, PYTHON),
            f"{tutti.__version__} on Python {python} (supported: {' to '.join(PYTHON)})",
        )
    ]
    # Another project's distribution has our import name; this one is installed as 'tutti-train'.
    if (stranger := _version("tutti")) is not None:
        detail = (
            f"{stranger} is installed, which is not this library ('tutti-train'), and has the same import name: "
            "pip uninstall tutti, then install this library again from its checkout (pip install .)"
        )
        found.append(Finding("distribution 'tutti'", False, detail))
    return [*found, *_libraries()]


def _libraries() -> list[Finding]:
    """The libraries that Tutti needs, and whether this version of torch is supported."""
    versions = {name: _version(name) for name in ("torch", "numpy", "numba")}
    missing = [name for name, version in versions.items() if version is None]
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    found = [Finding("libraries", not missing, text + (f"; missing: {', '.join(missing)}" if missing else ""))]
    try:
        check_torch()
    except UnsupportedVersion as error:
        return [*found, Finding("torch", False, str(error))]
    return [*found, Finding("torch", None, f"supported: {' to '.join(TORCH)}")]


def _version(name: str) -> str | None:
    """The version of an installed distribution, without importing it; None if it is not installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backends() -> list[Finding]:
    """What moves tensors here: Gloo, NCCL and MPI, and the GPUs."""
    # torch takes seconds to import, so it is imported only where it is reported on.
    import torch
    import torch.distributed as dist

    from tutti.launch.mpirun import available as mpi_available

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    mpi = mpi_available()
    return [
        Finding("Gloo", dist.is_gloo_available(), "torch.distributed on CPU tensors"),
        Finding("NCCL", dist.is_nccl_available() or None, "GPU tensors" if gpus else "not needed: no GPU here"),
        Finding(
            "Open MPI",
            mpi or None,
            "mpi4py and mpirun found" if mpi else "not installed; pip install 'tutti-train[mpi]' installs it",
        ),
        Finding("GPUs", bool(gpus) or None, ", ".join(gpus) or "none"),
    ]


def _machine() -> list[Finding]:
    """Cores, memory, and whether ranks of this host can share memory."""
    cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = [Finding("cores", None, f"{cores} usable, {memory_gib:.0f} GiB of memory")]
    shares = hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()
    detail = (
        "anonymous memory, not limited by the size of /dev/shm"
        if shares
        else "not available: needs Linux; ranks of one host use sockets instead"
    )
    if Path("/dev/shm").is_dir():
        # Containers often have 64 MiB there, on which a DataLoader fails, whatever Tutti does.
        detail += f" ({shutil.disk_usage('/dev/shm').total / 2**20:,.0f} MiB, which DataLoader workers use)"
    return [*found, Finding("shared memory", shares, detail)]


def _network() -> list[Finding]:
    """The network interfaces, and the address under which this host knows itself."""
    names = [name for _, name in socket.if_nameindex()]
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "unknown: other hosts cannot resolve this name"
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    return [
        Finding("network interfaces", None, ", ".join(names) + (f"; GLOO_SOCKET_IFNAME={chosen}" if chosen else "")),
        Finding("host name", None, f"{socket.gethostname()} has address {address}"),
    ]


def _lab() -> Finding:
    """Whether emulated hosts can be made on this machine from network namespaces."""
    from tutti.launch.lab.lab import missing

    lacking = missing()
    return Finding("lab", lacking is None, lacking or "network namespaces can be made here")
