"""`tutti run --workers MIN:MAX` and what users do to such a run: `tutti workers`, `tutti join`, Ctrl-C."""

import os
import signal
import socket
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
    with closing(Command(folder, "run", "--workers", "2:3", "train.py")) as run:
        run.until("size 3")
        full = call("workers", "add")
        assert (full.status, "the run has 3 workers, and at most 3 are allowed" in full.err) == (2, True)
        unknown = call("workers", "remove", "7")
        assert (unknown.status, "it runs rank 0, 1, 2" in unknown.err) == (2, True)
        assert call("workers", "remove", "1").out == "rank 1 is asked to leave\n"
        run.until("rank 1 has left the run", "[rank 0] size 2", "[rank 2] size 2")
        too_few = call("workers", "remove", "0")
        assert (too_few.status, "the run has 2 workers, and needs 2" in too_few.err) == (2, True)
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
def test_workers_of_another_launcher_join(
    by_pipe: bool, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = os.urandom(16).hex()
    words = ("run", "--workers", "1:3", "--start", "2", "--listen", "127.0.0.1", "train.py")
    with closing(Command(folder, *words, TUTTI_SECRET=secret)) as run:
        where = run.until("tutti join 127.0.0.1:").split()[-2]
        run.until("size 2")
        for variable, message in ((secret, "has 2 workers, and at most 3 are allowed"), ("x" * 16, "another secret")):
            monkeypatch.setenv("TUTTI_SECRET", variable)
            refused = call("join", where, "--workers", "2", str(folder / "train.py"))
            assert (refused.status, message in refused.err) == (2, True), refused.err
        monkeypatch.delenv("TUTTI_SECRET")
        given = {} if by_pipe else {"TUTTI_SECRET": secret}
        with closing(Command(folder, "join", where, "--workers", "1", "train.py", **given)) as join:
            if by_pipe:
                join.give(f"{secret}\n")
            join.until("[rank 4] size 3")  # Two numbers were of those that were refused.
            assert "no worker with rank 4" in call("workers", "remove", "4").err, "its own launcher runs it"
            if by_pipe:
                join.signal(signal.SIGINT)
                assert join.end() == 128 + signal.SIGINT, join.lines
                run.until("[rank 0] size 2", "[rank 1] size 2")
            (folder / "stop").touch()
            assert run.end() == 0, run.lines
            assert by_pipe or join.end() == 0, join.lines
            assert not [line for line in (*run.lines, *join.lines) if "Traceback" in line]


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
        (["--workers", "1:3", "--start", "4"], "start must be from 1 to 3, the maximum of workers, got 4"),
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


def test_joining_what_is_not_there(folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(folder / "train.py")
    assert "as tutti run has printed it" in call("join", "127.0.0.1", script).err
    assert "there is no script" in call("join", "127.0.0.1:1", "--workers", "2", "none.py").err
    monkeypatch.setenv("TUTTI_SECRET", "short")
    assert "a secret needs 16 characters or more, got 5" in call("join", "127.0.0.1:1", script).err
    monkeypatch.setenv("TUTTI_SECRET", "x" * 16)
    with socket.create_server(("127.0.0.1", 0)) as server:
        dead = f"127.0.0.1:{server.getsockname()[1]}"
    said = call("join", dead, script).err
    assert f"error: nobody answers at {dead}" in said
    assert "The run's launcher has ended or is stopped, the address is another one, or a firewall is between" in said
    monkeypatch.delenv("TUTTI_SECRET")
    monkeypatch.setattr("sys.stdin", None)  # As with <&-.
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    assert "this host has no secret: set TUTTI_SECRET to that of the run" in call("join", dead, script).err
    assert not (folder / "config").exists()
