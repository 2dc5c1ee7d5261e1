"""N workers equal one with every all-reduce algorithm, in worlds of 1 to 5 ranks, on every transport.

Sums are taken by every algorithm in every world. Training, in which they are the same sums, is by a third of the
algorithms in each: together, every algorithm trains in worlds of every size and on every transport.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

import warm
from equivalence.algorithms import check_all
from equivalence.scenarios import device
from support import SIMULATED, TRANSPORTS, run_ok
from tutti.launch.mpirun import available, mpirun

SIZES = (1, 2, 3, 4, 5)
WORLDS = (*TRANSPORTS, "hosts", *SIMULATED)
MPI_RANKS = 3
"""Ranks of MPI are processes that spin while they wait: more of them than cores only take turns."""


@pytest.mark.skipif(device() == "cuda", reason="ranks that are threads share torch's one backward thread per GPU")
@pytest.mark.parametrize("transport", WORLDS)
@pytest.mark.parametrize("size", SIZES)
def test_every_algorithm(transport: str, size: int) -> None:
    third = (WORLDS.index(transport) + size) % 3
    assert run_ok(check_all, third, size=size, transport=transport) == [True] * size


@pytest.mark.skipif(not available(), reason="needs mpi4py and mpirun: pip install 'tutti-train[mpi]'")
def test_every_algorithm_and_scenario_over_mpi() -> None:
    tests = Path(__file__).parent.parent
    path = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        mpirun(MPI_RANKS, warm.main_of("equivalence.mpi_equivalence")),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default", "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sorted(re.findall(r"rank (\d) is content", ended.stdout)) == list("012")
