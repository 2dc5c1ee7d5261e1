"""The fork server: forked workers are what spawned ones are, a server serves many runs, and all end together."""

import atexit
import faulthandler
import gc
import importlib
import multiprocessing
import os
import random
import re
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import uuid
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_work import hash_of, wait_for_ever, whereabouts
from test_launch import parent_signal, runs, started, wait_until_gone

import tutti
from tutti.errors import ConfigError, WorkerFailed
from tutti.launch import fork_client, fork_server, local, start
from tutti.launch.fork_client import ForkRefused
from tutti.launch.start import COMPILER, START, TORCH, TUTTI, WORKER, Program, may_fork, modules_for, warm_up

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def own_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers of this test alone, without torch: to start and kill one costs little, and other tests keep theirs."""
    plain = partial(Program, modules=WORKER)
    monkeypatch.setattr(fork_client, "_servers", [])
    monkeypatch.setattr(local, "Program", plain)
    monkeypatch.setattr(start, "Program", plain)
    yield
    fork_client.close_all()


# --- the same worker ---


def examine() -> dict[str, Any]:
    """What could tell a forked worker from a spawned one."""
    for module in (*WORKER, *TORCH, *TUTTI, *COMPILER):  # They add filters of warnings, whenever they are imported.
        importlib.import_module(module)
    files = [file for file in map(int, os.listdir("/proc/self/fd")) if is_open(file)]
    signals = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]
    return {
        "signals": {int(number): str(signal.getsignal(number)) for number in signals},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "files": sorted(re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{file}")) for file in files),
        "inheritable": sorted(
            os.get_inheritable(int(name)) for name in os.listdir("/proc/self/fd") if is_open(int(name))
        ),
        "path": sys.path,
        "program": [part for part in sys.argv if not part.isdigit()],
        "main": sys.modules["__main__"].__name__,
        "flags": str(sys.flags),
        "streams": [(each.encoding, each.errors, each.line_buffering, each.write_through) for each in streams()],
        "session": os.getsid(0) == os.getpgrp() == os.getpid(),
        "parent signal": parent_signal(),
        "threads": (len(os.listdir("/proc/self/task")), threading.active_count(), torch.get_num_threads()),
        "folder": os.getcwd(),
        "mask": Path("/proc/self/status").read_text().partition("Umask:")[2].split()[0],
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": [resource.getrlimit(number) for number in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE)],
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "environment": {name: value for name, value in os.environ.items() if name not in CHANGING},
        "filters": sorted({str(each[:2]) for each in warnings.filters}),
        "process": (multiprocessing.current_process().name, multiprocessing.parent_process()),
        "faults": faulthandler.is_enabled(),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "hooks": (sys.excepthook is sys.__excepthook__, sys.gettrace(), sys.getprofile()),
        "cuda": torch.cuda.is_initialized(),
    }


def parent_and_examine() -> tuple[int, dict[str, Any]]:
    return os.getppid(), examine()


CHANGING = (
    "TUTTI_SUPERVISOR_PIPE", "TUTTI_PARENT", "TUTTI_START", "TUTTI_COORDINATOR", "TUTTI_SECRET", "MASTER_PORT", "_",
)  # fmt: skip


def streams() -> list[Any]:
    return [sys.stdin, sys.stdout, sys.stderr]


def is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def test_a_forked_worker_is_what_a_spawned_one_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also after the server has started: folder, variables, umask, cores and limits are those of the call."""
    tutti.launch(whereabouts, workers=1)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOME_VARIABLE", "set after the server started")
    cores = os.sched_getaffinity(0)
    before = os.umask(0o027)
    os.sched_setaffinity(0, {min(cores)})
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[0] - 1, files[1]))
    try:
        ((forks_parent, forked),) = tutti.launch(parent_and_examine, workers=1)
        monkeypatch.setenv(START, "spawn")
        ((spawns_parent, spawned),) = tutti.launch(parent_and_examine, workers=1)
    finally:
        os.umask(before)
        os.sched_setaffinity(0, cores)
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
    assert forks_parent in fork_client.server_pids()
    assert spawns_parent == os.getpid()
    assert forked == spawned
    assert forked["limits"][1] == (files[0] - 1, files[1])
    assert forked["folder"] == str(tmp_path)
    assert forked["mask"] == "0027"
    assert forked["session"]


def count_threads() -> tuple[int, int, int, str]:
    importlib.import_module("numpy")
    torch.ones(200, 200) @ torch.ones(200, 200)
    with ThreadPoolExecutor(1) as pool:
        in_second_thread = pool.submit(torch.get_num_threads).result()
    tasks = len(os.listdir("/proc/self/task"))
    return tasks, torch.get_num_threads(), in_second_thread, torch.__config__.parallel_info()


def test_numbers_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has one thread, whatever its workers are to have: also more than there are cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(2 * (os.cpu_count() or 1)))
    monkeypatch.setenv(START, "fork")
    (forked,) = tutti.launch(count_threads, workers=1)
    for server in fork_client.server_pids():
        assert len(os.listdir(f"/proc/{server}/task")) == 1
    monkeypatch.setenv(START, "spawn")
    (spawned,) = tutti.launch(count_threads, workers=1)
    assert forked[1:] == spawned[1:]
    assert forked[0] >= spawned[0], "torch.set_num_threads starts another pool, which then sleeps"


def draw() -> tuple[float, float, float, bytes, str]:
    key = bytes(multiprocessing.current_process().authkey)
    return random.random(), float(np.random.rand()), torch.rand(1).item(), key, str(uuid.uuid4())


def test_no_two_workers_draw_the_same_numbers() -> None:
    draws = [tutti.launch(draw, workers=3), tutti.launch(draw, workers=3)]
    for kind in range(5):
        drawn = [worker[kind] for run in draws for worker in run]
        assert len(set(drawn)) == 6, drawn


def hooked(folder: str) -> None:
    atexit.register(Path(folder, os.environ["RANK"]).touch)


def test_exit_handlers_of_workers_run(tmp_path: Path) -> None:
    tutti.launch(hooked, str(tmp_path), workers=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def leaves_things(folder: str) -> None:
    """In a module, in a cycle, and in a thread: what Python closes when it ends."""
    module = types.ModuleType("user_module")
    sys.modules["user_module"] = module
    module.file = open(Path(folder, "unflushed"), "w")  # type: ignore[attr-defined]  # noqa: SIM115
    module.file.write("flushed")  # type: ignore[attr-defined]
    cycle: list[Any] = [tempfile.NamedTemporaryFile(dir=folder)]  # noqa: SIM115
    cycle.append(cycle)
    threading.Timer(0.3, Path(folder, "thread").touch).start()


def test_what_workers_leave_is_finished(tmp_path: Path) -> None:
    tutti.launch(leaves_things, str(tmp_path), workers=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thread", "unflushed"]
    assert (tmp_path / "unflushed").read_text() == "flushed"


# --- one server for many runs ---


def test_runs_share_a_server() -> None:
    first, second = (tutti.launch(whereabouts, workers=3) for _ in range(2))
    pids, servers = {pid for pid, _ in first + second}, {server for _, server in first + second}
    assert len(pids) == 6
    assert len(servers) == 1
    assert servers <= set(fork_client.server_pids())


@pytest.mark.usefixtures("own_servers")
def test_a_variable_that_acts_at_import_needs_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    ((_, usual),) = tutti.launch(hash_of, "a", workers=1)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    ((value, other),) = tutti.launch(hash_of, "a", workers=1)
    assert usual != other
    asked = subprocess.run([sys.executable, "-c", "print(hash('a'))"], capture_output=True, text=True, check=True)
    assert value == int(asked.stdout)


def cache_folder() -> tuple[str | None, int]:
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR"), os.getppid()


def test_a_variable_that_an_import_sets_needs_no_other_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch._dynamo sets this one, perhaps in the server, and perhaps between two runs in the caller."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    ((_, before),) = tutti.launch(cache_folder, workers=1)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/set/by/the/user")
    ((by_user, after),) = tutti.launch(cache_folder, workers=1)
    assert (by_user, after) == ("/set/by/the/user", before)


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2048, reason="needs 2048 open files")
def test_many_open_files() -> None:
    """Numbers of files from 1024 on are no numbers for select.select."""
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        tutti.launch(whereabouts, workers=1)
    finally:
        for file in files:
            os.close(file)


def test_modules_of_the_user_are_never_stale(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run after a change of a file sees the change."""
    from tutti.launch.local import run_script

    (tmp_path / "script.py").write_text("import beside; print('value', beside.value)")
    for value in (1, 22, 333):
        (tmp_path / "beside.py").write_text(f"value = {value}\n")
        run_script([str(tmp_path / "script.py")], 2, {})
        assert sorted(capfd.readouterr().out.splitlines()) == [f"[rank {rank}] value {value}" for rank in (0, 1)]


def test_runs_side_by_side() -> None:
    def run(number: int) -> list[tuple[int, int]]:
        return tutti.launch(sum_of_ranks, number, workers=2)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(6))) == [[number + 1.0] * 2 for number in range(6)]


def sum_of_ranks(number: int) -> float:
    world = tutti.init()
    tensor = torch.tensor([number / 2 + world.rank])
    world.transport.all_reduce(tensor).wait()  # type: ignore[attr-defined]
    world.close()
    return tensor.item()


def test_a_forked_copy_of_the_caller_has_no_server() -> None:
    tutti.launch(whereabouts, workers=1)
    server = fork_client.server_pids()
    ready, told = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(told, repr(fork_client.server_pids()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(ready, 100) == b"[]"
    os.close(ready)
    os.close(told)
    assert fork_client.server_pids() == server
    assert all(runs(each) for each in server)


# --- where workers are spawned ---


def test_unknown_way_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START, "magic")
    with pytest.raises(ConfigError, match="TUTTI_START must be fork or spawn, got 'magic'"):
        tutti.launch(whereabouts, workers=1)


def test_commands_and_measured_runs_are_spawned() -> None:
    assert may_fork(Program(["script.py"]), {})
    assert not may_fork(Program(["true"], is_command=True), {})
    assert not may_fork(Program(["script.py"]), {"COVERAGE_PROCESS_START": "x"})
    assert not may_fork(Program(["script.py"]), {"OMP_PROC_BIND": "true"})
    assert not may_fork(Program(["script.py"]), {"OMP_NUM_THREADS": "4,2"})
    assert not may_fork(Program(["script.py"]), {"MKL_NUM_THREADS": "1"})


def test_a_kernel_without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> int:
        raise OSError("Function not implemented")

    fork_client._has_pidfds.cache_clear()
    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert not may_fork(Program(["script.py"]), {})
    fork_client._has_pidfds.cache_clear()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "threads"),
        ("import torch; torch.cuda.is_initialized = lambda: True", "has initialised CUDA"),
        (
            "import os, torch; server = os.getpid(); torch.cuda._is_in_bad_fork = lambda: os.getpid() != server",
            "has used the CUDA driver",
        ),
        ("raise LookupError('no luck')", "LookupError: no luck"),
    ],
)
def test_a_server_that_cannot_fork_refuses(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "odd_module.py").write_text(text)
    server = fork_client._ServerHandle(
        {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}, ["odd_module"]
    )
    channel = server.connect()
    try:
        with pytest.raises(ForkRefused, match=reason):
            channel.start({"arguments": [], "environment": {}, "namespace": None}, [1, 2, 2])
    finally:
        channel.close()
        channel.close()  # Does nothing.
        assert server.num_channels == 0
        server.close()
        assert channel.describe_server_end().startswith("ended with status")


@pytest.mark.usefixtures("own_servers")
def test_a_server_started_ahead_that_then_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed, lest it fork the worker later, and the run is spawned."""
    warm_up()
    (server,) = fork_client.server_pids()
    ((_, parent),) = tutti.launch(whereabouts, workers=1)
    assert parent == server
    os.kill(server, signal.SIGSTOP)
    monkeypatch.setattr(fork_client, "ANSWER_TIMEOUT_S", 0.5)
    with pytest.warns(RuntimeWarning, match=r"ended with status -9: it did not answer within 0.5 s"):
        ((_, parent),) = tutti.launch(whereabouts, workers=1)
    assert parent == os.getpid()
    assert wait_until_gone([server], 5) == []


@pytest.mark.usefixtures("own_servers")
def test_a_refused_run_is_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ForkRefused("the fork server has 2 threads")

    monkeypatch.setattr(fork_client.ForkChannel, "start", refuse)
    with pytest.warns(RuntimeWarning, match="workers are spawned, which takes longer, because the fork server has 2"):
        ((_, parent),) = tutti.launch(whereabouts, workers=1)
    assert parent == os.getpid()


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("", WORKER),
        ("import os, json.decoder\nfrom time import sleep", WORKER),
        ("import beside", (*WORKER, *TORCH)),
        ("from . import beside", (*WORKER, *TORCH)),
        ("import runpy", (*WORKER, *TORCH)),
        ("this is no Python", (*WORKER, *TORCH)),
        ("import tutti", (*WORKER, *TORCH, *TUTTI)),
        ("import tutti, torch\noptimizer = torch.optim.SGD([])", (*WORKER, *TORCH, *TUTTI, *COMPILER)),
    ],
)
def test_the_text_of_a_script_decides_what_is_imported_before_it(
    text: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    assert modules_for(str(script)) == modules


# --- a supervisor without torch ---


@pytest.mark.parametrize("imports", ["import torch, tutti", "exec('import torch, tutti')"])
def test_the_command_line_imports_no_torch_to_supervise(imports: str, tmp_path: Path) -> None:
    """Then a process of the fork server's serves the store, which imports torch itself if the server has not."""
    script = tmp_path / "script.py"
    script.write_text(
        f"{imports}\nworld = tutti.init()\ntensor = torch.ones(1)\n"
        "world.transport.all_reduce(tensor).wait()\nprint('sum', tensor.item())\n"
    )
    code = f"import sys; from tutti.launch.local import run_script; run_script([{str(script)!r}], 2, {{}}); "
    with started("-c", code + "print('torch' in sys.modules)") as process:
        output, _ = process.communicate(timeout=50)
    assert sorted(output.splitlines()) == ["False", *(f"[rank {rank}] sum 2.0" for rank in range(2))]


def test_the_process_of_the_store_ends(tmp_path: Path) -> None:
    """The run ends at once and says why: its ranks would wait for their whole timeout."""
    script = tmp_path / "script.py"
    script.write_text("import select; print('here', flush=True); select.select([], [], [], 60)")
    code = (
        "import os, signal; from tutti.launch import local_launcher, start, supervisor\n"
        "from tutti.launch.local import run_script\n"
        "class Killed(start.WorkerStarter):\n"
        "    def start(self, rank, *rest):\n"
        "        store = next(iter(self.channel._processes))\n"
        "        worker = super().start(rank, *rest)\n"
        "        os.kill(store, signal.SIGKILL)\n"
        "        return worker\n"
        "local_launcher.WorkerStarter = Killed\n"
        "supervisor._NOTICE_S = 0.3  # The worker makes no use of it.\n"
        f"run_script([{str(script)!r}], 1, {{}})"
    )
    start_s = time.monotonic()
    with started("-c", code) as process:
        output, _ = process.communicate(timeout=50)
    assert "StoreLost: the process that serves the key-value store of this run was killed by SIGKILL" in output
    assert time.monotonic() - start_s < 30


def test_a_supervisor_that_ignores_sigchld(tmp_path: Path) -> None:
    """The kernel must not reap workers before the server has their status; the worker ignores SIGCHLD as well."""
    script = tmp_path / "script.py"
    script.write_text("import signal, sys; print(signal.getsignal(signal.SIGCHLD).name); sys.exit(3)")
    code = (
        "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); from tutti.launch.local import run_script; "
        f"run_script([{str(script)!r}], 1, {{}})"
    )
    with started("-c", code) as process:
        output, _ = process.communicate(timeout=50)
    assert "[rank 0] SIG_IGN" in output
    assert "WorkerFailed: rank 0 exited with status 3" in output


# --- kills ---


def test_what_an_ended_worker_left_is_killed_with_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its number is freed: after that the group could be another's."""
    events: list[tuple[str, int]] = []
    monkeypatch.setattr(fork_server, "_kill_group", lambda pid: events.append(("kill", pid)))
    monkeypatch.setattr(fork_server, "_reap", lambda pid: events.append(("reap", pid)))
    server = fork_server._Server.__new__(fork_server._Server)
    ours, theirs = socket.socketpair()
    with theirs, selectors.DefaultSelector() as selector:
        client = fork_server._Client(ours, running={1}, unreaped={2})
        selector.register(ours, selectors.EVENT_READ)
        server._clients, server._selector = {client}, selector
        server._drop(client)
    assert events == [("kill", 1), ("kill", 2), ("reap", 2)]


def wait_for_files(folder: Path, count: int) -> list[int]:
    while len(files := list(folder.iterdir())) < count:
        time.sleep(0.01)
    return [int(file.name) for file in files]


@pytest.mark.usefixtures("impatient", "own_servers")
def test_the_server_is_killed(tmp_path: Path) -> None:
    """Its workers die with it, the run says so, and the next one has a new server."""

    def kill() -> None:
        wait_for_files(tmp_path, 6)
        for pid in fork_client.server_pids():
            os.kill(pid, signal.SIGKILL)

    ((_, before),) = tutti.launch(whereabouts, workers=1)
    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(WorkerFailed, match="the fork server that started it has ended with status -9: no message"):
        tutti.launch(wait_for_ever, str(tmp_path), workers=3)
    killer.join()
    assert wait_until_gone(wait_for_files(tmp_path, 6), 5) == []
    ((_, after),) = tutti.launch(whereabouts, workers=1)
    assert before != after


def killed_at_random(seed: int) -> None:
    """One rank, which depends on the seed, kills itself at a moment that does too; all reduce meanwhile."""
    chance = random.Random(seed)
    victim, after_s = chance.randrange(5), chance.choice([0.0, 0.0, chance.random() * 0.3])
    if int(os.environ["RANK"]) == victim:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if after_s == 0.0:
            select.select([], [], [], 60)
    world = tutti.init()
    while True:
        world.transport.all_reduce(torch.ones(1)).wait()  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("impatient")
def test_a_worker_is_killed_at_any_moment(seed: int) -> None:
    victim = random.Random(seed).randrange(5)
    start_s = time.monotonic()
    with pytest.raises(WorkerFailed, match=f"rank {victim} was killed by SIGKILL") as caught:
        tutti.launch(killed_at_random, seed, workers=5)
    assert caught.value.status == 137
    assert time.monotonic() - start_s < 30


MARKED = """
import select, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import select; select.select([], [], [], 60)"])
print("here", flush=True)
select.select([], [], [], 60)
"""


@pytest.mark.parametrize("after", ["starting", "importing", "first", "all"])
def test_the_supervisor_is_killed_at_any_moment(after: str, tmp_path: Path) -> None:
    """The server, the workers and what the workers started end too: the fixture looks for what is left."""
    script = tmp_path / "script.py"
    # The server imports torch for a script that does, which takes seconds in which it can be killed.
    script.write_text(("import torch\n" if after == "importing" else "") + MARKED)
    code = f"from tutti.launch.local import run_script; run_script([{str(script)!r}], 4, {{}})"
    with started("-c", code) as supervisor:
        assert supervisor.stdout is not None
        if after == "importing":
            time.sleep(1.0)
        for _ in range({"first": 1, "all": 4}.get(after, 0)):
            assert "here" in supervisor.stdout.readline()
        supervisor.kill()
        supervisor.wait()
