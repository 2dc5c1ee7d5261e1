"""SIGTERM, SIGUSR1 and Ctrl-C during training: one more checkpoint, and the run continues from it."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

import warm
from tutti.checkpoint.index import newest_complete, read_index

SCRIPT = """
import sys, torch, tutti
from torch.utils.data import DataLoader, TensorDataset

world = tutti.init()
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job = tutti.distribute(model, optimizer, sys.argv[1])
workers, first, samples = map(int, sys.argv[3:])
data = TensorDataset(torch.randn(samples, 8))
batches = tutti.shard(DataLoader(data, batch_size=4, num_workers=workers))
restored = job.restore("run", batches)
tutti.print("continues from", restored and restored.steps, flush=True)
for epoch in batches.epochs(int(sys.argv[2])):
    for number, (x,) in enumerate(epoch):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if job.is_leader and job.steps == first:
            print("trains", flush=True)
        job.checkpoint("run", batches, every="1h")
job.finish()
tutti.print("done", flush=True)
"""

NUM_MOMENTS = 3
ENDLESS, SHORT = "100000", "1"


def start(
    folder: Path, strategy: str, epochs: str, loader_workers: int = 0, *, first: int = 20, samples: int = 4000
) -> subprocess.Popen[str]:
    """Start a run that prints "trains" after `first` steps."""
    (folder / "train.py").write_text(SCRIPT)
    arguments = [strategy, epochs, *map(str, (loader_workers, first, samples))]
    command = [*warm.main_of("tutti.cli"), "run", "--workers", "2", "train.py", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("number", "strategy"),
    [(signal.SIGTERM, "native"), (signal.SIGUSR1, "bmuf:every=4"), (signal.SIGINT, "ps:async")],
    ids=str,
)
def test_a_stopped_run_writes_one_more_checkpoint(number: int, strategy: str, tmp_path: Path) -> None:
    run = start(tmp_path, strategy, ENDLESS)
    assert run.stdout is not None
    while "trains" not in run.stdout.readline():
        assert run.poll() is None
    run.send_signal(number)
    _, err = run.communicate(timeout=25)
    assert run.returncode == 128 + number, err
    assert "stopping after a last checkpoint" in err
    folder = newest_complete(tmp_path / "run")
    assert folder is not None
    assert f"Continue from run/{folder.name}" in err
    again = start(tmp_path, strategy, SHORT)
    out, err = again.communicate(timeout=25)
    assert again.returncode == 0, err
    assert f"continues from {read_index(folder).steps}" in out


def processes_of_run() -> list[int]:
    """The launcher and all that descend from it: what the warm server has started."""
    found = warm.server_pids()
    for process in found:
        with suppress(FileNotFoundError, ProcessLookupError):  # It has ended.
            for task in Path(f"/proc/{process}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found[1:]


@pytest.mark.parametrize(
    ("number", "strategy", "everywhere"),
    [(signal.SIGTERM, "ring", False), (signal.SIGTERM, "ring", True), (signal.SIGUSR1, "ps:async,servers=1", True)],
    ids=str,
)
def test_nobody_whom_the_loop_needs_ends_before_the_last_checkpoint(
    number: int, strategy: str, everywhere: bool, tmp_path: Path
) -> None:
    """A signal to every process, as schedulers send it: to workers of a DataLoader, servers, the launcher's own."""
    run = start(tmp_path, strategy, ENDLESS, loader_workers=1)
    assert run.stdout is not None
    while "trains" not in run.stdout.readline():
        assert run.poll() is None
    for process in processes_of_run() if everywhere else [run.pid]:
        os.kill(process, number)
    _, err = run.communicate(timeout=25)
    assert run.returncode == 128 + number, err
    assert newest_complete(tmp_path / "run") is not None, err


@pytest.mark.parametrize("seed", range(NUM_MOMENTS))
def test_sigterm_to_all_processes_at_any_moment(seed: int, tmp_path: Path) -> None:
    """Epochs of ten steps: workers of the DataLoaders start and end all the time."""
    moments = Random(seed)
    run = start(tmp_path, "ring", ENDLESS, loader_workers=2, first=moments.randrange(2, 60), samples=80)
    assert run.stdout is not None
    while "trains" not in run.stdout.readline():
        assert run.poll() is None
    processes = processes_of_run()
    moments.shuffle(processes)
    for process in processes:
        with suppress(ProcessLookupError):  # A worker whose epoch has ended.
            os.kill(process, signal.SIGTERM)
    _, err = run.communicate(timeout=25)
    assert run.returncode == 128 + signal.SIGTERM, err
    assert newest_complete(tmp_path / "run") is not None, err


def test_a_run_that_cannot_save_in_time_is_ended(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace('every="1h")', 'every="1h") if job.steps < 20 else None'))
    words = ["run", "--workers", "2", "--grace", "1s", "train.py", "native", ENDLESS, "0", "20", "4000"]
    command = [*warm.main_of("tutti.cli"), *words]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    while "trains" not in run.stdout.readline():
        assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=25)
    assert run.returncode == 128 + signal.SIGTERM, err
    assert "still not at an end 1 s after SIGTERM" in err
    assert not (tmp_path / "run").exists() or newest_complete(tmp_path / "run") is None
