"""Labs with real hosts: who is where, how fast links are, and what is left when somebody dies."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
import warm
from command import Call
from tutti.collectives import native
from tutti.errors import ConfigError, WorkerFailed
from tutti.launch.lab import namespaces, ownership
from tutti.launch.lab.lab import LabSpec, address, missing
from tutti.launch.lab.ownership import Claim
from tutti.launch.supervisor_pipe import SupervisorPipe

pytestmark = [pytest.mark.xdist_group("labs"), pytest.mark.skipif(missing() is not None, reason=str(missing()))]

TELL = str(Path(__file__).parents[1] / "scripts" / "tell.py")

MEGABYTES = 4

NAME = f"test-{os.getpid()}"
"""Not the name of another run's lab."""


def examine() -> dict[str, Any]:
    """What a worker finds; many tests read it, so that one launch serves them all."""
    world = tutti.init()
    seconds = [transfer(world, to) for to in (1, 2)]
    facts = {
        "host": world.host,
        "local": (world.local_rank, os.environ["LOCAL_WORLD_SIZE"]),
        "threads": os.environ["OMP_NUM_THREADS"],
        "namespace": os.stat("/proc/self/ns/net").st_ino,
        "host ids": host_ids(world),
        "seconds": seconds,
        "parameters": train(world),
    }
    world.close()
    return facts


def host_ids(world: tutti.World) -> tuple[str, ...]:
    return world.transport.hosts


def transfer(world: tutti.World, to: int) -> float:
    """How long it takes until rank `to` has some megabytes from rank 0, and rank 0 knows it."""
    data, answer = torch.zeros(MEGABYTES * 1_000_000, dtype=torch.uint8), torch.zeros(1)
    world.transport.all_reduce(answer).wait()  # type: ignore[attr-defined]
    start = time.perf_counter()
    if world.rank == 0:
        world.transport.isend(data, to).wait()
        world.transport.irecv(answer, to).wait()
    elif world.rank == to:
        world.transport.irecv(data, 0).wait()
        world.transport.isend(answer, 0).wait()
    return time.perf_counter() - start


def train(world: tutti.World | None = None) -> list[float]:
    """A few steps on eight samples; without a world, plain torch on all of them."""
    torch.manual_seed(0)
    model, samples = nn.Linear(3, 1).double(), torch.arange(24, dtype=torch.float64).view(8, 3) / 24
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = None if world is None else tutti.distribute(model, optimizer, world=world)
    mine = samples if world is None else samples[world.rank :: world.size]
    for _ in range(3):
        model(mine).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if job is not None:
        job.finish()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


@pytest.fixture(scope="module")
def four_hosts() -> list[dict[str, Any]]:
    with tutti.lab(4, ["200mbit", "200mbit", "20mbit", "200mbit"]) as lab:
        return tutti.launch(examine, on=lab)


def test_each_rank_is_on_its_host(four_hosts: list[dict[str, Any]]) -> None:
    assert [facts["host"] for facts in four_hosts] == ["host0", "host1", "host2", "host3"]
    assert len({facts["namespace"] for facts in four_hosts} | {os.stat("/proc/self/ns/net").st_ino}) == 5
    assert all(facts["local"] == (0, "1") for facts in four_hosts)
    assert all(len(set(facts["host ids"])) == 4 for facts in four_hosts)


def test_cores_are_shared_by_all_hosts(four_hosts: list[dict[str, Any]]) -> None:
    expected = os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 4)))
    assert [facts["threads"] for facts in four_hosts] == [expected] * 4


def test_training_between_hosts(four_hosts: list[dict[str, Any]]) -> None:
    for facts in four_hosts:
        assert facts["parameters"] == pytest.approx(train(), rel=1e-10)


def test_links_are_as_slow_as_asked(four_hosts: list[dict[str, Any]]) -> None:
    quick_s, slow_s = four_hosts[0]["seconds"]
    assert slow_s > MEGABYTES * 8 / 20
    assert quick_s > MEGABYTES * 8 / 200
    assert slow_s > 3 * quick_s


def speaks_and_fails() -> None:
    """All say where they are; then the last one fails."""
    with closing(tutti.init()) as world:
        SupervisorPipe().progress(host=world.host, ids=host_ids(world))
        native(torch.ones(1), world.transport)  # All have said it.
        if world.rank == 3:
            raise RuntimeError("enough")


def reduce_slowly(megabytes: int) -> tuple[float, float]:
    """Longer than the timeout, over a link that is slow but moves: nobody may give up, on any level."""
    with closing(tutti.init()) as world:
        tensor = torch.ones(megabytes * 250_000)
        started = time.monotonic()
        native(tensor, world.transport)
        return float(tensor[-1]), time.monotonic() - started


def test_waiting_is_patient_with_what_moves() -> None:
    with tutti.lab(2, "8mbit", ranks_per_host=2) as lab:
        results = tutti.launch(reduce_slowly, 4, timeout=timedelta(seconds=2), on=lab)
    assert [total for total, _ in results] == [4.0] * 4
    assert min(seconds for _, seconds in results) > 3


def test_two_ranks_on_a_host() -> None:
    said: dict[int, dict[str, Any]] = {}
    with tutti.lab(2, ranks_per_host=2) as lab:
        with pytest.raises(ConfigError, match=r"3 workers do not fit .* 2 hosts with 2 each.* make it 4"):
            tutti.launch(speaks_and_fails, on=lab, workers=3)
        with pytest.raises(WorkerFailed, match="rank 3 failed: RuntimeError: enough"):
            tutti.launch(speaks_and_fails, on=lab, workers=4, watch=said.__setitem__)
    assert [said[rank]["host"] for rank in range(4)] == ["host0", "host0", "host1", "host1"]
    for rank in range(4):
        ids = said[rank]["ids"]
        assert ids[0] == ids[1] != ids[2] == ids[3]
    with pytest.raises(ConfigError, match="is closed: make a new one"):
        tutti.launch(speaks_and_fails, on=lab)
    lab.close()  # Again: nothing happens.


# --- who owns what ---


OWN = (
    "import gc, sys; gc.disable(); import tutti; gc.freeze(); lab = tutti.lab(1, name=sys.argv[1]); "
    "print('ready', flush=True); input()"
)


@contextmanager
def owner(name: str) -> Iterator[subprocess.Popen[str]]:
    """Another process with a lab, and a process on its host that does not end by itself."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWN, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.stdin.close()
        process.kill()
        process.wait(20)
        process.stdout.close()
        ownership.remove_orphans()


def claim_of(name: str) -> Claim | None:
    return next((claim for claim in ownership.existing() if claim.name == name), None)


def test_what_a_killed_owner_left_is_cleared_by_the_next() -> None:
    with owner(f"{NAME}-dead") as dead, owner(f"{NAME}-alive"):
        left, alive = claim_of(f"{NAME}-dead"), claim_of(f"{NAME}-alive")
        assert left is not None
        assert alive is not None
        stray = subprocess.Popen([*namespaces.prefix(left.host(0)), sys.executable, "-c", "input()"], stdin=-1)
        assert stray.stdin is not None
        dead.kill()
        dead.wait(20)
        assert claim_of(f"{NAME}-dead") == left, "nobody is there to remove it"
        with tutti.lab(1, name=f"{NAME}-dead"):
            assert stray.wait(20) == -signal.SIGKILL
            stray.stdin.close()
            assert left.namespaces() == []
            assert len(alive.namespaces()) == 2
    assert claim_of(f"{NAME}-alive") is None


def test_a_name_that_is_taken() -> None:
    with owner(f"{NAME}-taken") as process, pytest.raises(ConfigError) as caught:
        tutti.lab(1, name=f"{NAME}-taken")
    assert f"a lab named '{NAME}-taken' exists already; process {process.pid} (" in str(caught.value)
    assert sys.executable in str(caught.value)
    assert "Choose another name" in str(caught.value)


def test_a_name_taken_by_this_process_stays_its_own() -> None:
    with tutti.lab(1, name=f"{NAME}-mine") as lab:
        with pytest.raises(ConfigError, match=f"process {os.getpid()} "):
            tutti.lab(1, name=f"{NAME}-mine")
        assert namespaces.inside(lab.placement.hosts[0].namespace or "", lambda: "still there") == "still there"


def test_an_exception_removes_the_hosts() -> None:
    with pytest.raises(RuntimeError, match="enough"), tutti.lab(1, name=f"{NAME}-raise"):
        raise RuntimeError("enough")
    assert claim_of(f"{NAME}-raise") is None


def test_a_lab_nobody_holds_is_removed() -> None:
    lab = tutti.lab(1, name=f"{NAME}-lost")
    del lab
    assert claim_of(f"{NAME}-lost") is None


def test_nothing_is_made_in_the_machines_own_namespace() -> None:
    def interfaces() -> str:
        return namespaces.query("ip", "-brief", "link")

    before = interfaces()
    with tutti.lab(2):
        assert interfaces() == before


def test_hosts_know_each_other_by_name() -> None:
    code = "import socket; print(*map(socket.gethostbyname, ('host0', 'host1', 'switch', socket.gethostname())))"
    with tutti.lab(2) as lab:
        said = namespaces.query(*lab.placement.prefix(1), sys.executable, "-c", code)
    assert said.split() == [address(0), address(1), "10.77.0.254", address(1)]


def connect_s() -> float | str:
    """How long it takes to connect one host to another over links of 20 ms; or why there are no such links."""
    try:
        with tutti.lab(2, latency="20ms", name=f"{NAME}-late") as lab:
            first, second = (host.namespace or "" for host in lab.placement.hosts)
            with namespaces.inside(second, lambda: socket.create_server((address(1), 0))) as server:
                start = time.perf_counter()
                namespaces.inside(first, lambda: socket.create_connection(server.getsockname(), 10)).close()
                return time.perf_counter() - start
    except ConfigError as error:
        return str(error)


def test_latency_or_why_not() -> None:
    found = connect_s()
    if isinstance(found, str):
        assert "latency needs netem, which this kernel does not have" in found
        assert "Run without latency" in found
    else:
        assert found > 2 * 0.02, "there and back"
    assert claim_of(f"{NAME}-late") is None


# --- the command line ---


def test_run_in_a_lab(call: Call) -> None:
    ended = call("run", "--lab", "hosts=2,rate=100mbit", TELL)
    assert ended.status == 0, ended.err
    assert "[rank 0] {" in ended.out
    assert "[rank 1] {" in ended.out


def test_run_in_a_lab_that_cannot_be(call: Call) -> None:
    ended = call("run", "--lab", "hosts=0,speed=3", TELL)
    assert ended.status == 2
    assert "hosts must be from 1 to 250" in ended.err
    assert "unknown 'speed'" in ended.err


def test_any_command_on_every_host(call: Call) -> None:
    names = ("TUTTI_HOST", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    line = " ".join(f"${name}" for name in names) + " $TORCHELASTIC_USE_AGENT_STORE ${MASTER_PORT:+port}"
    ended = call("lab", "run", "--hosts", "2", "--ranks-per-host", "2", "--", "sh", "-c", f"echo {line}")
    assert ended.status == 0, ended.err
    assert sorted(ended.out.splitlines()) == [
        f"[rank {rank}] host{rank // 2} {rank} 4 {rank % 2} 2 10.77.0.254 True port" for rank in range(4)
    ]
    assert ended.err == ""


@pytest.mark.usefixtures("impatient")
def test_status_of_the_first_that_failed(call: Call) -> None:
    ended = call("lab", "run", "--", "sh", "-c", "if [ $RANK = 1 ]; then exit 7; else exec sleep 30; fi")
    assert ended.status == 7
    assert "error: rank 1 exited with status 7" in ended.err
    assert call("lab", "run", "--hosts", "1", "--", "false").status == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "fast", "--hosts", "0", "--", "true"], "'fast' is not a rate"),
        (["--rate", "1gbit/1gbit/1gbit", "--", "true"], "3 rates for 2 hosts"),
        (["--ranks-per-host", "0", "--", "true"], "ranks per host must be 1 or more"),
        (["--", "no-such-command"], "there is no command 'no-such-command'"),
    ],
)
def test_refused(call: Call, words: list[str], message: str) -> None:
    ended = call("lab", "run", *words)
    assert ended.status == 2
    assert message in ended.err
    assert "Traceback" not in ended.err


def test_list_and_clear(call: Call) -> None:
    with (
        tutti.lab(2, ["10mbit", "1gbit"], name=f"{NAME}-shown"),
        owner(f"{NAME}-gone") as dead,
        ownership._one_at_a_time(),  # Whoever starts a lab removes those of dead owners: this one, in a moment.
    ):
        dead.kill()
        dead.wait(20)
        listed = call("lab", "list").out
        assert f"{NAME}-shown" in listed
        assert "10mbit/1gbit" in listed
        assert f"process {os.getpid()}" in listed
        assert f"{NAME}-gone" in listed
        assert f"removed lab '{NAME}-gone' of process {dead.pid}" in call("lab", "clear").out
        assert claim_of(f"{NAME}-shown") is not None
        assert claim_of(f"{NAME}-gone") is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(number: signal.Signals) -> None:
    words = ["lab", "run", "--name", f"{NAME}-signal", "--", "sh", "-c", "echo here; exec sleep 60"]
    process = subprocess.Popen([*warm.main_of("tutti.cli"), *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert {process.stdout.readline() for _ in range(2)} == {"[rank 0] here\n", "[rank 1] here\n"}
        process.send_signal(number)
        assert process.wait(20) == 128 + number
    finally:
        process.kill()
        process.wait(20)
        process.stdout.close()
    assert claim_of(f"{NAME}-signal") is None  # The fixture looks for the rest.


def test_killing_the_owner_ends_its_commands() -> None:
    words = ["lab", "run", "--name", f"{NAME}-killed", "--", "sh", "-c", "echo here; exec sleep 60"]
    process = subprocess.Popen([*warm.main_of("tutti.cli"), *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().endswith("here\n")
        assert process.stdout.readline().endswith("here\n")
        left = claim_of(f"{NAME}-killed")
        assert left is not None
        process.kill()
        process.wait(20)
        deadline = time.monotonic() + 10
        while namespaces.processes(left.namespaces()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert namespaces.processes(left.namespaces()) == []
    finally:
        process.kill()
        process.wait(20)
        process.stdout.close()
        ownership.remove_orphans()


def test_a_spec_makes_the_lab_it_says() -> None:
    with tutti.lab(2, "100mbit", ranks_per_host=3) as lab:
        assert lab.spec == LabSpec.parse(str(lab.spec))
        assert lab.placement.num_workers == 6
