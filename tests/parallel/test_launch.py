"""`tutti.launch` and `tutti.init` with real processes: results, failures, signals, and what is left behind."""

import ctypes
import gc
import json
import multiprocessing
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tutti
import warm
from support import TRANSPORTS
from tutti.coordination import diagnosis
from tutti.errors import ConfigError, NonFiniteLoss, RankLost, TuttiError, WorkerFailed
from tutti.launch.interpreter import main_of
from tutti.launch.supervisor_pipe import SupervisorPipe

SCRIPTS = Path(__file__).parents[1] / "scripts"

NOTICE_S = 5.0
"""Within this time everyone must have noticed that a rank is gone."""

each_transport = pytest.mark.parametrize("transport", TRANSPORTS)


def all_reduce(world: tutti.World, value: float = 1.0) -> float:
    tensor = torch.tensor([value])
    world.transport.all_reduce(tensor).wait()  # type: ignore[attr-defined]
    return tensor.item()


def started(*argv: str, **variables: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """A Python process with both outputs in one pipe; it is gone in the end, whatever happens."""
    return _started([sys.executable, *argv], variables)


def started_warm(*argv: str, **variables: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Likewise, but it need not import torch, and nor need the fork server that it starts."""
    return _started([*warm.python(), *argv], variables)


@contextmanager
def _started(argv: list[str], variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        argv,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    """The processes that still run after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


# --- results ---


def examine(text: str, number: int) -> dict[str, Any]:
    """What a worker finds; many tests read it, so that one launch serves them all."""
    world = tutti.init()
    link = SupervisorPipe()
    extra = world.transport.channel("extra")
    for step in range(3):
        link.progress(step=step, rank=world.rank)
    facts = {
        "place": (world.rank, world.size, world.local_rank),
        "arguments": text * number,
        "transport": type(world.transport).__name__,
        "same world": tutti.init() is world and tutti.world() is world,
        "sum": all_reduce(world, float(world.rank)),
        "listening": listening(),
        "parent signal": parent_signal(),
        "shared memory": [it for it in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in it],
        "large": torch.full((1_000_000,), float(world.rank)),
        "not finite": loses(1, 3),
    }
    extra.close()
    world.close()
    return facts


def parent_signal() -> int:
    """The signal the kernel sends this process when its parent ends."""
    value = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(value))
    return value.value


class Launched:
    """Three workers on one transport: what each found, and what their supervisor saw meanwhile."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.progress: list[tuple[int, dict[str, Any]]] = []
        self.listening: set[str] = set()
        self.facts: list[dict[str, Any]] = tutti.launch(
            examine, "ab", 2, workers=3, transport=transport, watch=self.watch
        )

    def watch(self, rank: int, values: dict[str, Any]) -> None:
        self.progress.append((rank, values))
        self.listening.update(listening())

    def __getitem__(self, name: str) -> list[Any]:
        return [facts[name] for facts in self.facts]


@pytest.fixture(scope="module", params=TRANSPORTS)
def launched(request: pytest.FixtureRequest) -> Launched:
    return Launched(request.param)


def test_results_by_rank(launched: Launched) -> None:
    assert launched["place"] == [(0, 3, 0), (1, 3, 1), (2, 3, 2)]
    assert launched["sum"] == [3.0, 3.0, 3.0]


def test_arguments(launched: Launched) -> None:
    assert launched["arguments"] == ["abab"] * 3


def test_results_larger_than_a_pipe(launched: Launched) -> None:
    for rank, large in enumerate(launched["large"]):
        assert large.numel() == 1_000_000
        assert large.eq(rank).all()


def test_transport_argument_decides(launched: Launched) -> None:
    names = {"sockets": "SocketTransport", "shared_memory": "SharedMemoryTransport"}
    assert launched["transport"] == [names[launched.transport]] * 3


def test_init_again_gives_the_same_world(launched: Launched) -> None:
    assert launched["same world"] == [True] * 3


def test_watch_sees_what_workers_report(launched: Launched) -> None:
    for rank in range(3):
        mine = [values for of, values in launched.progress if of == rank]
        assert mine == [{"step": step, "rank": rank} for step in range(3)]


def test_sockets_listen_on_loopback_only(launched: Launched) -> None:
    assert launched.listening, "the store"
    assert all(launched["listening"]), "Gloo"
    assert launched.listening.union(*launched["listening"]) <= LOOPBACKS


def test_kernel_ends_workers_with_their_supervisor(launched: Launched) -> None:
    assert launched["parent signal"] == [signal.SIGKILL] * 3


def test_shared_memory_has_no_name(launched: Launched) -> None:
    assert launched["shared memory"] == [[]] * 3


def test_loss_that_is_not_finite_stops_every_rank(launched: Launched) -> None:
    for rank, message in enumerate(launched["not finite"]):
        assert message.startswith(f"rank {rank}: the loss on rank 1 is NaN or infinite at step 3."), message
        assert "Lower the learning rate" in message


def files_after_each_world() -> list[int]:
    """Numbers of open files of this process after each world that it has closed."""
    found = []
    for _ in range(8):
        tutti.init().close()
        gc.collect()  # Some of a world refers to itself.
        found.append(len(os.listdir("/proc/self/fd")))
    return found


def test_worlds_that_were_closed_give_their_files_back() -> None:
    for first, *_, last in tutti.launch(files_after_each_world, workers=2):
        # Two may still be in the hands of a thread that ends; one that were kept of each world would be seven.
        assert last <= first + 2


def loses(bad_rank: int, bad_step: int) -> str:
    """Train until a loss is not finite; what is said of it."""
    world = tutti.init()
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        with tutti.distribute(model, optimizer) as job:
            for number in range(5):
                loss = model(torch.ones(2, 3)).pow(2).mean()
                if (world.rank, number) == (bad_rank, bad_step):
                    loss = loss * float("nan")
                job.watch(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    except NonFiniteLoss as error:
        return str(error)
    return "none"


# --- one worker ---


def examine_alone(lines: int) -> dict[str, Any]:
    """What a worker without others finds, says and leaves behind."""
    facts: dict[str, Any] = {"inside": refusal(launches), "pigeon": refusal(lambda: tutti.init(transport="pigeon"))}
    world = tutti.init()
    facts |= {"place": (world.rank, world.size, world.local_rank), "not finite": loses(0, 2)}
    for number in range(lines):
        print(f"line {number}")
    return {**facts, "child": starts_a_child(wait=True)}


def refusal(function: Callable[[], object]) -> str:
    try:
        function()
    except TuttiError as error:
        return str(error)
    return "none"


def launches() -> list[int]:
    return tutti.launch(without_init)


def without_init() -> int:
    return 7


class LaunchedAlone(NamedTuple):
    facts: dict[str, Any]
    output: str


@pytest.fixture(scope="module")
def alone() -> LaunchedAlone:
    with redirect_stdout(StringIO()) as output:
        (facts,) = tutti.launch(examine_alone, 20_000, workers=1)
    return LaunchedAlone(facts, output.getvalue())


def test_one_worker(alone: LaunchedAlone) -> None:
    assert alone.facts["place"] == (0, 1, 0)


def test_output_of_any_amount(alone: LaunchedAlone) -> None:
    assert alone.output.splitlines() == [f"[rank 0] line {number}" for number in range(20_000)]


def test_children_of_workers_end_with_them(alone: LaunchedAlone) -> None:
    assert wait_until_gone([alone.facts["child"]], NOTICE_S) == []


def test_loss_that_is_not_finite_with_one_worker(alone: LaunchedAlone) -> None:
    assert alone.facts["not finite"].startswith("rank 0: the loss on rank 0 is NaN or infinite at step 2")


def test_launch_inside_a_worker(alone: LaunchedAlone) -> None:
    assert "launch was called inside a worker: workers cannot start workers" in alone.facts["inside"]


def test_unknown_transport(alone: LaunchedAlone) -> None:
    assert "transport 'pigeon' is not one of auto, sockets, shared_memory" in alone.facts["pigeon"]


# --- more workers ---


def sum_over_ranks(times: int) -> list[float]:
    """Ends without closing anything, as scripts do."""
    world = tutti.init()
    return [all_reduce(world, float(world.rank)) for _ in range(times)]


@each_transport
def test_more_ranks_than_cores(transport: str) -> None:
    assert tutti.launch(sum_over_ranks, 20, workers=4, transport=transport) == [[6.0] * 20] * 4


# --- what cannot be launched ---


@pytest.mark.parametrize("workers", [0, -1])
def test_no_workers(workers: int) -> None:
    with pytest.raises(ConfigError, match=f"workers must be 1 or more, got {workers}"):
        tutti.launch(without_init, workers=workers)


def test_function_without_a_name() -> None:
    """It goes to workers by value, with the local values that it uses; and so does a result of a local class."""

    class Found(NamedTuple):
        rank: int

    offset = 10
    results = tutti.launch(lambda factor: Found(factor * tutti.init().rank + offset), 2)
    assert results == [Found(10), Found(12)]
    assert type(results[0]) is Found


def test_argument_that_cannot_be_sent() -> None:
    with pytest.raises(ConfigError, match=r"without_init.*Pass values that can be pickled") as caught:
        tutti.launch(without_init, threading.Lock())
    assert caught.value.__cause__ is not None


def test_script_with_a_local_function(tmp_path: Path) -> None:
    """What the script defines at its top level stays a name, so that the worker's own class is used."""
    script = tmp_path / "script.py"
    script.write_text(
        "import tutti\n"
        "class Value:\n    pass\n"
        "def main():\n"
        "    print(tutti.launch(lambda value: type(value).__module__ + str(tutti.init().rank), Value()))\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    with started_warm(str(script)) as process:
        output, _ = process.communicate(timeout=40)
    assert output.splitlines()[-1] == "['__mp_main__0', '__mp_main__1']", output


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_timeout_that_is_no_time(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTTI_TIMEOUT", text)
    with pytest.raises(ConfigError, match=f"TUTTI_TIMEOUT must be a number of seconds above 0, got '{text}'"):
        tutti.init()


def test_script_without_a_guard() -> None:
    """Workers import the script to find the function, and come by its own call of `launch`."""
    with started_warm(str(SCRIPTS / "unguarded.py")) as process:
        output, _ = process.communicate(timeout=40)
    assert process.returncode == 0, output
    assert output.splitlines()[-1] == "results [0, 10]"


# --- failures ---


class Unusual(Exception):
    """An exception the supervisor knows nothing of."""


def fails_on(rank: int) -> None:
    world = tutti.init()
    if world.rank == rank:
        raise Unusual(f"no luck on {rank}")
    all_reduce(world)


@pytest.mark.parametrize(("rank", "transport"), [(0, "sockets"), (2, "shared_memory")])
def test_exception(rank: int, transport: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerFailed) as caught:
        tutti.launch(fails_on, rank, workers=3, transport=transport)
    error = caught.value
    assert (error.rank, error.status) == (rank, 1)
    assert str(error).startswith(f"rank {rank} failed: Unusual: no luck on {rank}")
    assert 'raise Unusual(f"no luck on {rank}")' in error.traceback
    assert "in fails_on" in error.traceback
    assert "worker.py" not in error.traceback, "how it was started is of no interest"
    said = capfd.readouterr().err
    for other in {0, 1, 2} - {rank}:
        assert re.search(rf"\[rank {other}\] .*rank {other}: rank {rank} is gone", said), said


def exits_with(status: Any) -> None:
    with closing(tutti.init()):
        sys.exit(status)


@pytest.mark.parametrize(("given", "status"), [(7, 7), ("the data is odd", 1)])
def test_exit_status(given: Any, status: int, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerFailed, match=f"rank 0 exited with status {status}") as caught:
        tutti.launch(exits_with, given, workers=1)
    assert (caught.value.rank, caught.value.status) == (0, status)
    if given != status:
        assert "[rank 0] the data is odd" in capfd.readouterr().err


def test_exit_without_a_status_is_no_failure() -> None:
    assert tutti.launch(sys.exit, workers=1) == [None]


def killed_while_others_wait(folder: str) -> None:
    """Rank 1 kills itself in the middle of reductions; when that was, and when others noticed, goes to files."""
    world = tutti.init()
    assert all_reduce(world) == world.size
    if world.rank == 1:
        Path(folder, "killed").write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            all_reduce(world)
    except RankLost:
        Path(folder, f"noticed{world.rank}").write_text(repr(time.monotonic()))
        raise


@each_transport
def test_killed_worker(transport: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerFailed) as caught:
        tutti.launch(killed_while_others_wait, str(tmp_path), workers=3, transport=transport)
    stopped_s = time.monotonic()
    said = capfd.readouterr().err
    error = caught.value
    assert str(error).startswith("rank 1 was killed by SIGKILL")
    assert (error.rank, error.status) == (1, 137)
    killed_s = float((tmp_path / "killed").read_text())
    for other in (0, 2):
        assert re.search(rf"\[rank {other}\] .*rank {other}: rank 1 is gone: its process \d+ on .* has ended", said), (
            said
        )
        assert float((tmp_path / f"noticed{other}").read_text()) - killed_s < NOTICE_S
    assert stopped_s - killed_s < NOTICE_S


def returns_early() -> str:
    world = tutti.init()
    if world.rank != 1:
        all_reduce(world)
    world.close()
    return "done"


@each_transport
def test_rank_that_returns_while_others_wait(transport: str) -> None:
    with pytest.raises(WorkerFailed, match="rank 1 is gone") as caught:
        tutti.launch(returns_early, workers=2, transport=transport)
    assert caught.value.rank == 0
    assert "took fewer steps than this rank" in str(caught.value)


def closes_early() -> None:
    world = tutti.init()
    if world.rank == 1:
        world.close()
        select.select([], [], [], 30)
    all_reduce(world)


@each_transport
@pytest.mark.usefixtures("impatient")
def test_rank_that_leaves_while_others_wait(transport: str) -> None:
    """Its process still runs; that it left is known from what it said."""
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match="rank 0: rank 1 is gone: it has left"):
        tutti.launch(closes_early, workers=2, transport=transport)
    assert time.monotonic() - start < 15


def deaf_to_terminate() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    world = tutti.init()
    all_reduce(world)
    if world.rank == 0:
        raise Unusual("enough")
    select.select([], [], [], 60)


@pytest.mark.usefixtures("impatient")
def test_worker_that_ignores_sigterm_is_stopped() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match="rank 0 failed: Unusual: enough"):
        tutti.launch(deaf_to_terminate)
    assert time.monotonic() - start < 20


def starts_a_child(wait: bool) -> int:
    """A child that holds the worker's outputs open."""
    child = subprocess.Popen([sys.executable, "-c", "import select; select.select([], [], [], 60)"])
    if not wait:
        os._exit(3)
    return child.pid


@pytest.mark.usefixtures("impatient")
def test_children_of_failed_workers_end_with_them() -> None:
    with pytest.raises(WorkerFailed, match="exited with status 3"):
        tutti.launch(starts_a_child, False, workers=1)  # The fixture looks for what is left.


def loads_data(last_words: str) -> int:
    world = tutti.init()
    data = TensorDataset(torch.arange(12))
    loader = tutti.shard(DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True), world=world)
    total = sum(int(batch.sum()) for (batch,) in loader)
    assert len(multiprocessing.active_children()) == 1
    all_reduce(world)
    if last_words == "kill" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.close()
    return total


def test_data_loader_workers_inside_workers() -> None:
    assert sum(tutti.launch(loads_data, "")) == sum(range(12))  # The fixture looks for what is left.


def test_data_loader_workers_of_a_killed_worker() -> None:
    with pytest.raises(WorkerFailed, match="rank 1 was killed by SIGKILL"):
        tutti.launch(loads_data, "kill")  # The fixture looks for what is left.


# --- output ---


def speaks() -> None:
    rank = os.environ["RANK"]
    print(f"first of {rank}\nsecond of {rank}")
    print(f"in parts {rank}:", end="")
    print(" rest")
    print(f"complaint of {rank}", file=sys.stderr)
    os.write(1, "käse\n".encode() + b"\xff broken\n")
    print(f"no end {rank}", end="")
    print(f"no end of complaint {rank}", end="", file=sys.stderr)


def test_output_has_its_rank_before_every_line(capfd: pytest.CaptureFixture[str]) -> None:
    tutti.launch(speaks)
    said = capfd.readouterr()
    for rank in (0, 1):
        mine = [line for line in said.out.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert [line.removeprefix(f"[rank {rank}] ") for line in mine] == [
            f"first of {rank}",
            f"second of {rank}",
            f"in parts {rank}: rest",
            "käse",
            "\ufffd broken",
            f"no end {rank}",
        ]
        for words in ("complaint of", "no end of complaint"):
            assert f"[rank {rank}] {words} {rank}" in said.err.splitlines()
    assert (len(said.out.splitlines()), len(said.err.splitlines())) == (12, 4), "and nothing else is printed"


def speaks_and_dies() -> None:
    print("before the end", end="", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_last_words_of_a_killed_worker(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerFailed):
        tutti.launch(speaks_and_dies, workers=1)
    assert capfd.readouterr().out == "[rank 0] before the end\n"


# --- meeting ---


def variables_of(rank: int, size: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


MEET = "import tutti; print('ready', flush=True); input(); tutti.init()"


def let_go(*processes: subprocess.Popen[str]) -> None:
    """Once all have imported what they need, which takes a while and not the same on all, let them meet."""
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def test_rank_that_never_comes() -> None:
    port = free_port()
    with (
        started_warm("-c", MEET, TUTTI_TIMEOUT="4", **variables_of(0, 3, port)) as first,
        started_warm("-c", MEET, TUTTI_TIMEOUT="4", **variables_of(1, 3, port)) as second,
    ):
        let_go(first, second)
        outputs = [process.communicate(timeout=40)[0] for process in (first, second)]
    for rank, output in enumerate(outputs):
        last = output.splitlines()[-1]
        assert last.startswith("tutti.errors."), output
        assert f"rank {rank}: " in last
        assert "2 of 3 ranks are here; missing: 2." in last
        assert f"127.0.0.1:{port}" in last
    assert "[c10d]" not in outputs[0], "torch's own complaints would hide the message"


def test_rank_0_never_comes() -> None:
    port = free_port()
    with started_warm("-c", MEET, TUTTI_TIMEOUT="1", **variables_of(1, 2, port)) as process:
        let_go(process)
        output, _ = process.communicate(timeout=40)
    last = output.splitlines()[-1]
    assert f"rank 1: nobody answers at 127.0.0.1:{port}" in last, output
    assert "Rank 0 or the launcher was not started" in last


def test_two_processes_with_the_same_rank() -> None:
    port = free_port()
    with (
        started_warm("-c", MEET, **variables_of(0, 3, port)) as first,
        started_warm("-c", MEET, **variables_of(1, 3, port)) as second,
        started_warm("-c", MEET, **variables_of(1, 3, port)) as third,
    ):
        let_go(first, second, third)
        # Either may come second; the others wait for a rank that never comes.
        while not (ended := [process for process in (second, third) if process.poll() is not None]):
            time.sleep(0.02)
        output, _ = ended[0].communicate()
    assert "EnvironmentConflict: rank 1: two processes say they are rank 1 of 3: process" in output


def test_two_processes_as_rank_0() -> None:
    """The second cannot listen where the first does."""
    port = free_port()
    listener = socket.create_server(("127.0.0.1", port))
    with listener, started_warm("-c", MEET, **variables_of(0, 2, port)) as process:
        let_go(process)
        output, _ = process.communicate(timeout=40)
    assert f"cannot listen on 127.0.0.1 port {port}" in output
    assert "Choose another MASTER_PORT" in output


def test_ranks_started_by_hand_meet_on_loopback_only() -> None:
    """Rank 0 then runs the store itself."""
    port = free_port()
    code = f"import sys; sys.path[:0] = {sys.path!r}; from test_launch import meets; meets()"
    with (
        started_warm("-c", code, **variables_of(0, 2, port)) as first,
        started_warm("-c", code, **variables_of(1, 2, port)) as second,
    ):
        outputs = [process.communicate(timeout=40)[0] for process in (first, second)]
    for rank, output in enumerate(outputs):
        facts = json.loads(output)
        assert facts["met"] == [rank, 2]
        assert facts["listening"]
        assert set(facts["listening"]) <= LOOPBACKS


def meets() -> None:
    world = tutti.init()
    all_reduce(world)
    found = listening()
    all_reduce(world)  # Rank 0's store is needed until both have looked.
    print(json.dumps({"met": [world.rank, world.size], "listening": found}))
    world.close()


def is_slow() -> float:
    world = tutti.init(timeout=10)
    if world.rank == 1:
        select.select([], [], [], 2.5)
    return all_reduce(world)


@each_transport
def test_a_slow_rank_is_waited_for_and_named(
    transport: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TUTTI_PATIENCE", "1s")
    monkeypatch.setattr(diagnosis, "_START_S", 1.0)
    assert tutti.launch(is_slow, transport=transport) == [2.0, 2.0]
    assert re.search(r"tutti: rank 1 on \S+ is in phase 'starting' .*; rank 0 waits for it for", capfd.readouterr().err)


def waits_for_the_other() -> None:
    world = tutti.init()
    all_reduce(world)
    if world.rank == 0:
        world.transport.irecv(torch.empty(1), 1).wait()
    all_reduce(world)


@each_transport
def test_ranks_that_wait_for_each_other(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTTI_PATIENCE", "1s")
    wanted = "rank 0 (step 0) waits for rank 1 to send a message; rank 1 (step 0) waits for rank 0 to "
    with pytest.raises(WorkerFailed, match=re.escape(f"ranks wait for each other, and none can go on: {wanted}")):
        tutti.launch(waits_for_the_other, transport=transport)


# --- the supervisor's end ---


def pids_printed_by(process: subprocess.Popen[str], count: int) -> list[int]:
    """The pids that workers print once all have met."""
    assert process.stdout is not None
    pids = []
    while len(pids) < count:
        line = process.stdout.readline()
        assert line, "the supervisor ended early"
        if found := re.search(r"pid (\d+)", line):
            pids.append(int(found[1]))
    return pids


@each_transport
def test_workers_die_with_a_killed_supervisor(transport: str) -> None:
    with started_warm(str(SCRIPTS / "endless.py"), transport) as supervisor:
        pids = pids_printed_by(supervisor, 2)
        supervisor.kill()
        assert wait_until_gone(pids, NOTICE_S) == []


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_supervisor_of_the_command_line_is_stopped(sign: signal.Signals) -> None:
    _, *command = main_of("tutti.cli")
    with started_warm(*command, "run", "-n", "2", str(SCRIPTS / "endless_worker.py")) as supervisor:
        pids = pids_printed_by(supervisor, 2)
        supervisor.send_signal(sign)
        assert supervisor.wait(NOTICE_S + 5) == 128 + sign
        assert [pid for pid in pids if runs(pid)] == []
        assert supervisor.stdout is not None
        assert supervisor.stdout.read().splitlines()[-1] == "stopped"


def test_ctrl_c_in_a_script_that_launches() -> None:
    """Python's own answer: KeyboardInterrupt, after the workers were stopped."""
    with started(str(SCRIPTS / "endless.py"), "auto") as supervisor:
        pids = pids_printed_by(supervisor, 2)
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait(NOTICE_S + 5) == 130
        assert [pid for pid in pids if runs(pid)] == []


# --- sockets and memory ---


def listening() -> list[str]:
    """Addresses on which this process listens, as in /proc: hexadecimal."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:
            continue
        if found := re.fullmatch(r"socket:\[(\d+)\]", target):
            inodes.add(found[1])
    rows = [line.split() for name in ("tcp", "tcp6") for line in _rows(f"/proc/self/net/{name}")]
    return [fields[1].partition(":")[0] for fields in rows if fields[3] == "0A" and fields[9] in inodes]


def _rows(table: str) -> list[str]:
    return Path(table).read_text().splitlines()[1:] if Path(table).exists() else []


LOOPBACKS = {"0100007F", "0" * 24 + "01000000"}


def _can_mount() -> str:
    """Why a small /dev/shm cannot be made here; empty if it can."""
    if os.geteuid() != 0:
        return "needs root to mount a small /dev/shm"
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return "needs unshare and mount"
    tried = subprocess.run(
        ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"], capture_output=True, check=False
    )
    return "" if tried.returncode == 0 else f"cannot mount here: {tried.stderr.decode().strip()}"


def test_shared_memory_larger_than_dev_shm() -> None:
    if lacking := _can_mount():
        pytest.skip(lacking)
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" "$1"'
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, sys.executable, str(SCRIPTS / "reduce_64_mib.py")],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "/dev/shm has 1 MiB\nsums [3.0, 3.0]\n"
