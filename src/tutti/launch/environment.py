"""Rank, world size and rendezvous address of this process, read from the variables that its launcher set.

Only `launch/` reads environment variables. One reader per launcher (`READERS`) returns None if its launcher left
nothing.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tutti.cluster.hosts import LOOPBACK
from tutti.errors import EnvironmentConflict
from tutti.launch.control_settings import COORDINATOR, ELASTIC


@dataclass(frozen=True)
class RankEnvironment:
    """What a launcher says about this process."""

    launcher: str
    """Name of the launcher, for messages; "none" if there is none."""
    rank: int
    size: int
    """Number of ranks in the world."""
    local_rank: int
    """Number of this process among those of its host."""
    address: str | None
    """Address of the store through which ranks meet."""
    port: int | None
    """Port of that store."""
    hosted: bool = False
    """Whether the launcher itself runs the store at `address`; otherwise rank 0 does."""
    attempt: str = "0"
    """Which restart of the job this is. Keys that an earlier attempt left in the store must not be read."""
    innermost: bool = False
    """Whether this launcher itself started the process, so that variables of others around it do not count."""

    @property
    def store(self) -> str:
        """Address and port of the store, for messages."""
        return f"{self.address}:{self.port}"


def read_environment(environment: Mapping[str, str] = os.environ) -> RankEnvironment:
    """Read which rank this process is, and where ranks meet.

    The innermost launcher wins, for example torchrun under Slurm. Otherwise all launchers that left variables must
    agree. Raises `EnvironmentConflict` with the names and values that contradict each other.
    """
    found = [described for reader in READERS.values() if (described := reader(environment)) is not None]
    # What is said of whole nodes counts only where nothing is said of processes.
    for node_reader in NODE_READERS if not found else ():
        found += [described] if (described := node_reader.read(environment)) is not None else []
    if not found:
        return RankEnvironment("none", 0, 1, 0, None, None)
    first = found[0]
    # A launcher that started this process itself is right; one further out (Slurm around torchrun) numbers other
    # processes.
    if not first.innermost:
        for other in found[1:]:
            if (other.rank, other.size) != (first.rank, first.size):
                raise EnvironmentConflict(
                    f"the environment contradicts itself: {first.launcher} says rank {first.rank} of {first.size}, "
                    f"{other.launcher} says rank {other.rank} of {other.size}. Unset the variables of the one that "
                    "did not start this process."
                )
    for other in found[1:]:
        # Open MPI without mpi4py knows ranks but no rendezvous address, which another launcher's variables may give.
        if first.port is None and other.port is not None:
            first = replace(first, address=other.address, port=other.port)
    # A worker of `tutti join` has the address of the run's coordinator, and no store of torch's.
    if first.size > 1 and first.port is None and COORDINATOR not in environment:
        raise EnvironmentConflict(
            f"rank {first.rank}: {first.launcher} started {first.size} processes but nothing says where rank 0 is. "
            "Set MASTER_ADDR and MASTER_PORT, or install tutti-train[mpi] if this is mpirun."
        )
    return first


def set_variables(variables: Mapping[str, str]) -> None:
    """Describe this process as a launcher would, for frameworks that start processes without variables."""
    os.environ.update(variables)


def _torchrun(environment: Mapping[str, str]) -> RankEnvironment | None:
    """Read torchrun's variables, which `tutti run` sets as well."""
    names = ("RANK", "WORLD_SIZE")
    given = [name for name in names if name in environment]
    if not given:
        return None
    if len(given) == 1:
        missing = next(name for name in names if name not in environment)
        raise EnvironmentConflict(f"{given[0]} is set but {missing} is not: set both, or neither.")
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    described = _checked("RANK/WORLD_SIZE", (rank, size, _number(environment, "LOCAL_RANK", 0)), environment)
    # torchrun's agent, and `tutti run`, serve the store and keep it over restarts of the workers.
    hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    innermost = hosted or "TORCHELASTIC_RUN_ID" in environment
    return replace(described, hosted=hosted, attempt=attempt, innermost=innermost)


def _open_mpi(environment: Mapping[str, str]) -> RankEnvironment | None:
    """Read the variables of Open MPI's mpirun."""
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    rank, size = _number(environment, "OMPI_COMM_WORLD_RANK"), _number(environment, "OMPI_COMM_WORLD_SIZE")
    local_rank = _number(environment, "OMPI_COMM_WORLD_LOCAL_RANK", 0)
    return _checked("Open MPI", (rank, size, local_rank), environment, _rendezvous_through_mpi)


def _mpich(environment: Mapping[str, str]) -> RankEnvironment | None:
    """Read the variables of the PMI, which MPICH, Intel MPI and others set."""
    if "PMI_RANK" not in environment or "PMI_SIZE" not in environment:
        return None
    rank, size = _number(environment, "PMI_RANK"), _number(environment, "PMI_SIZE")
    local_rank = _number(environment, "MPI_LOCALRANKID", 0)
    return _checked("MPICH", (rank, size, local_rank), environment, _rendezvous_through_mpi)


def _slurm(environment: Mapping[str, str]) -> RankEnvironment | None:
    """Read the variables of a Slurm step, as srun sets them for every task."""
    # A batch script has SLURM_PROCID too; only what srun started has a numbered step.
    if "SLURM_PROCID" not in environment or not environment.get("SLURM_STEP_ID", "").isdigit():
        return None
    rank, size = _number(environment, "SLURM_PROCID"), _slurm_size(environment)
    local_rank = _number(environment, "SLURM_LOCALID", 0)

    def first_host() -> tuple[str | None, int | None]:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
        # A port that all ranks compute alike. Steps of one job, and neighbouring jobs, get different ones.
        job = _number(environment, "SLURM_JOB_ID", 0) * 64 + int(environment["SLURM_STEP_ID"])
        alone = environment.get("SLURM_STEP_NUM_NODES") == "1" or environment.get("SLURM_NNODES") == "1"
        return (LOOPBACK if alone else _first_node(nodes)), 20_000 + job % 20_000

    return _checked("Slurm", (rank, size, local_rank), environment, first_host)


def _slurm_size(environment: Mapping[str, str]) -> int:
    """Number of tasks of this step; inside a step, SLURM_NTASKS may still be the whole allocation's."""
    step = "SLURM_STEP_NUM_TASKS"
    return _number(environment, step if step in environment else "SLURM_NTASKS")


READERS: dict[str, Callable[[Mapping[str, str]], RankEnvironment | None]] = {
    "torchrun": _torchrun,
    "open mpi": _open_mpi,
    "mpich": _mpich,
    "slurm": _slurm,
}


@dataclass(frozen=True)
class NodeReader:
    """The variables of a scheduler that numbers nodes, and runs a command once on each.

    A process that it has started itself is the only one of its node, so its rank is the number of the node. A node for
    several workers needs a launcher of its own, such as torchrun, whose variables then come first.
    """

    scheduler: str
    node: str
    nodes: str
    """Names of the variables with the number of this node, and with how many there are."""
    addresses: str
    """Name of the variable with the address of the first node, and perhaps those of others on further lines."""
    gpus: str
    """Name of the variable with the number of GPUs of each node."""

    def read(self, environment: Mapping[str, str]) -> RankEnvironment | None:
        """Return which rank this process is; None if there are not several nodes of this scheduler."""
        if self.node not in environment or (size := _number(environment, self.nodes, 1)) == 1:
            return None
        gpus = environment.get(self.gpus, "").strip()
        if gpus.isdecimal() and int(gpus) > 1:
            raise EnvironmentConflict(
                f"{self.scheduler} has started one process on a node with {gpus} GPUs ({self.gpus}). Have it run "
                f"{self.command} SCRIPT, which starts one for each."
            )
        described = _checked(
            self.scheduler, (_number(environment, self.node), size, 0), environment, lambda: self._first(environment)
        )
        if "MASTER_ADDR" not in environment:
            described = replace(described, address=self._first(environment)[0])
        return described

    @property
    def command(self) -> str:
        """The command that starts several workers on each node."""
        first = f'$(echo "${self.addresses}" | head -n1)'
        return (
            f"torchrun --nnodes=${self.nodes} --node-rank=${self.node} --nproc-per-node=${self.gpus} "
            f"--master-addr={first} --master-port={_NODE_PORT}"
        )

    def _first(self, environment: Mapping[str, str]) -> tuple[str, int]:
        addresses = environment.get(self.addresses, "").split()
        if not addresses:
            raise EnvironmentConflict(f"{self.scheduler} does not say where the first node is ({self.addresses}).")
        return addresses[0], _NODE_PORT


_NODE_PORT = 29_500

NODE_READERS = (
    NodeReader(
        "SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE"
    ),
    NodeReader("dstack", "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP", "DSTACK_GPUS_PER_NODE"),
)

Rendezvous = Callable[[], tuple[str | None, int | None]]
"""Returns address and port of the store, where no variable gives them."""


def _checked(
    launcher: str, numbers: tuple[int, int, int], environment: Mapping[str, str], fallback: Rendezvous | None = None
) -> RankEnvironment:
    """Check a launcher's numbers and add where ranks meet: MASTER_ADDR and MASTER_PORT, or what `fallback` finds."""
    rank, size, local_rank = numbers
    # Where workers come and go, one that is started in place of another has a number of its own.
    if size < 1 or rank < 0 or (rank >= size and ELASTIC not in environment):
        raise EnvironmentConflict(
            f"{launcher} says this is rank {rank} of {size}; a rank is 0 or more and less than the number of ranks."
        )
    address: str | None = environment.get("MASTER_ADDR")
    port: int | None = None
    if "MASTER_PORT" in environment:
        port = _number(environment, "MASTER_PORT")
        if not 0 < port < 65_536:
            raise EnvironmentConflict(f"MASTER_PORT must be from 1 to 65535, got {port}.")
    # Address and port come as a pair: an address without a port is not used. A single rank meets no one.
    elif fallback is not None and size > 1:
        address, port = fallback()
    return RankEnvironment(launcher, rank, size, local_rank, address or LOOPBACK, port)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise EnvironmentConflict(f"{name} must be a whole number, got {text!r}.") from None


def _first_node(nodes: str) -> str:
    """The first host of a Slurm list such as `gpu[03-05,9],login1`."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if not match:
        raise EnvironmentConflict("Slurm gives no node list (SLURM_STEP_NODELIST): set MASTER_ADDR and MASTER_PORT.")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match.group())


def _rendezvous_through_mpi() -> tuple[str | None, int | None]:
    """Have rank 0 choose a free port and broadcast its address over MPI; None without mpi4py."""
    try:
        from mpi4py import MPI
    except ImportError:
        return None, None
    import socket

    import numpy as np

    everyone = MPI.COMM_WORLD
    # Ranks that can share memory. If those are all, loopback will do, and no port is opened to the network.
    here = everyone.Split_type(MPI.COMM_TYPE_SHARED)
    one_host = here.size == everyone.size
    here.Free()
    # Address and port as text, padded with zeros: all ranks must know the length of a broadcast.
    message = np.zeros(256, dtype=np.uint8)
    if everyone.rank == 0:
        # The kernel chooses a free port. It is closed again, and could be taken before rank 0 listens on it: rare, and
        # then an error that names the port.
        with socket.socket() as probe:
            probe.bind((LOOPBACK if one_host else "", 0))
            text = f"{LOOPBACK if one_host else socket.gethostname()} {probe.getsockname()[1]}"
        message[: len(text)] = np.frombuffer(text.encode(), dtype=np.uint8)
    everyone.Bcast(message, root=0)
    address, port = message.tobytes().rstrip(b"\0").decode().split()
    return address, int(port)
