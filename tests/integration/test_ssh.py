"""`tutti run --hosts`: hosts are network namespaces with an ssh server each, and this launcher is on their switch."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import ssh_hosts
from command import Call
from ssh_hosts import SshHosts
from started_command import Command
from tutti.launch.lab.namespaces import processes
from tutti.launch.ssh.hosts import SshHost, parse_hosts

pytestmark = [pytest.mark.xdist_group("labs"), pytest.mark.timeout(200)]
"""Every host imports torch for itself, with all other hosts on the same cores."""

TRAIN = str(Path(__file__).parents[1] / "scripts" / "train_a_little.py")

ELASTIC = """
import os, time, torch, tutti
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
        time.sleep(0.01)
        if world.size != size:
            size = world.size
            print("size", size, flush=True)
    if job.reduce(float(os.path.exists("stop"))) > 0:
        break
job.finish()
"""

IDLE = """
import subprocess, time
subprocess.Popen(["sleep", "1000"])
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def hosts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SshHosts]:
    """Two hosts with ssh servers."""
    if (lacking := ssh_hosts.lacking()) is not None:
        pytest.skip(lacking)
    (tmp_path / "ssh").mkdir()
    with ssh_hosts.ssh_hosts(tmp_path / "ssh", **getattr(request, "param", {})) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with scripts, which is there on every host."""
    made = tmp_path / "shared" / "work"
    made.mkdir(parents=True)
    (made / "train.py").write_text(ELASTIC)
    (made / "idle.py").write_text(IDLE)
    return made


def start(hosts: SshHosts, folder: Path, *words: str, **variables: str) -> Command:
    return Command(folder, "run", *words, prefix=hosts.inside([]), **{**hosts.environment, **variables})


def left_on(hosts: SshHosts, number: int) -> list[int]:
    """Processes on a host, but for the ssh server that listens."""
    namespace = hosts.lab.placement.hosts[number].namespace
    assert namespace is not None
    listening = {server.pid for server in hosts.servers.values()}
    return [pid for pid in processes([namespace]) if pid not in listening]


def wait_until(what: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def assert_nothing_left(hosts: SshHosts) -> None:
    wait_until(lambda: not any(left_on(hosts, number) for number in hosts.servers))


def test_training_on_two_hosts(hosts: SshHosts, folder: Path) -> None:
    secret = "a secret that nobody else on these hosts may see"
    variables = {"TUTTI_SECRET": secret, "OMP_NUM_THREADS": "1"}
    with closing(start(hosts, folder, "--hosts", "host0:2,host1", TRAIN, **variables)) as run:
        wait_until(lambda: len(list(_shown_by_ssh())) >= 2)
        seen = b"".join(_shown_by_ssh())
        assert run.end() == 0, run.lines
    assert b"tutti" in seen, "the ssh processes were looked at"
    assert secret.encode() not in seen
    found = [re.search(r"\[rank (\d)\] rank \1 of 3, local (\d), .*: (\w{64})", line) for line in run.lines]
    lines = sorted((match[1], match[2], match[3]) for match in found if match)
    assert [(rank, local) for rank, local, _ in lines] == [("0", "0"), ("1", "1"), ("2", "0")], run.lines
    assert len({digest for _, _, digest in lines}) == 1
    assert_nothing_left(hosts)


def _shown_by_ssh() -> Iterator[bytes]:
    """Arguments and environments of the ssh clients that run now."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "comm").read_text() == "ssh\n":
                    yield (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue


@pytest.mark.parametrize("hosts", [{"spec": "hosts=5", "start": False}], indirect=True)
def test_all_that_is_wrong_is_one_error(hosts: SshHosts, folder: Path, tmp_path: Path) -> None:
    import importlib.metadata

    metadata = Path(str(importlib.metadata.distribution("torch").locate_file(""))) / next(
        str(file) for file in importlib.metadata.files("torch") or () if file.name == "METADATA"
    )
    fake = tmp_path / "METADATA"
    fake.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n")
    hosts.start(0, f"mount -t tmpfs none {folder.parent}")
    hosts.start(1, f"mount -t tmpfs none {folder}; mount --bind {fake} {metadata}")
    hosts.start(2, f"mount -t tmpfs none {Path(sys.executable).parent}")
    hosts.start(4)
    names = "host0:1,host1:2,host2:1,host3:1,stranger@host4:1,nowhere:3"
    with closing(start(hosts, folder, "--hosts", names, "train.py")) as run:
        assert run.end() == 2
    text = "".join(run.lines)
    assert "6 of 6 hosts cannot take part:" in text
    assert f"host0: there is no folder {folder}\n" in text
    assert f"host1: there is no train.py in {folder}\n" in text
    assert "host1: torch is 1.2.3 there and 2." in text
    assert f"host2: there is no Python at {sys.executable}\n" in text
    assert re.search(r"host3: ssh cannot connect; .*Connection refused", text)
    assert re.search(r"host4: ssh cannot connect; .*Permission denied", text)
    assert re.search(r"nowhere: ssh cannot connect; .*Could not resolve hostname", text)
    assert "Traceback" not in text
    assert_nothing_left(hosts)


def test_a_host_is_lost(hosts: SshHosts, folder: Path) -> None:
    """Without limits on the number of workers the run ends, and says which host it was."""
    with closing(start(hosts, folder, "--hosts", "host0,host1", "idle.py")) as run:
        run.until("[rank 0] ready", "[rank 1] ready")
        for pid in left_on(hosts, 1):
            _kill(pid)
        assert run.end() == 255
    assert any("rank 1 was lost with host host1: the connection ended" in line for line in run.lines), run.lines
    assert_nothing_left(hosts)


def test_an_elastic_run_goes_on_without_a_host(hosts: SshHosts, folder: Path) -> None:
    with closing(start(hosts, folder, "--workers", "1:2", "--hosts", "host0,host1", "train.py")) as run:
        run.until("[rank 0] size 2")
        for pid in left_on(hosts, 1):
            _kill(pid)
        run.until("[rank 1] was lost with host host1", "[rank 0] size 1")
        run.until("[rank 2] size 2")  # On the same host, to which there is a new connection.
        (folder / "stop").touch()
        assert run.end() == 0, run.lines
    assert_nothing_left(hosts)


def test_a_host_is_cut_off(hosts: SshHosts, folder: Path) -> None:
    """Nothing tells either end: both notice that the other is silent, and the host ends its workers by itself."""
    words = ("--workers", "1:2", "--hosts", "host0,host1", "train.py")
    with closing(start(hosts, folder, *words, TUTTI_PATIENCE="4s")) as run:
        run.until("[rank 0] size 2")
        hosts.set_link(1, up=False)
        run.until("[rank 0] size 1")
        wait_until(lambda: not any("python" in _name(pid) for pid in left_on(hosts, 1)), 90)
        hosts.set_link(1, up=True)
        (folder / "stop").touch()
        assert run.end() == 0, run.lines


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_the_launcher_ends(hosts: SshHosts, folder: Path, sign: signal.Signals) -> None:
    with closing(start(hosts, folder, "--hosts", "host0:2,host1", "idle.py")) as run:
        run.until("[rank 0] ready", "[rank 1] ready", "[rank 2] ready")
        launcher = _launcher_on(hosts)
        os.kill(launcher, sign)
        status = run.end()
        assert status == 130 or sign == signal.SIGKILL, run.lines
        assert_nothing_left(hosts)


def _launcher_on(hosts: SshHosts) -> int:
    """The process of `tutti run` itself, whose children the ssh clients are."""
    namespace = hosts.lab.placement.store_host.namespace
    assert namespace is not None
    ssh = next(pid for pid in processes([namespace]) if _name(pid) == "ssh")
    return int(Path(f"/proc/{ssh}/stat").read_text().rpartition(")")[2].split()[1])


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:0", "the number of workers of a must be 1 or more, got '0'"),
        ("a:x,b:-1", "number of workers of a must be 1 or more, got 'x'; the number of workers of b .* got '-1'"),
        ("a:1,b:2,a:3", "a is given twice: give it once, with all its workers"),
        ("me@a:1,you@a:3", "a is given twice"),
        ("a:1,,b", "'' is not a host"),
        ("-oProxyCommand=x:2", "'-oProxyCommand=x:2' is not a host"),
        ("", "'' is not a host"),
    ],
)
def test_hosts_that_cannot_be_meant(text: str, message: str, call: Call, folder: Path) -> None:
    ended = call("run", "--hosts", text, str(folder / "train.py"))
    assert ended.status == 2
    assert re.search(message, " ".join(ended.err.split())), ended.err


def test_hosts_and_what_does_not_go_with_them(call: Call, folder: Path) -> None:
    script = str(folder / "train.py")
    cases = {
        ("--hosts", "a:2", "--workers", "3"): "3 workers do not fit the hosts 'a:2'. Leave workers out, or make it 2.",
        ("--hosts", "a:2", "--workers", "3:4"): "3 to 4 workers do not fit the hosts 'a:2', on which 2 are started.",
        ("--hosts", "a:2", "--lab", "hosts=2"): "--lab and --hosts each say where workers are started",
        ("--hosts", "a:4", "--workers", "1:4", "--start", "2"): "--start has no effect with --hosts",
        ("--on", "slum:x"): "unknown launcher 'slum'. Did you mean 'slurm'? Known: lab, local, slurm, ssh.",
        ("--on", "local:2"): "the launcher 'local' has no options, got '2'",
    }
    for words, message in cases.items():
        ended = call("run", *words, script)
        assert (ended.status, message in " ".join(ended.err.split())) == (2, True), ended.err


def test_parse() -> None:
    assert parse_hosts("a:2, me@b.c-d ,[fe80::1]:3,10.0.0.1") == (
        SshHost("a", 2),
        SshHost("me@b.c-d", 1),
        SshHost("fe80::1", 3),
        SshHost("10.0.0.1", 1),
    )
