"""`tutti join` on another host: two network namespaces, and a run in one of them that workers of the other join."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import tutti
from started_command import Command
from tutti.launch.lab import namespaces
from tutti.launch.lab.lab import Lab, address, missing

pytestmark = [pytest.mark.xdist_group("labs"), pytest.mark.skipif(missing() is not None, reason=str(missing()))]

SCRIPT = """
import os, sys, torch, tutti
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
world = tutti.init()
if world.elastic.is_new:
    try:
        torch.distributed.init_process_group("gloo")
    except ValueError as error:
        print("no group:", error, flush=True)
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
job = tutti.distribute(model, optimizer, sys.argv[1])
batches = tutti.shard(DataLoader(TensorDataset(torch.randn(600, 8)), batch_size=4, shuffle=True))
size = 0
for epoch in batches.epochs(100_000):
    for (x,) in epoch:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.size != size:
            size = world.size
            print("size", size, flush=True)
    if job.reduce(float(os.path.exists("stop")), "sum") >= world.size:
        break
job.finish()
print("end", size, job.steps, float(model.weight.detach().sum()), flush=True)
"""
SECRET = os.urandom(16).hex()


@pytest.fixture
def lab() -> Iterator[Lab]:
    with tutti.lab(2, name=f"join-{os.getpid()}") as made:
        yield made


def command_on(lab: Lab, host: int, folder: Path, *words: str) -> Command:
    """Start a command on a host, which has a registry of runs of its own."""
    prefix = namespaces.prefix(lab.placement.hosts[host].namespace or "")
    state = str(folder / f"state{host}")
    return Command(folder, *words, prefix=prefix, TUTTI_SECRET=SECRET, XDG_STATE_HOME=state)


def ends(command: Command) -> list[str]:
    """What the workers of a command say at their end, without their ranks."""
    return [line.partition("] ")[2].strip() for line in command.lines if "] end " in line]


@pytest.mark.parametrize("strategy", ["native", "ps:bsp"])
def test_workers_of_another_host_join(strategy: str, lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("run", "--workers", "1:4", "--start", "2", "--listen", address(0), "train.py", strategy)
    with closing(command_on(lab, 0, tmp_path, *words)) as run:
        where = run.until(f"tutti join {address(0)}:").split()[-2]
        run.until("[rank 0] size 2", "[rank 1] size 2")
        with closing(command_on(lab, 1, tmp_path, "join", where, "--workers", "2", "train.py", strategy)) as join:
            join.until("[rank 2] size 4", "[rank 3] size 4")
            (tmp_path / "stop").touch()
            assert run.end() == 0, run.lines
            assert join.end() == 0, join.lines
    # Torch's own groups have a fixed number of members.
    assert sum("environment variable MASTER_PORT expected, but not set" in line for line in join.lines) == 2
    said = ends(run) + ends(join)
    assert len(said) == 4, run.lines + join.lines
    assert len(set(said)) == 1, said
    assert said[0].startswith("end 4 ")


def test_the_others_go_on_when_the_host_that_joined_is_gone(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("run", "--workers", "1:3", "--start", "1", "--listen", address(0), "train.py", "native")
    with closing(command_on(lab, 0, tmp_path, *words)) as run:
        where = run.until(f"tutti join {address(0)}:").split()[-2]
        run.until("[rank 0] size 1")
        with closing(command_on(lab, 1, tmp_path, "join", where, "train.py", "native")) as join:
            run.until("[rank 0] size 2")
            join.until("[rank 1] size 2")
        run.until("[rank 0] size 1")  # Its command was killed, and its worker with it.
        (tmp_path / "stop").touch()
        assert run.end() == 0, run.lines
    assert len(ends(run)) == 1
