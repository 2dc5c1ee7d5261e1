"""`tutti submit slurm` on a Slurm cluster of one host, made for these tests; `make test-slurm` installs Slurm."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import slurm_cluster
from command import Call

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.timeout(200)]  # Slurm looks at its queue every few seconds.

GOLDEN = Path(__file__).parents[1] / "scripts" / "train.sbatch"
TRAIN = Path(__file__).parents[1] / "scripts" / "train_a_little.py"

LONG = """
import os, torch, tutti, time
from torch.utils.data import DataLoader, TensorDataset

world = tutti.init()
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job = tutti.distribute(model, optimizer, "ring")
batches = tutti.shard(DataLoader(TensorDataset(torch.randn(600, 8)), batch_size=4))
restored = job.restore("run", batches)
print(f"starts with {restored is not None} in attempt {os.environ.get('SLURM_RESTART_COUNT', 0)}", flush=True)
for epoch in batches.epochs(100_000):
    for (x,) in epoch:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
        job.checkpoint("run", batches, every="1h")
    if job.reduce(float(os.path.exists("stop"))) > 0:
        break
job.finish()
print("has finished", flush=True)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables by which Slurm's commands find a cluster with 8 CPUs, on one node."""
    if (lacking := slurm_cluster.lacking()) is not None:
        pytest.skip(lacking)
    with slurm_cluster.slurm_cluster(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text(LONG)
    return tmp_path


@pytest.fixture
def slurm(cluster: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder, from which jobs can be submitted. They are cancelled in the end."""
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    yield folder
    tool("scancel", "--state=PENDING", "--user=root")
    tool("scancel", "--full", "--user=root")
    wait_until(lambda: not tool("squeue", "-h"))


def tool(*command: str) -> str:
    """What a command of Slurm's prints."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL, check=False)
    return ended.stdout + ended.stderr


def wait_until(what: Callable[[], object], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, tool("squeue", "-l")
        time.sleep(0.1)


def output_until(file: str, text: str) -> str:
    path = Path(file)
    wait_until(lambda: path.exists() and text in path.read_text())
    return path.read_text()


def state(job: str) -> str:
    match = re.search(r"JobState=(\w+)", tool("scontrol", "show", "job", job))
    return match[1] if match else ""


def submit(call: Call, *words: str) -> str:
    """Submit; return the number of the job."""
    ended = call("submit", "slurm", *words)
    assert ended.status == 0, ended.err
    return re.findall(r"job (\d+) was submitted; its output comes into", ended.out)[0]


def test_the_script(call: Call, folder: Path) -> None:
    """As the golden file has it: a change to it is a change that users see."""
    words = ["--nodes", "4", "--workers-per-node", "2", "--cpus-per-worker", "8", "--time", "4:00:00"]
    words += ["--partition", "gpu", "--account", "vision", "--array", "0-3%2", "--extra", "#SBATCH --gres=gpu:2"]
    words += ["--strategy", "bmuf:every=16", "--checkpoint-every", "5m", "--print"]
    ended = call("submit", "slurm", *words, "train.py", "--seed", "%a", "--name", "a run", "--out", "run-%a/x")
    assert ended.out.replace(str(folder), "/home/me/work").replace(sys.executable, "/home/me/venv/bin/python") == (
        GOLDEN.read_text()
    )


def test_without_requeues(call: Call, folder: Path) -> None:
    text = call("submit", "slurm", "--requeues", "0", "--print", "train.py").out
    assert "#SBATCH --no-requeue\n" in text
    assert "scontrol" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--nodes", "0", "--workers-per-node", "-1"],
            "--nodes must be 1 or more, got 0; --workers-per-node .* got -1",
        ),
        (["--nodes", "2", "--workers", "3:4"], "3 to 4 workers do not fit these nodes, on which 2 are started"),
        (["--time", "soon"], "--time is minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS, got 'soon'"),
        (["--array", "all"], "--array has numbers such as 0-7 or 1,3,5%2, got 'all'"),
        (["--extra", "gres"], "--extra is an option of sbatch, such as --gres=gpu:2, got 'gres'"),
        (["--extra", "--x\n#SBATCH --y"], "an option of sbatch is one line of text"),
        (["--strategy", "ringg"], "ringg"),
    ],
)
def test_what_cannot_work(words: list[str], message: str, call: Call, folder: Path) -> None:
    ended = call("submit", "slurm", *words, "--print", "train.py")
    assert ended.status == 2
    assert re.search(message, " ".join(ended.err.split())), ended.err


def test_the_number_of_a_task_without_an_array(call: Call, folder: Path) -> None:
    assert "give --array" in call("submit", "slurm", "--print", "train.py", "--seed", "%a").err


def test_no_script_and_no_slurm(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no script 'nothing.py'" in call("submit", "slurm", "nothing.py").err
    monkeypatch.setenv("PATH", "/nowhere")
    ended = call("submit", "slurm", "train.py")
    assert ended.status == 2
    assert "there is no sbatch here" in ended.err


def test_training_ends_as_elsewhere(slurm: Path, call: Call) -> None:
    shutil.copy(TRAIN, slurm / "little.py")
    job = submit(call, "--workers-per-node", "3", "little.py")
    wait_until(lambda: state(job) in ("COMPLETED", "FAILED"))
    text = (slurm / f"little-{job}.out").read_text()
    lines = re.findall(r"(\d): rank \1 of 3, local \1, .*: (\w{64})", text)
    assert sorted(rank for rank, _ in lines) == ["0", "1", "2"], text
    assert len({digest for _, digest in lines}) == 1
    assert state(job) == "COMPLETED"


def test_a_job_whose_nodes_are_taken_continues(slurm: Path, call: Call) -> None:
    job = submit(call, "--workers-per-node", "2", "--partition", "low", "train.py")
    output = f"train-{job}.out"
    output_until(output, "starts with False in attempt 0")
    tool("sbatch", "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=true")
    output_until(output, "Continue from run/step-")
    wait_until(lambda: state(job) == "PENDING")
    tool("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm lets a requeued job wait for two minutes.
    (slurm / "stop").touch()
    text = output_until(output, "has finished")
    assert "starts with True in attempt 1" in text, text
    wait_until(lambda: state(job) == "COMPLETED")


def test_a_job_whose_time_is_nearly_up_continues(slurm: Path, call: Call) -> None:
    """The signal of `--signal`, which Slurm would send after minutes, is sent here by hand."""
    job = submit(call, "--workers-per-node", "2", "train.py")
    output = f"train-{job}.out"
    output_until(output, "starts with False in attempt 0")
    tool("scancel", "--signal=USR1", job)
    output_until(output, "Continue from run/step-")
    wait_until(lambda: state(job) == "PENDING")
    assert "Restarts=1" in tool("scontrol", "show", "job", job)


def test_a_worker_is_killed_and_replaced(slurm: Path, call: Call) -> None:
    """With limits on the number of workers the job goes on, and comes back when it was stopped."""
    (slurm / "train.py").write_text(LONG.replace('print(f"starts', 'print(f"pid {os.getpid()} starts'))
    job = submit(call, "--workers-per-node", "2", "--workers", "1:2", "train.py")
    output = f"train-{job}.out"
    text = output_until(output, "[rank 1] pid ")
    os.kill(int(re.findall(r"\[rank 1\] pid (\d+)", text)[0]), signal.SIGKILL)
    output_until(output, "[rank 2] pid ")
    tool("scancel", "--signal=TERM", job)
    output_until(output, "Continue from run/step-")
    wait_until(lambda: state(job) == "PENDING")


def test_a_cancelled_job_does_not_come_back(slurm: Path, call: Call) -> None:
    job = submit(call, "--workers-per-node", "2", "train.py")
    output_until(f"train-{job}.out", "starts with False")
    tool("scancel", job)
    wait_until(lambda: not tool("squeue", "-h"))
    assert state(job) == "CANCELLED"


def test_a_failure_is_no_reason_to_come_back(slurm: Path, call: Call) -> None:
    (slurm / "fails.py").write_text("import sys; print('no luck'); sys.exit(7)")
    job = submit(call, "--workers-per-node", "2", "fails.py")
    wait_until(lambda: state(job) == "FAILED")
    assert "ExitCode=7:0" in tool("scontrol", "show", "job", job)


def test_an_array_is_a_sweep(slurm: Path, call: Call) -> None:
    (slurm / "sweep.py").write_text("import sys; print('arguments', sys.argv[1:])")
    job = submit(call, "--array", "2-4", "sweep.py", "--seed", "%a", "--out", "runs/%a.txt", "--name", "it's")
    for number in (2, 3, 4):
        text = output_until(f"sweep-{job}_{number}.out", "arguments")
        assert f"['--seed', '{number}', '--out', 'runs/{number}.txt', '--name', \"it's\"]" in text


def test_a_cluster_without_room(slurm: Path, call: Call) -> None:
    for words in (["--nodes", "5"], ["--workers-per-node", "9"]):
        ended = call("submit", "slurm", *words, "train.py")
        assert ended.status == 2
        assert re.search(r"Slurm refuses the job: .*low: 1 nodes with 8 CPUs", " ".join(ended.err.split())), ended.err


def test_a_partition_that_is_not_there(slurm: Path, call: Call) -> None:
    ended = call("submit", "slurm", "--partition", "gpu", "train.py")
    assert ended.status == 2
    assert re.search(r"invalid partition .*gpu.* Its partitions: low: .*high: ", " ".join(ended.err.split())), ended.err
