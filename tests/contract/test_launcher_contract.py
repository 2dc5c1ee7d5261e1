"""What every launcher does, whatever the hosts are."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import slurm_cluster
import ssh_hosts
import tutti
from plugin_package import install
from tutti.errors import ConfigError, PluginError, UnknownName, WorkerFailed
from tutti.launch import supervisor
from tutti.launch.elastic_run import ElasticRun
from tutti.launch.lab.namespaces import missing
from tutti.launch.local import supervise
from tutti.launch.registry import LAUNCHERS, make_launcher
from tutti.launch.start import Program
from tutti.launch.supervisor_pipe import SupervisorPipe

pytestmark = pytest.mark.xdist_group("labs")

PLACES = {"local": "local", "lab": "lab:hosts=1,ranks=2", "ssh": "ssh:localhost:2", "slurm": "slurm:2"}
"""Each launcher with two workers."""


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The ssh command that reaches this machine."""
    if (lacking := ssh_hosts.lacking()) is not None:
        pytest.skip(lacking)
    with ssh_hosts.ssh_to_this_machine(tmp_path_factory.mktemp("ssh")) as command:
        yield command


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of a process inside a Slurm job."""
    if (lacking := slurm_cluster.lacking()) is not None:
        pytest.skip(lacking)
    with slurm_cluster.slurm_cluster(tmp_path_factory.mktemp("slurm")) as variables:
        command = ["salloc", "--no-shell", "--ntasks=2", "--nodes=1"]
        ended = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, check=True, timeout=50
        )
        job = re.findall(r"job allocation (\d+)", ended.stderr)[0]
        yield {**variables, "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": socket.gethostname()}
        subprocess.run(["scancel", job], env={**os.environ, **variables}, check=True, timeout=50)


@pytest.fixture(params=list(PLACES))
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where to start two workers."""
    if request.param == "lab" and (lacking := missing()) is not None:
        pytest.skip(lacking)
    if request.param == "ssh":
        monkeypatch.setenv("TUTTI_SSH", request.getfixturevalue("ssh"))
    if request.param == "slurm":
        for name, value in request.getfixturevalue("slurm").items():
            monkeypatch.setenv(name, value)
    return PLACES[request.param]


@pytest.fixture
def without_torch(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have other hosts start workers that need no torch without a fork server, which would import it first."""
    if on in (PLACES["ssh"], PLACES["slurm"]):
        monkeypatch.setenv("TUTTI_START", "spawn")


def test_every_built_in_launcher_is_here() -> None:
    assert set(PLACES) == set(LAUNCHERS.built_in)


def describe(text: str) -> dict[str, Any]:
    print(f"printed {text}")
    print(f"complained {text}", file=sys.stderr)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TUTTI_TIMEOUT")
    return {**{name: os.environ[name] for name in names}, "bytes": bytes(300_000), "folder": os.getcwd()}


@pytest.mark.usefixtures("without_torch")
def test_results_and_output(on: str, capfd: pytest.CaptureFixture[str]) -> None:
    results = tutti.launch(describe, "text", timeout=33, on=on)
    expected = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TUTTI_TIMEOUT": "33.0", "bytes": bytes(300_000)}
    for rank, result in enumerate(results):
        assert result == {**expected, "RANK": str(rank), "LOCAL_RANK": str(rank), "folder": os.getcwd()}
    out, err = capfd.readouterr()
    assert sorted(line for line in out.splitlines() if "printed" in line) == [
        f"[rank {rank}] printed text" for rank in range(2)
    ]
    assert sorted(line for line in err.splitlines() if "complained" in line) == [
        f"[rank {rank}] complained text" for rank in range(2)
    ]


def train() -> float:
    import torch
    from torch.distributed import all_reduce, destroy_process_group, init_process_group

    world = tutti.init(torch_distributed=True)
    total = torch.tensor([1.0 + world.rank])
    all_reduce(total)
    world.close()
    # The store of torch's own groups is reached as well.
    init_process_group("gloo")
    all_reduce(total)
    destroy_process_group()
    return total.item()


def test_workers_find_each_other(on: str) -> None:
    assert tutti.launch(train, on=on) == [6.0, 6.0]


def fail(how: str) -> None:
    if os.environ["RANK"] == "0":
        subprocess.Popen(["sleep", "1000"])  # Ends with its worker, which never ends by itself.
        signal.pause()
    if how == "raise":
        raise ValueError("no such thing")
    if how == "exit":
        sys.exit(7)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("how", "reason", "status"),
    [
        ("raise", r"rank 1 failed: ValueError: no such thing", 1),
        ("exit", r"rank 1 exited with status 7", 7),
        ("kill", r"rank 1 was killed by SIGKILL", 137),
    ],
)
def test_a_failure_ends_the_run(on: str, how: str, reason: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_NOTICE_S", 0.2)  # The other worker waits for nothing.
    with pytest.raises(WorkerFailed, match=reason) as failed:
        tutti.launch(fail, how, on=on)
    assert failed.value.status == status
    assert ("Traceback" in str(failed.value)) == (how == "raise")


def lose_one(arrived: str) -> int:
    rank = int(os.environ["RANK"])
    SupervisorPipe().tolerate_loss()
    if rank == 0:
        while not os.path.exists(arrived):
            time.sleep(0.01)
    elif rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        Path(arrived).touch()
    return rank


@pytest.mark.usefixtures("without_torch")
def test_a_lost_worker_is_replaced(on: str, tmp_path: Path) -> None:
    workers = ElasticRun(minimum=1, maximum=2, restarts=3)
    supervising = supervise(lose_one, (str(tmp_path / "arrived"),), workers, {}, on=on)
    assert supervising.run() == [0, None, 2]
    assert supervising.losses == [(1, "was killed by SIGKILL")]


WAIT = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
os.write(1, b"ready\\n")
time.sleep(1000)
"""


def test_a_launcher_by_itself(on: str, tmp_path: Path) -> None:
    """Start, follow, signal, wait, and close twice; workers that were never told to end are gone as well."""
    script = tmp_path / "wait.py"
    script.write_text(WAIT)
    made, variables = make_launcher(on, 2), {"TUTTI_TIMEOUT": "20"}
    try:
        assert made.num_workers == 2
        made.open(Program([str(script)], modules=("tutti.launch.worker",)), variables)
        control = made.place_coordinator(variables, None)
        store = made.place_store(variables)
        assert store is not None
        assert {"TUTTI_SECRET", "TUTTI_COORDINATOR", "MASTER_PORT"} <= set(variables)
        pipes = [[os.pipe() for _ in range(3)] for _ in range(2)]
        workers = [made.start(slot, 10 + slot, variables, [writer for _, writer in pipes[slot]]) for slot in range(2)]
        for _, writer in (pipe for each in pipes for pipe in each):
            os.close(writer)
        for each in pipes:
            assert os.read(each[0][0], 100) == b"ready\n"
        assert all(worker.pid and worker.poll() is None for worker in workers)
        with pytest.raises(subprocess.TimeoutExpired):
            workers[0].wait(0.01)
        workers[0].send_signal(signal.SIGTERM)
        workers[0].wait(20)
        assert (workers[0].poll(), workers[0].describe_end()) == (9, "exited with status 9")
        assert os.read(pipes[0][0][0], 100) == b"", "its output is closed"
        assert workers[1].poll() is None
        control.close()
    finally:
        made.close()
        made.close()
    for reader, _ in (pipe for each in pipes for pipe in each):
        os.close(reader)
    _wait_for_the_end_of(str(script))


def test_a_launcher_that_was_never_opened(on: str) -> None:
    make_launcher(on, None).close()


def test_slurm_without_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(ConfigError, match="runs inside a Slurm job"):
        make_launcher("slurm:2", None)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "x")
    with pytest.raises(ConfigError, match="number of workers on each node, 1 or more; got 'many'"):
        make_launcher("slurm:many", None)


def test_another_number_of_workers(on: str) -> None:
    if on != "local":
        with pytest.raises(ConfigError, match=r"3 workers do not fit .* make it 2"):
            make_launcher(on, 3)


PACKAGE = """
from tutti.launch.lab.placement import here
from tutti.launch.local_launcher import LocalLauncher


def on_my_cluster(text, workers):
    return LocalLauncher(here(int(text)))


def nothing(text, workers):
    return "a text"
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package that offers two launchers, of which one is none."""
    offered = {"mine": "my_tutti:on_my_cluster", "wrong": "my_tutti:nothing"}
    install(tmp_path, "my-cluster", {"tutti.launchers": offered}, PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    LAUNCHERS.forget_plugins()
    yield
    LAUNCHERS.forget_plugins()
    sys.modules.pop("my_tutti", None)


@pytest.mark.usefixtures("package")
def test_a_launcher_of_another_package() -> None:
    assert [result["WORLD_SIZE"] for result in tutti.launch(describe, "text", on="mine:3", timeout=20)] == ["3"] * 3
    with pytest.raises(PluginError, match=r"launcher 'wrong' has made .*; wanted is a tutti.launch.launcher.Launcher"):
        make_launcher("wrong", None)
    with pytest.raises(UnknownName, match=r"unknown launcher 'min'. Did you mean 'mine'"):
        make_launcher("min", None)


def _wait_for_the_end_of(script: str) -> None:
    """The process of the second worker is killed, and seen to be gone soon after."""
    deadline = time.monotonic() + 10
    while any(script.encode() in command for command in _commands()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _commands() -> Iterator[bytes]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                yield (folder / "cmdline").read_bytes()
            except OSError:
                continue
