"""The contract of transports over MPI, whose ranks are processes; see `mpi_suite`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tutti
import warm
from tutti.errors import ConfigError
from tutti.launch.mpi import rules_in
from tutti.launch.mpirun import available, mpirun
from tutti.transports.mpi.algorithms import ALLREDUCE_ALGORITHMS, Rules, fixed_choice

FOLDER = Path(__file__).parent

needs_mpi = pytest.mark.skipif(not available(), reason="needs mpi4py and mpirun: pip install 'tutti-train[mpi]'")


def run(command: list[str], workers: int = 4) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        mpirun(workers, command),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default", "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )


@needs_mpi
@pytest.mark.parametrize(
    ("transport", "checks", "workers"),
    [("mpi", [], 4), *((f"mpi:{name}", ["reductions"], 3) for name in ALLREDUCE_ALGORITHMS)],
)
def test_the_contract_holds(transport: str, checks: list[str], workers: int) -> None:
    """Four ranks get Open MPI's own choices; three are the odd number that some of its algorithms have to make even."""
    ended = run([*warm.main_of("mpi_suite"), transport, *checks], workers)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sorted(re.findall(r"rank (\d) is content", ended.stdout)) == list("0123")[:workers]


@needs_mpi
def test_every_collective_in_worlds_of_up_to_five() -> None:
    ended = run(warm.main_of("mpi_collectives"), workers=5)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sorted(re.findall(r"rank (\d) is content", ended.stdout)) == list("01234")


@needs_mpi
def test_a_rank_that_leaves_is_named_and_all_end() -> None:
    ended = run([*warm.main_of("mpi_suite"), "mpi", "loss"], workers=3)
    assert ended.returncode != 0
    assert sorted(re.findall(r"rank (\d) knows", ended.stdout)) == list("02"), ended.stdout + ended.stderr


@needs_mpi
def test_a_rank_that_fails_is_named_and_all_end() -> None:
    script = """if True:
        import torch, tutti
        world = tutti.init(transport="mpi")
        world.transport.all_reduce(torch.ones(1)).wait()
        1 / world.rank
        world.transport.channel("rank 0 does not come")
    """
    ended = run([*warm.python(), "-c", script], workers=2)
    assert ended.returncode != 0
    assert "ZeroDivisionError" in ended.stderr
    assert "MPI_ABORT was invoked on rank 0" in ended.stderr


@needs_mpi
def test_what_init_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before MPI starts: so it may be tried here."""
    with pytest.raises(ConfigError, match="needs ranks that mpirun started, and this one was started by nobody"):
        tutti.init(transport="mpi")
    with pytest.raises(ConfigError, match=r"Did you mean 'ring'\?"):
        tutti.init(transport="mpi:rign")
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", sys)
    with pytest.raises(ConfigError, match="--mca coll_tuned_allreduce_algorithm 4"):
        tutti.init(transport="mpi:ring")


def test_mpi_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigError, match=r"pip install 'tutti-train\[mpi\]'"):
        tutti.init(transport="mpi")


@pytest.mark.parametrize(
    ("num_ranks", "num_bytes", "name"),
    [
        (2, 0, "ring"),
        (3, 4095, "recursive_doubling"),
        (2, 2**20, "rabenseifner"),
        (4, 8191, "recursive_doubling"),
        (7, 8192, "rabenseifner"),
        (8, 4, "recursive_doubling"),
        (100, 2**17, "recursive_doubling"),
        (10_000, 20_000, "recursive_doubling"),
    ],
)
def test_what_open_mpi_picks_by_itself(num_ranks: int, num_bytes: int, name: str) -> None:
    assert fixed_choice(num_ranks, num_bytes) == name


def test_which_component_reduces() -> None:
    assert Rules().name(["a", "a", "b", "b"], 1024) == "han"
    assert Rules(han=False, algorithm="ring").name(["a", "a", "b", "b"], 1024) == "ring"
    assert Rules().name(["a", "b", "c", "d"], 1024) == "recursive_doubling"
    assert Rules().name(["a"], 1024) == "self"


def test_what_mpirun_was_told() -> None:
    chosen = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "true", "OMPI_MCA_coll_tuned_allreduce_algorithm": "4"}
    assert rules_in({}) == Rules()
    assert rules_in(chosen) == Rules(algorithm="ring")
    assert rules_in({"OMPI_MCA_coll_tuned_allreduce_algorithm": "4"}) == Rules()
    assert rules_in({**chosen, "OMPI_MCA_coll": "^han,sm"}) == Rules(algorithm="ring", han=False)
    assert rules_in({"OMPI_MCA_coll": "tuned,basic"}) == Rules(han=False)
    assert rules_in({"OMPI_MCA_coll": "tuned,han"}) == Rules()
