"""Workers that cannot join an elastic run: each gets an error that says why, and the run trains on."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import tutti
from command import Call
from started_command import Command

SCRIPT = """
import os, sys, torch, tutti
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
world = tutti.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, WIDTH), torch.nn.Linear(WIDTH, 8)).to(torch.DTYPE)
optimizer = torch.optim.OPTIMIZER(model.parameters(), lr=0.01)
job = tutti.distribute(model, optimizer, "STRATEGY")
batches = tutti.shard(DataLoader(TensorDataset(torch.randn(LENGTH, 8).to(torch.DTYPE)), batch_size=BATCH))
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
    if job.reduce(float(os.path.exists("stop"))) > 0:
        break
job.finish()
"""
RIGHT = {
    **{"WIDTH": "8", "DTYPE": "float32", "OPTIMIZER": "SGD", "STRATEGY": "ring", "LENGTH": "600", "BATCH": "4"},
}
SECRET = os.urandom(16).hex()


def write_script(path: Path, **values: str) -> None:
    text = SCRIPT
    for name, value in {**RIGHT, **values}.items():
        text = text.replace(name, value)
    path.write_text(text)


class Run:
    """A run of two workers, for up to three, that others may join."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_script(folder / "train.py")
        words = ("--workers", "1:3", "--start", "2", "--listen", "127.0.0.1", "train.py")
        self.command = Command(folder, "run", *words, TUTTI_SECRET=SECRET, XDG_STATE_HOME=str(folder / "state"))
        self.address = self.command.until("tutti join 127.0.0.1:").split()[-2]
        self.command.until("[rank 0] size 2", "[rank 1] size 2")

    def join(self, script: str, *words: str) -> Command:
        return Command(self.folder, "join", self.address, *words, script, TUTTI_SECRET=SECRET)

    def end(self) -> None:
        (self.folder / "stop").touch()
        assert self.command.end() == 0, self.command.lines


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One run for all of these tests, which comes to its end behind the last of them."""
    made = Run(tmp_path_factory.mktemp("run"))
    with closing(made.command):
        yield made
        made.end()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"WIDTH": "9"}, "cannot join the job, whose model is Sequential with 4 tensors"),
        ({"DTYPE": "float64"}, "cannot join the job, whose model is Sequential with 4 tensors"),
        ({"OPTIMIZER": "Adam"}, "cannot join the job, whose optimiser is SGD with groups of [4] parameters"),
        ({"STRATEGY": "bmuf:every=4"}, "cannot join the job, whose strategy is ring"),
        ({"STRATEGY": "rimg"}, "unknown strategy 'rimg'"),
        ({"LENGTH": "500"}, "which train on other data: its number of samples was 600, and is 500 now"),
        ({"BATCH": "2"}, "which train on other data: its batch_size was 4, and is 2 now"),
    ],
    ids=str,
)
def test_a_worker_with_another_script(values: dict[str, str], message: str, run: Run) -> None:
    write_script(run.folder / "other.py", **values)
    with closing(run.join("other.py")) as joiner:
        assert joiner.end() == 1, joiner.lines
    text = "".join(joiner.lines)
    assert message in text, text
    assert "takes its place" not in text, "the mistake would be the same again"
    if "other data" in message:  # Data is made after the worker has joined.
        run.command.until("[rank 0] size 3", "[rank 1] size 3")
        run.command.until("[rank 0] size 2", "[rank 1] size 2")


def test_a_launcher_with_another_version(run: Run, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tutti, "__version__", "0.0.1")
    monkeypatch.setenv("TUTTI_SECRET", SECRET)
    refused = call("join", run.address, str(run.folder / "train.py"))
    assert refused.status != 0
    text = " ".join(refused.err.split())
    assert "it runs Tutti 0.0.1, and the coordinator of this job runs" in text, text
    assert "install the same version on every host" in text


def test_a_launcher_with_another_secret(run: Run, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTTI_SECRET", os.urandom(16).hex())
    refused = call("join", run.address, str(run.folder / "train.py"))
    assert (refused.status != 0, "has another secret than this process" in refused.err) == (True, True), refused.err


def test_a_full_job(run: Run) -> None:
    with closing(run.join("train.py", "--workers", "2")) as joiner:
        assert joiner.end() == 2, joiner.lines
        assert "has 2 workers, and at most 3 are allowed: 2 more cannot join" in joiner.lines[-1]
    with closing(run.join("train.py")) as joiner:
        run.command.until("[rank 0] size 3", "[rank 1] size 3")
        (run.folder / "stop").touch()
        assert joiner.end() == 0, joiner.lines
