"""A split model is saved in parts, by all ranks that hold one replica of it, and continues under any mesh or none."""

import errno
import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import AdamW

import warm
from support import run_ok, run_threads
from tutti.checkpoint import parts, storage, tensor_files
from tutti.checkpoint.background import BackgroundWriter
from tutti.checkpoint.index import FILES, INDEX, checkpoints, newest_complete, part_file, read_index, verify
from tutti.checkpoint.snapshots import EncodedSnapshot
from tutti.checkpoint.storage import CheckpointWriter, read
from tutti.checkpoint.tensor_files import write_all
from tutti.codecs import ErrorFeedback, TopK
from tutti.errors import CheckpointError
from tutti.job import Job, distribute
from tutti.parallel import Mesh, Pipeline
from tutti.parallel.model_on_mesh import ModelOnMesh
from tutti.parallel.split_state import SplitNames
from tutti.strategies import AllReduce, Strategy, parse
from tutti.world import World

load_file = pytest.importorskip("safetensors.torch").load_file

TENSOR, PIPE, BOTH = Mesh(tensor=2), Mesh(pipe=2, pipeline=Pipeline(cut=[3, 4])), Mesh(tensor=2, pipe=2)
WITH_DATA = Mesh(data=2, tensor=2)
MESHES = {"none": None, "tensor": TENSOR, "pipe": PIPE, "data": WITH_DATA, "both": BOTH}
STEPS, AT, SAMPLES = 5, 2, 16
EXTRA = {"best": [1, (2, "a", "a")], "names": ["a", "a"]}


class Shift(nn.Module):
    """Has a buffer, and a state that is no tensor."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(17, dtype=torch.float64))

    def get_extra_state(self) -> Any:
        return {"kind": "shift"}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"kind": "shift"}

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def net(seed: int) -> nn.Module:
    """The same every time, whatever other ranks draw meanwhile."""
    generator = torch.Generator().manual_seed(seed)
    layers = [nn.Linear(8, 17), Shift(), nn.Tanh(), nn.Linear(17, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 5)]
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


class Run:
    """A training run on one rank, as a script has it."""

    def __init__(self, world: World, mesh: Mesh | None, seed: int = 0, strategy: Strategy | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
        self.model = net(seed)
        self.optimizer = AdamW(self.model.parameters(), lr=0.01)
        strategy = strategy or AllReduce("ring")
        example = x[: SAMPLES // (1 if mesh is None else mesh.data)]
        self.job: Job = distribute(self.model, self.optimizer, strategy, world=world, mesh=mesh, example=example)
        self.pipeline = self.job.pipeline(F.mse_loss) if mesh is not None and mesh.pipe > 1 else None
        self.x = x.chunk(self.job.world.size)[self.job.world.rank]

    def steps(self, number: int) -> "Run":
        for _ in range(number):
            self.optimizer.zero_grad()
            if self.pipeline is not None:
                self.pipeline(self.x, self.x[:, :5])
            else:
                F.mse_loss(self.model(self.x), self.x[:, :5]).backward()
            self.optimizer.step()
        return self

    def result(self) -> list[Tensor]:
        self.job.finish()
        moments = [self.optimizer.state[parameter]["exp_avg_sq"] for parameter in self.model.parameters()]
        return [value.detach().clone() for value in (*self.model.parameters(), *self.model.buffers(), *moments)]


def whole(world: World, mesh: Mesh | None, strategy: Strategy | None = None) -> list[Tensor]:
    return Run(world, mesh, 0, strategy).steps(STEPS).result()


def stopped(world: World, mesh: Mesh | None, folder: Path, at: int = AT, strategy: Strategy | None = None) -> None:
    """Save after some steps, take one more, and leave without an agreement."""
    run = Run(world, mesh, 0, strategy).steps(at)
    run.job.checkpoint(folder, extra=EXTRA)
    run.steps(1).job.__exit__(KeyError, None, None)


def continued(
    world: World, mesh: Mesh | None, folder: Path, at: int = AT, strategy: Strategy | None = None
) -> list[Tensor]:
    """Continue with a model that began elsewhere: what is not loaded shows."""
    run = Run(world, mesh, 7, strategy)
    restored = run.job.restore(folder)
    assert restored is not None
    assert (restored.steps, restored.extra, run.job.steps) == (at, EXTRA, at)
    return run.steps(STEPS - at).result()


def size(mesh: Mesh | None) -> int:
    return 1 if mesh is None else mesh.size


@pytest.fixture(scope="module")
def alone() -> list[Tensor]:
    found: list[Tensor] = run_ok(whole, None, size=1, transport="sockets")[0]
    return found


def assert_close(got: list[Tensor], wanted: list[Tensor]) -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("before", MESHES)
def test_a_split_model_continues_under_any_mesh(before: str, tmp_path: Path, alone: list[Tensor]) -> None:
    run_ok(stopped, MESHES[before], tmp_path, size=size(MESHES[before]), transport="sockets")
    for mesh in (None, BOTH):
        for got in run_ok(continued, mesh, tmp_path, size=size(mesh), transport="sockets"):
            assert_close(got, alone)


COMPRESSED = AllReduce(codec=ErrorFeedback(TopK(0.3)), exact_below=0)


@pytest.mark.parametrize(
    ("mesh", "strategy", "transport"),
    [
        (WITH_DATA, None, "shared_memory"),
        (BOTH, None, "hosts"),
        (Mesh(data=2, pipe=2, pipeline=Pipeline(cut=[3, 4])), COMPRESSED, "sockets"),
    ],
    ids=["data", "both", "compressed"],
)
def test_the_same_mesh_gives_the_same_bits(mesh: Mesh, strategy: Any, transport: str, tmp_path: Path) -> None:
    run_ok(stopped, mesh, tmp_path, AT, strategy, size=4, transport=transport)
    got = run_ok(continued, mesh, tmp_path, AT, strategy, size=4, transport=transport)
    wanted = run_ok(whole, mesh, strategy, size=4, transport=transport)
    for ours, theirs in zip(got, wanted, strict=True):
        assert all(map(torch.equal, ours, theirs))


SYNCHRONOUS = ("averaging:every=2", "bmuf:every=3", "poseidon", "ps:bsp", "gossip")
PIPE_WITH_DATA = Mesh(data=2, pipe=2, pipeline=Pipeline(cut=[3, 4]))


@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        *((strategy, WITH_DATA) for strategy in SYNCHRONOUS),
        *((strategy, PIPE_WITH_DATA) for strategy in (*SYNCHRONOUS, "ps:async", "peers")),
    ],
    ids=lambda value: value if isinstance(value, str) else "x".join(map(str, value.shape.values())),
)
def test_any_strategy_along_data(strategy: str, mesh: Mesh, tmp_path: Path) -> None:
    """Its state is put together from the parts; where the order of ranks does not count, the bits are the same."""
    made = parse(strategy)
    run_ok(stopped, mesh, tmp_path, AT, made, size=4, transport="sockets")
    got = run_ok(continued, mesh, tmp_path, AT, made, size=4, transport="sockets")
    if made.synchronous:
        wanted = run_ok(whole, mesh, made, size=4, transport="sockets")
        assert all(torch.equal(*pair) for pairs in zip(got, wanted, strict=True) for pair in zip(*pairs, strict=True))
    run_ok(continued, None, tmp_path, size=1, transport="sockets")


def test_in_virtual_time(tmp_path: Path, alone: list[Tensor]) -> None:
    run_ok(stopped, BOTH, tmp_path, size=4, transport="simulated_hosts")
    assert read_index(tmp_path / "step-00000002").parts == 4
    assert_close(run_ok(continued, BOTH, tmp_path, size=4, transport="simulated")[0], alone)


@pytest.mark.parametrize("mesh", [TENSOR, PIPE, BOTH, WITH_DATA], ids=["tensor", "pipe", "both", "data"])
def test_no_rank_holds_the_whole_model(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving: set[int] = set()  # Ranks as threads: methods are replaced once, for all of them.

    for owner, name in ((ModelOnMesh, "full_model"), (SplitNames, "gather")):
        method = getattr(owner, name)

        def gather(*arguments: Any, _method: Any = method, **options: Any) -> Any:
            assert threading.get_ident() not in saving, "a rank gathers the whole model"
            return _method(*arguments, **options)

        monkeypatch.setattr(owner, name, gather)

    submit = BackgroundWriter.submit
    kept: dict[int, EncodedSnapshot] = {}

    def keep(writer: BackgroundWriter, snapshot: EncodedSnapshot) -> None:
        kept[threading.get_ident()] = snapshot
        submit(writer, snapshot)

    monkeypatch.setattr(BackgroundWriter, "submit", keep)

    def train(world: World) -> list[int]:
        run = Run(world, mesh).steps(2)
        saving.add(threading.get_ident())
        run.job.checkpoint(tmp_path)
        saving.discard(threading.get_ident())
        run.job.finish()
        own = kept.get(threading.get_ident())
        return [] if own is None else [tensor.nbytes for file in FILES[:2] for tensor in own.tensors[file].values()]

    held = [sum(sizes) for sizes in run_ok(train, size=mesh.size, transport="sockets")]
    num_parts = mesh.tensor * mesh.pipe
    everything = sum(tensor.nbytes for tensor in (*net(0).parameters(), *net(0).buffers()))
    everything += 2 * sum(parameter.nbytes for parameter in net(0).parameters())
    steps = 4 * len(list(net(0).parameters()))  # Adam's counts, which are no shards.
    assert sum(map(bool, held)) == num_parts  # One replica writes.
    assert everything <= sum(held) <= everything + steps * mesh.tensor
    assert max(held) < (0.75 if num_parts == 2 else 0.5) * everything
    folder = tmp_path / "step-00000002"
    names = {part_file(name, part, num_parts) for name in FILES for part in range(num_parts)}
    assert {path.name for path in folder.iterdir()} == {*names, INDEX}


def test_the_example_in_the_docs_reads_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ok(stopped, BOTH, tmp_path, size=4, transport="sockets")
    monkeypatch.chdir(tmp_path / "step-00000002")
    text = (Path(__file__).parents[2] / "docs/guides/checkpoints.md").read_text()
    (example,) = [block for block in text.split("```python\n") if block.startswith("import json")]
    names: dict[str, Any] = {}
    exec(example.split("```")[0], names)
    wanted = read(Path()).decoded().model
    assert names["model"].keys() == {name for name in wanted if not name.endswith("_extra_state")}
    assert all(torch.equal(value, wanted[name]) for name, value in names["model"].items())


def test_the_model_is_exported_as_one_file(tmp_path: Path, call: Callable[..., Any]) -> None:
    run_ok(stopped, BOTH, tmp_path / "run", size=4, transport="sockets")
    call("checkpoints", str(tmp_path / "run"), "--verify")
    call("checkpoints", str(tmp_path / "run"), "--to", str(tmp_path / "model.safetensors"))
    wanted = read(tmp_path / "run" / "step-00000002").decoded().model
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    assert {name for name, value in wanted.items() if isinstance(value, Tensor)} == found.keys()


# Faults


@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_part(name: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for at in (1, 2):
        run_ok(stopped, TENSOR, tmp_path, at, size=2, transport="sockets")
    file = tmp_path / "step-00000002" / part_file(name, 1, 2)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content[:-1] if damage == "cut" else content)
    if damage == "missing":
        file.unlink()
    assert file.name in verify(tmp_path / "step-00000002")[0]
    with caplog.at_level(logging.WARNING, "tutti"):
        run_ok(continued, None, tmp_path, 1, size=1, transport="sockets")
    assert re.search(f"step-00000002 is skipped: .*{file.name}", caplog.text)


def fill_disk(monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    def write(file: int, data: memoryview) -> None:
        if re.search(pattern, os.readlink(f"/proc/self/fd/{file}")):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_all(file, data)

    monkeypatch.setattr(tensor_files, "write_all", write)


def save_often(world: World, mesh: Mesh, folder: Path) -> list[Tensor]:
    run = Run(world, mesh)
    for _ in range(STEPS):
        run.steps(1).job.checkpoint(folder, every=1)
    return run.result()


@pytest.mark.parametrize("sent", [False, True], ids=["shared folder", "sent"])
@pytest.mark.parametrize("part", [0, 1])
def test_a_full_disk_leaves_training_and_earlier_checkpoints(
    part: int, sent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if sent:
        monkeypatch.setattr(parts, "_sees", lambda folder: False)
    fill_disk(monkeypatch, rf"step-0000000[245].*/{part_file('optimizer.safetensors', part, 2)}")
    results = run_threads(save_often, TENSOR, tmp_path, size=2, transport="sockets")
    # All steps were trained; the run ends with an error, on the rank that leads and the one that could not write.
    assert isinstance(results[0], CheckpointError)
    name = rf"step-00000005.*/{part_file('optimizer.safetensors', part, 2)}: No space left.*The disk is full"
    assert re.search(name, str(results[0])), results[0]
    assert isinstance(results[1], list if sent or part == 0 else CheckpointError), results[1]
    if part == 1:
        assert "rank 1: cannot write" in str(results[0])
    assert sorted(info.steps for info in checkpoints(tmp_path)) == [1, 3]
    assert newest_complete(tmp_path) == tmp_path / "step-00000003"
    assert caplog.text.count("Training goes on") == (3 if sent or part == 0 else 6)
    assert [path.name for path in tmp_path.glob(".writing*")] == []


def test_two_jobs_cannot_write_to_one_folder(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path):
        for found in run_threads(stopped, TENSOR, tmp_path, size=2, transport="sockets"):
            assert re.search(r"is in use: process \d+ on host .* writes checkpoints", str(found)), found


def test_a_rank_that_does_not_see_the_folder_sends_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: list[Tensor]
) -> None:
    monkeypatch.setattr(parts, "_sees", lambda folder: False)
    monkeypatch.setattr(tensor_files, "_BLOCK_BYTES", 256)  # So that there are several blocks.
    monkeypatch.setattr(tensor_files, "_SMALL_BYTES", 100)
    run_ok(stopped, BOTH, tmp_path, size=4, transport="sockets")
    assert verify(tmp_path / "step-00000002") == []
    assert_close(run_ok(continued, None, tmp_path, size=1, transport="sockets")[0], alone)


def test_a_part_that_the_leader_does_not_see_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = parts.write_part

    def elsewhere(folder: Path, snapshot: Any, part: int, num_parts: int) -> Any:
        written = write(folder, snapshot, part, num_parts)
        (folder / part_file(FILES[0], part, num_parts)).unlink()
        return written

    monkeypatch.setattr(parts, "write_part", elsewhere)  # As ranks other than the leader find it.
    leader, _ = run_threads(save_often, TENSOR, tmp_path, size=2, transport="sockets")
    assert re.search("rank 1: .*is not seen by the rank that leads: .*model-00002-of-00002", str(leader)), leader
    assert checkpoints(tmp_path) == []


def test_a_mistake_of_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    def save(world: World) -> None:
        run = Run(world, PIPE).steps(1)
        if world.rank == 1:
            last = run.optimizer.state[list(run.model.parameters())[-1]]
            last["odd"] = threading.Lock()
        run.job.checkpoint(tmp_path)

    for found in run_threads(save, size=2, transport="sockets"):
        assert "is a _thread.lock" in str(found), found
    assert checkpoints(tmp_path) == []


def test_a_part_that_cannot_be_sent_leaves_the_next_checkpoint_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_sees", lambda folder: False)
    blocks, failures = parts.tensor_blocks, [MemoryError("no memory")]

    def fail_once(tensors: Any) -> Any:
        if failures:
            raise failures.pop()
        return blocks(tensors)

    monkeypatch.setattr(parts, "tensor_blocks", fail_once)
    run_ok(save_often, TENSOR, tmp_path, size=2, transport="sockets")
    assert [info.steps for info in checkpoints(tmp_path)] == [5, 4, 3]


def test_a_folder_that_the_leader_cannot_open_waits_for_the_folder_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, submit, refused = parts.write_part, BackgroundWriter.submit, threading.Event()

    def after_the_refusal(folder: Path, *rest: Any) -> Any:
        assert refused.wait(20)
        return write(folder, *rest)

    def refuse_once(self: BackgroundWriter, snapshot: Any) -> None:
        if self._writer._run == tmp_path / "b" and isinstance(self._writer, CheckpointWriter) and not refused.is_set():
            raise CheckpointError("in use: a rank that was lost has it.")
        submit(self, snapshot)

    monkeypatch.setattr(storage, "write_part", after_the_refusal)  # As the leader finds it.
    monkeypatch.setattr(BackgroundWriter, "submit", refuse_once)

    def train(world: World) -> None:
        run = Run(world, TENSOR)
        for _ in range(2):
            run.job.checkpoint(tmp_path / "a")
            run.job.checkpoint(tmp_path / "b")
            if world.rank == 0:
                refused.set()
            run.steps(1)
        run.job.finish()

    run_ok(train, size=2, transport="sockets")
    assert caplog.text.count("ERROR") == 1, caplog.text
    assert [info.steps for info in checkpoints(tmp_path / "a")] == [1, 0]
    assert [info.steps for info in checkpoints(tmp_path / "b")] == [1]


def test_an_error_of_the_leader_does_not_remove_what_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill_disk(monkeypatch, rf"step-00000002.*/{part_file(FILES[0], 0, 2)}")
    write, end, failed = parts.write_part, parts.OtherParts.end, threading.Event()

    def after_the_failure(folder: Path, snapshot: Any, part: int, num_parts: int) -> Any:
        assert snapshot.steps != 2 or failed.wait(20)
        return write(folder, snapshot, part, num_parts)

    def ends(self: parts.OtherParts) -> None:
        failed.set()
        end(self)

    monkeypatch.setattr(parts, "write_part", after_the_failure)  # As ranks other than the leader find it.
    monkeypatch.setattr(parts.OtherParts, "end", ends)
    failed.clear()

    def train(world: World) -> None:
        run = Run(world, TENSOR).steps(2)
        run.job.checkpoint(tmp_path)
        run.job.finish()

    leader, other = run_threads(train, size=2, transport="sockets")
    assert "No space left" in str(leader)
    assert other is None, "it has written its part"
    assert "rank 1" not in caplog.text
    assert list(tmp_path.glob(".writing*")) == []


def test_ranks_of_different_replicas_do_not_wait_for_each_others_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank is lost while ranks copy. Some have seen it and some have not: each takes another replica to save."""
    agreement = Job._agreement
    armed: set[int] = set()  # Ranks as threads: a method is replaced once, for all of them.

    @contextmanager
    def lose_rank_0(self: Job, *copies: nn.Module, optimizer: bool) -> Iterator[None]:
        with agreement(self, *copies, optimizer=optimizer):
            if threading.get_ident() in armed:
                rank = self._checkpoints._world.rank
                if rank == 0:
                    raise KeyError("lost")
                deadline = time.monotonic() + 20
                while rank == 1 and not self._exchange.is_leader and time.monotonic() < deadline:
                    time.sleep(0.01)
            yield

    monkeypatch.setattr(Job, "_agreement", lose_rank_0)

    def train(world: World) -> None:
        run = Run(world, PIPE_WITH_DATA, strategy=parse("peers")).steps(1)
        armed.add(threading.get_ident())
        try:
            run.job.checkpoint(tmp_path)
            armed.clear()
            if world.rank == 2:
                raise KeyError("its replica is lost")
            run.job.checkpoint(tmp_path)
            run.job.finish()
        except KeyError:
            run.job.__exit__(KeyError, None, None)
            raise

    results = run_threads(train, size=4, transport="sockets")
    assert [isinstance(found, KeyError) for found in results] == [True, False, True, False], results
    assert (results[1], results[3]) == (None, None), results
    assert "no checkpoint of step 1: a rank was lost while it was copied" in caplog.text
    assert [info.problem for info in checkpoints(tmp_path)] == [None]


def test_entries_that_hooks_rename_are_saved_by_the_rank_that_has_them(tmp_path: Path) -> None:
    def train(world: World) -> dict[str, Tensor]:
        model = net(0)
        model[5] = checkpoint_wrapper(model[5])  # type: ignore[index, operator]
        assert "5.weight" in model.state_dict()
        assert "5.weight" not in dict(model.named_parameters())
        optimizer = AdamW(model.parameters())
        example = torch.ones(4, 8, dtype=torch.float64)
        job = distribute(model, optimizer, AllReduce("ring"), world=world, mesh=PIPE, example=example)
        job.checkpoint(tmp_path)
        job.finish()
        return model.state_dict()

    for wanted in run_ok(train, size=2, transport="sockets"):
        found = read(tmp_path / "step-00000000").decoded().model
        assert all(torch.equal(found[name], value) for name, value in wanted.items() if isinstance(value, Tensor))


def test_two_folders_in_one_loop(tmp_path: Path) -> None:
    def train(world: World) -> None:
        run = Run(world, TENSOR)
        for _ in range(4):
            run.steps(1).job.checkpoint(tmp_path / "a", every=1)
            run.job.checkpoint(tmp_path / "b", every=2, keep=1)
        run.job.finish()

    run_ok(train, size=2, transport="sockets")
    assert [info.steps for info in checkpoints(tmp_path / "a")] == [4, 3, 2]
    assert [info.steps for info in checkpoints(tmp_path / "b")] == [4]
    assert all(verify(info.folder) == [] for info in (*checkpoints(tmp_path / "a"), *checkpoints(tmp_path / "b")))


# Processes

SCRIPT = """
import os, signal, sys, torch, tutti
from tutti.checkpoint import parts

world = tutti.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
job = tutti.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=tutti.Mesh(tensor=2))
folder = sys.argv[1]
"""

KILLED = """
job.checkpoint(folder)
model(torch.ones(2, 4)).sum().backward()
job._replica.optimizer.step()
for writer in job._checkpoints._writers.values():
    writer.wait()
victim = int(sys.argv[2])
write = parts.write_part

def die(folder, snapshot, part, num_parts):
    if part == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(folder, snapshot, part, num_parts)

parts.write_part = die
import tutti.checkpoint.storage
tutti.checkpoint.storage.write_part = die
job.checkpoint(folder)
job.finish()
"""


def launched(script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT + script)
    command = [*warm.main_of("tutti.cli"), "run", "--workers", "2", "train.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_between_copy_and_write(victim: int, tmp_path: Path) -> None:
    ended = launched(KILLED, tmp_path, "run", str(victim))
    assert ended.returncode != 0
    assert signal.Signals.SIGKILL.name in ended.stderr, ended.stderr
    assert [info.steps for info in checkpoints(tmp_path / "run")] == [0]
    assert newest_complete(tmp_path / "run") == tmp_path / "run" / "step-00000000"
    with CheckpointWriter(tmp_path / "run"):
        pass  # Nobody holds the folder any more.


OWN_FOLDERS = """
os.makedirs(f"host{world.rank}")
os.chdir(f"host{world.rank}")
job.checkpoint(folder)
job.finish()
"""


def test_hosts_need_no_common_file_system(tmp_path: Path) -> None:
    ended = launched(OWN_FOLDERS, tmp_path, "run")
    assert ended.returncode == 0, ended.stderr
    assert verify(tmp_path / "host0" / "run" / "step-00000000") == []
    assert read_index(tmp_path / "host0" / "run" / "step-00000000").parts == 2
    assert list((tmp_path / "host1").iterdir()) == []
