"""Who we are, from every launcher's variables, and what is said when they make no sense."""

import pytest

from tutti.errors import ConfigError, EnvironmentConflict
from tutti.launch import environment as environment_module
from tutti.launch.environment import RankEnvironment, read_environment

MASTER = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", **MASTER}

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}

MPICH = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1"}

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "2",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[03-05,9],login1",
    "SLURM_STEP_NUM_NODES": "5",
}

BY_LAUNCHER = {"torchrun": TORCHRUN, "Open MPI": {**OPEN_MPI, **MASTER}, "MPICH": {**MPICH, **MASTER}, "Slurm": SLURM}

RANK_AND_SIZE = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS"),
}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.fixture
def no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where mpi4py is not installed."""
    monkeypatch.setattr(environment_module, "_rendezvous_through_mpi", lambda: (None, None))


def test_alone() -> None:
    assert read_environment({}) == RankEnvironment("none", 0, 1, 0, None, None)


def test_alone_with_variables_of_no_launcher() -> None:
    assert read_environment({"HOME": "/root", **MASTER}).size == 1


def test_torchrun() -> None:
    place = read_environment({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (place.rank, place.size, place.local_rank) == (3, 8, 1)
    assert (place.address, place.port) == ("10.0.0.7", 29500)
    assert place.hosted


def test_variables_of_torchrun_set_by_hand() -> None:
    """Then nobody runs a store, so rank 0 has to; there is no local rank to know."""
    place = read_environment(without(TORCHRUN, "LOCAL_RANK"))
    assert (place.rank, place.size, place.local_rank) == (3, 8, 0)
    assert not place.hosted


@pytest.mark.parametrize("agent_store", ["False", ""])
def test_torchrun_without_an_agent_store(agent_store: str) -> None:
    assert not read_environment({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": agent_store}).hosted


def test_address_is_loopback_unless_given() -> None:
    assert read_environment(without(TORCHRUN, "MASTER_ADDR")).address == "127.0.0.1"


def test_open_mpi() -> None:
    assert read_environment({**OPEN_MPI, **MASTER}) == RankEnvironment("Open MPI", 2, 4, 1, "10.0.0.7", 29500)


def test_open_mpi_meets_through_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_module, "_rendezvous_through_mpi", lambda: ("node7", 4321))
    place = environment_module.read_environment(OPEN_MPI)
    assert (place.address, place.port) == ("node7", 4321)


def test_mpich() -> None:
    assert read_environment({**MPICH, **MASTER}) == RankEnvironment("MPICH", 1, 3, 1, "10.0.0.7", 29500)


def test_mpich_rank_alone_is_no_launcher() -> None:
    """Other things set PMI_RANK too; without a size it says nothing."""
    assert read_environment({"PMI_RANK": "1"}).size == 1


def test_one_process_of_a_launcher_needs_no_port(no_mpi: None) -> None:
    place = read_environment({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"})
    assert (place.rank, place.size, place.port) == (0, 1, None)


def test_slurm() -> None:
    place = read_environment(SLURM)
    assert (place.launcher, place.rank, place.size, place.local_rank) == ("Slurm", 5, 8, 2)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-05,9],login1", "gpu03"),
        ("gpu[9,03-05]", "gpu9"),
        ("gpu[12]", "gpu12"),
        ("login1,gpu[03-05]", "login1"),
        ("login1", "login1"),
        ("a-b-c[001-120]", "a-b-c001"),
        ("node-1.cluster.example,node-2.cluster.example", "node-1.cluster.example"),
        ("rack[1-2]node[01-04]", "rack1node01"),
        ("gpu[03-05]-ib,login1", "gpu03-ib"),
    ],
)
def test_first_node_of_slurm_is_where_rank_0_is(nodes: str, first: str) -> None:
    assert read_environment({**SLURM, "SLURM_STEP_NODELIST": nodes}).address == first


def test_slurm_node_list_of_the_job_where_the_step_has_none() -> None:
    job = {**without(SLURM, "SLURM_STEP_NODELIST"), "SLURM_NODELIST": "n[4-5]"}
    assert read_environment(job).address == "n4"


@pytest.mark.parametrize("variable", ["SLURM_STEP_NUM_NODES", "SLURM_NNODES"])
def test_slurm_on_one_node_stays_on_loopback(variable: str) -> None:
    one_node = {**without(SLURM, "SLURM_STEP_NUM_NODES"), "SLURM_STEP_NODELIST": "gpu03", variable: "1"}
    assert read_environment(one_node).address == "127.0.0.1"


def test_slurm_port_is_the_same_on_every_rank_and_differs_between_steps() -> None:
    ports = [
        {
            read_environment({**SLURM, "SLURM_PROCID": str(rank), "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).port
            for rank in (0, 7)
        }
        for job, step in [("1234", "0"), ("1234", "1"), ("1235", "0"), ("99999999", "0")]
    ]
    assert all(len(of_all_ranks) == 1 for of_all_ranks in ports)
    numbers = [of_all_ranks.pop() for of_all_ranks in ports]
    assert len(set(numbers)) == len(numbers)
    assert all(number is not None and 1024 <= number < 65536 for number in numbers)


def test_slurm_address_given_by_hand() -> None:
    place = read_environment({**SLURM, **MASTER})
    assert (place.address, place.port) == ("10.0.0.7", 29500)


@pytest.mark.parametrize("step", ["", "batch", "interactive", "4294967291x", None])
def test_slurm_batch_script_is_not_a_rank(step: str | None) -> None:
    variables = without(SLURM, "SLURM_STEP_ID") if step is None else {**SLURM, "SLURM_STEP_ID": step}
    assert read_environment(variables).launcher == "none"


def test_slurm_without_node_list() -> None:
    with pytest.raises(EnvironmentConflict, match=r"no node list.*SLURM_STEP_NODELIST.*set MASTER_ADDR"):
        read_environment(without(SLURM, "SLURM_STEP_NODELIST"))


@pytest.mark.parametrize(("given", "missing"), [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_half_of_torchruns_variables(given: str, missing: str) -> None:
    with pytest.raises(EnvironmentConflict, match=f"^{given} is set but {missing} is not: set both, or neither"):
        read_environment({given: "1", **MASTER})


@pytest.mark.parametrize("launcher", BY_LAUNCHER)
@pytest.mark.parametrize(("rank", "size"), [(8, 8), (-1, 8), (0, 0)])
def test_rank_out_of_range(launcher: str, rank: int, size: int) -> None:
    rank_name, size_name = RANK_AND_SIZE[launcher]
    variables = {**BY_LAUNCHER[launcher], rank_name: str(rank), size_name: str(size)}
    with pytest.raises(EnvironmentConflict, match=f"rank {rank} of {size}; a rank is 0 or more and less than"):
        read_environment(variables)


@pytest.mark.parametrize("launcher", BY_LAUNCHER)
@pytest.mark.parametrize("text", ["two", "", "1.0"])
@pytest.mark.parametrize("which", [0, 1])
def test_not_a_number(launcher: str, text: str, which: int) -> None:
    name = RANK_AND_SIZE[launcher][which]
    with pytest.raises(EnvironmentConflict, match=f"^{name} must be a whole number, got {text!r}"):
        read_environment({**BY_LAUNCHER[launcher], name: text})


@pytest.mark.parametrize("launcher", ["Open MPI", "Slurm"])
def test_rank_without_a_size(launcher: str) -> None:
    size = RANK_AND_SIZE[launcher][1]
    with pytest.raises(EnvironmentConflict, match=size):
        read_environment(without(BY_LAUNCHER[launcher], size))


def test_port_not_a_number() -> None:
    with pytest.raises(EnvironmentConflict, match="MASTER_PORT must be a whole number, got 'http'"):
        read_environment({**TORCHRUN, "MASTER_PORT": "http"})


@pytest.mark.parametrize("port", ["0", "-1", "-5", "65536"])
def test_port_out_of_range(port: str) -> None:
    with pytest.raises(EnvironmentConflict, match="MASTER_PORT"):
        read_environment({**TORCHRUN, "MASTER_PORT": port})


def test_launchers_that_disagree() -> None:
    with pytest.raises(EnvironmentConflict, match="contradicts itself") as caught:
        read_environment({**TORCHRUN, **OPEN_MPI})
    message = str(caught.value)
    assert "RANK/WORLD_SIZE says rank 3 of 8" in message
    assert "Open MPI says rank 2 of 4" in message
    assert "Unset the variables of the one that did not start this process" in message


def test_launchers_that_disagree_on_the_size_only() -> None:
    with pytest.raises(EnvironmentConflict, match=r"Open MPI says rank 2 of 4.*Slurm says rank 2 of 8"):
        read_environment({**OPEN_MPI, **MASTER, **SLURM, "SLURM_PROCID": "2"})


def test_launchers_that_agree() -> None:
    """srun starts MPI programs through PMI: both leave their mark."""
    place = read_environment({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8", **MASTER})
    assert (place.rank, place.size) == (5, 8)


def test_mpi_under_slurm_meets_where_slurm_says(no_mpi: None) -> None:
    """srun of an MPI build without mpi4py: PMI's variables know no address, Slurm's do."""
    place = read_environment({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"})
    assert (place.rank, place.size, place.address) == (5, 8, "gpu03")


@pytest.mark.parametrize("mark", [{"TORCHELASTIC_RUN_ID": "x"}, {"TORCHELASTIC_USE_AGENT_STORE": "True"}])
def test_torchrun_inside_slurm_wins(mark: dict[str, str]) -> None:
    """srun started one torchrun per node, each of which started this rank."""
    place = read_environment({**SLURM, **TORCHRUN, **mark})
    assert (place.rank, place.size, place.local_rank) == (3, 8, 1)
    assert (place.address, place.port) == ("10.0.0.7", 29500)


def test_torchrun_inside_slurm_does_not_ask_slurm_where_to_meet() -> None:
    inner = {**without(SLURM, "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES"), **TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}
    assert read_environment(without(inner, "MASTER_ADDR")).rank == 3


@pytest.mark.parametrize("launcher", ["Open MPI", "MPICH", "torchrun"])
def test_nothing_says_where_rank_0_is(launcher: str, no_mpi: None) -> None:
    variables = without(BY_LAUNCHER[launcher], "MASTER_ADDR", "MASTER_PORT")
    with pytest.raises(EnvironmentConflict, match="nothing says where rank 0 is") as caught:
        read_environment(variables)
    message = str(caught.value)
    rank, size = (variables[name] for name in RANK_AND_SIZE[launcher])
    assert message.startswith(f"rank {rank}: ")
    assert f"started {size} processes" in message
    assert "Set MASTER_ADDR and MASTER_PORT, or install tutti-train[mpi]" in message


def test_conflicts_are_the_users_mistakes() -> None:
    """So callers may catch them as `ConfigError` or `ValueError`."""
    with pytest.raises(ValueError, match="WORLD_SIZE") as caught:
        read_environment({"RANK": "0"})
    assert isinstance(caught.value, ConfigError)


SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "3",
    "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6\n10.0.0.7",
    "SKYPILOT_NUM_GPUS_PER_NODE": "0",
}

DSTACK = {
    "DSTACK_NODE_RANK": "1",
    "DSTACK_NODES_NUM": "3",
    "DSTACK_MASTER_NODE_IP": "10.0.0.5",
    "DSTACK_GPUS_PER_NODE": "1",
}

each_node_scheduler = pytest.mark.parametrize("variables", [SKYPILOT, DSTACK], ids=["skypilot", "dstack"])


@each_node_scheduler
def test_one_process_on_each_node(variables: dict[str, str]) -> None:
    place = read_environment(variables)
    assert (place.rank, place.size, place.local_rank, place.address, place.port) == (1, 3, 0, "10.0.0.5", 29500)
    moved = read_environment({**variables, "MASTER_PORT": "1234"})
    assert (moved.address, moved.port) == ("10.0.0.5", 1234)


@each_node_scheduler
def test_launchers_inside_a_node_come_first(variables: dict[str, str]) -> None:
    """The number of the node is not the rank of a process that torchrun, srun or mpirun has started there."""
    for inner in BY_LAUNCHER.values():
        place = read_environment({**variables, **inner})
        assert place == read_environment(inner)


@each_node_scheduler
def test_a_node_for_several_workers(variables: dict[str, str]) -> None:
    gpus = next(name for name in variables if "GPUS" in name)
    with pytest.raises(EnvironmentConflict, match=rf"one process on a node with 8 GPUs .*torchrun --nnodes=.*{gpus}"):
        read_environment({**variables, gpus: "8"})


@each_node_scheduler
def test_one_node_is_a_machine_as_any_other(variables: dict[str, str]) -> None:
    nodes = next(name for name in variables if name.endswith(("NUM_NODES", "NODES_NUM")))
    gpus = next(name for name in variables if "GPUS" in name)
    assert read_environment({**variables, nodes: "1", gpus: "8"}).size == 1


@each_node_scheduler
def test_nodes_that_make_no_sense(variables: dict[str, str]) -> None:
    node = next(name for name in variables if name.endswith("NODE_RANK"))
    address = next(name for name in variables if name.endswith(("IPS", "IP")))
    with pytest.raises(EnvironmentConflict, match="rank 3 of 3"):
        read_environment({**variables, node: "3"})
    with pytest.raises(EnvironmentConflict, match=f"does not say where the first node is .*{address}"):
        read_environment({**variables, address: ""})
