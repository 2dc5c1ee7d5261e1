"""The same script under every launcher that `tutti.init` knows."""

import os
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

import warm
from tutti.bench import under_mpi
from tutti.launch.environment import read_environment

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "train_a_little.py")

ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "TUTTI_TIMEOUT": "40"}


class Line(NamedTuple):
    rank: int
    size: int
    local_rank: int
    steps: int
    transport: str
    digest: str


def lines_in(output: str) -> list[Line]:
    """What the ranks printed, by rank."""
    found = re.findall(r"rank (\d+) of (\d+), local (\d+), (\d+) steps, (\w+): ([0-9a-f]{64})", output)
    return sorted(Line(*map(int, numbers), kind, digest) for *numbers, kind, digest in found)


def trained(output: str) -> str:
    """Where the parameters ended, the same on both ranks."""
    lines = lines_in(output)
    assert [(line.rank, line.size, line.local_rank) for line in lines] == [(0, 2, 0), (1, 2, 1)], output
    assert len({line.digest for line in lines}) == 1, output
    # 22 samples in batches of 4: two steps of 4 and 4, and one of the 6 left; twice over.
    assert {line.steps for line in lines} == {6}
    assert {line.transport for line in lines} == {"SharedMemoryTransport"}
    return lines[0].digest


def run(*command: str) -> str:
    ended = subprocess.run(
        command,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=55,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.fixture(scope="module")
def digest() -> str:
    """Where the parameters end under Tutti's own launcher."""
    return trained(run(*warm.main_of("tutti.cli"), "run", "-n2", SCRIPT))


def test_torchrun(digest: str) -> None:
    """The ranks are started by torchrun's agent, as any command is."""
    launcher = [*warm.python(), "-c", "from torch.distributed.run import main; main()"]
    options = ["--standalone", "--nproc-per-node", "2", "--no-python"]
    assert trained(run(*launcher, *options, *warm.python(), SCRIPT)) == digest


def test_mpirun(digest: str) -> None:
    if not under_mpi.available():
        pytest.skip("needs mpi4py and mpirun: pip install 'tutti-train[mpi]'")
    beside = Path(sys.executable).parent / "mpirun"
    command = [str(beside) if beside.exists() else "mpirun", "--oversubscribe", "--bind-to", "none", "-n", "2"]
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    assert trained(run(*command, *warm.python(), SCRIPT)) == digest


def slurm_variables() -> dict[str, str]:
    """Of a job whose number gives a port that is free here."""
    for job in range(1, 300):
        variables = {
            "SLURM_JOB_ID": str(job),
            "SLURM_STEP_ID": "1",
            "SLURM_NTASKS": "2",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_STEP_NUM_NODES": "1",
        }
        place = read_environment({**variables, "SLURM_PROCID": "0"})
        with socket.socket() as probe, suppress(OSError):
            probe.bind((place.address, place.port))
            return variables
    pytest.fail("no port is free")


def test_srun(digest: str) -> None:
    """Slurm's variables, set by hand on two processes; the port follows from the job's number."""
    variables = slurm_variables()
    ranks = [
        subprocess.Popen(
            [*warm.python(), SCRIPT],
            env={**ENVIRONMENT, **variables, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output = "".join(process.communicate(timeout=50)[0] for process in ranks)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert [process.returncode for process in ranks] == [0, 0], output
    assert trained(output) == digest
