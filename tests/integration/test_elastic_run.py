"""`tutti run --workers MIN:MAX` and what users do to such a run: `tutti workers`, `tutti join`, Ctrl-C."""

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

from command import Call
from started_command import Command
from tutti.checkpoint.index import newest_complete

SCRIPT = """
import os, sys, time, torch, tutti
from torch.utils.data import DataLoader, TensorDataset

world = tutti.init()
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job = tutti.distribute(model, optimizer, "ring")
batches = tutti.shard(DataLoader(TensorDataset(torch.randn(600, 8)), batch_size=4))
print("joined", flush=True)
size = 0
for epoch in batches.epochs(100_000):
    for (x,) in epoch:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.size != size:
            size = world.size
            print("size", size, flush=True)
        if len(sys.argv) > 1:
            job.checkpoint("run", batches, every="1h")
    if job.reduce(float(os.path.exists("stop"))) > 0:
        break
job.finish()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the script, and a registry of runs in which no other run of this machine is."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_users_add_and_remove_workers(folder: Path, call: Call) -> None:
    with closing(Command(folder, "run", "--workers", "1:3", "train.py")) as run:
        run.until("size 3")
        full = call("workers", "add")
        assert (full.status, "the run has 3 workers, and at most 3 are allowed" in full.err) == (2, True)
        unknown = call("workers", "remove", "7")
        assert (unknown.status, "it runs rank 0, 1, 2" in unknown.err) == (2, True)
        assert call("workers", "remove", "1").out == "rank 1 is asked to leave\n"
        run.until("rank 1 has left the run", "[rank 0] size 2", "[rank 2] size 2")
        assert call("workers", "add").out == "rank 3 was started\n"
        run.until("[rank 3] size 3")
        (folder / "stop").touch()
        assert run.end() == 0, run.lines


def test_workers_of_a_fixed_run_stay(folder: Path, call: Call) -> None:
    with closing(Command(folder, "run", "--workers", "2", "train.py")) as run:
        run.until("size 2")
        refused = call("workers", "add")
        assert (refused.status, "fixed number of workers" in refused.err) == (2, True)


@pytest.mark.parametrize("by_pipe", [False, True], ids=["by variable", "by pipe"])
def test_workers_of_another_launcher_join(by_pipe: bool, folder: Path, call: Call) -> None:
    secret = os.urandom(16).hex()
    words = ("run", "--workers", "1:3", "--start", "2", "--listen", "127.0.0.1", "train.py")
    with closing(Command(folder, *words, TUTTI_SECRET=secret)) as run:
        where = run.until("tutti join 127.0.0.1:").split()[-2]
        run.until("size 2")
        given = {} if by_pipe else {"TUTTI_SECRET": secret}
        with closing(Command(folder, "join", where, "--workers", "1", "train.py", **given)) as join:
            if by_pipe:
                join.give(f"{secret}\n")
            join.until("[rank 2] size 3")
            assert "no worker with rank 2" in call("workers", "remove", "2").err, "its own launcher runs it"
            (folder / "stop").touch()
            assert run.end() == 0, run.lines
            assert join.end() == 0, join.lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("saves", [False, True], ids=["without checkpoints", "with checkpoints"])
def test_a_stopped_run(number: signal.Signals, saves: bool, folder: Path) -> None:
    with closing(Command(folder, "run", "--workers", "1:2", "train.py", *(["save"] if saves else []))) as run:
        run.until("size 2")
        run.signal(number)
        assert run.end() == 128 + number, run.lines
    assert ((folder / "run").exists() and newest_complete(folder / "run") is not None) == saves
    assert not [line for line in run.lines if "Traceback" in line]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "8:2"], "the minimum is 1 or more and not above the maximum, got '8:2'"),
        (["--workers", "0:3"], "the minimum is 1 or more"),
        (["--workers", "a:b"], "must be a number of workers, or MIN:MAX, got 'a:b'"),
        (["--workers", "3", "--restarts", "2"], "--restarts needs a number of workers that may change"),
        (["--workers", "3", "--chaos", "join at 3s", "--listen", "h"], "--chaos, --listen needs"),
        (["--workers", "1:3", "--start", "4"], "the number of workers to start is from 1 to 3, got 4"),
        (["--workers", "1:3", "--chaos", "jump"], "'jump' is not one of"),
        (["--workers", "1:3", "--restarts", "0", "--chaos", "kill any every 2s"], "could leave no worker at all"),
        (["--workers", "1:3", "--listen", "192.0.2.7"], "cannot listen on 192.0.2.7"),
        (["--workers", "1:3", "--listen", "127.0.0.1:99999"], "with a port up to 65535"),
        (["--workers", "2:5", "--strategy", "gossip:graph=hypercube"], "hypercube"),
    ],
)
def test_what_cannot_be(options: list[str], message: str, folder: Path, call: Call) -> None:
    refused = call("run", *options, str(folder / "train.py"))
    assert refused.status == 2
    assert message in " ".join(refused.err.split()), refused.err


def test_joining_what_is_not_there(folder: Path, call: Call) -> None:
    script = str(folder / "train.py")
    assert "as tutti run has printed it" in call("join", "127.0.0.1", script).err
    assert "there is no script" in call("join", "127.0.0.1:1", "--workers", "2", "none.py").err
