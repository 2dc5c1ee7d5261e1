"""Checkpoints on disk: complete or absent after a crash at any moment, and every damage is found and named."""

import errno
import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tutti.checkpoint import index as index_module
from tutti.checkpoint.file_system import file_system, warn_about
from tutti.checkpoint.index import FILES, INDEX, checkpoints, index_bytes, read_index, verify
from tutti.checkpoint.run_lock import RunLock
from tutti.checkpoint.storage import (
    CheckpointWriter,
    EncodedSnapshot,
    Snapshot,
    newest_complete,
    read,
    read_newest,
    write,
)
from tutti.checkpoint.tensor_files import parse_tensors, read_file, write_tensors
from tutti.errors import CheckpointError, ConfigError

load_file = pytest.importorskip("safetensors.torch").load_file


def snapshot(steps: int, value: float | None = None) -> Snapshot:
    filled = torch.full((3, 2), float(steps) if value is None else value)
    return Snapshot(
        steps=steps,
        model={"layer.weight": filled, "layer.bias": filled[0].to(torch.bfloat16)},
        optimizer={"state": {0: {"exp_avg": filled * 2, "step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]},
        state={"seed": 7, "rng": torch.get_rng_state(), "user": {"names": ("a", b"b")}},
        strategy="allreduce:topk=0.01",
        world_size=4,
    )


def assert_same(found: Snapshot, wanted: Snapshot) -> None:
    assert (found.steps, found.strategy, found.world_size) == (wanted.steps, wanted.strategy, wanted.world_size)
    torch.testing.assert_close(dict(found.model), dict(wanted.model), rtol=0, atol=0)
    torch.testing.assert_close(found.optimizer["state"], wanted.optimizer["state"], rtol=0, atol=0)
    assert found.optimizer["param_groups"] == wanted.optimizer["param_groups"]
    assert (found.state["seed"], found.state["user"]) == (wanted.state["seed"], wanted.state["user"])


def names(run: Path) -> list[str]:
    return sorted(entry.name for entry in run.iterdir())


# Writing and reading


def test_a_snapshot_comes_back(tmp_path: Path) -> None:
    wanted = snapshot(123)
    folder = write(tmp_path / "new" / "run", wanted)
    assert folder == tmp_path / "new" / "run" / "step-00000123"
    assert names(folder) == sorted([*FILES, INDEX])
    assert json.loads((folder.parent / "latest.json").read_text()) == {"checkpoint": folder.name}
    assert_same(read(folder).decoded(), wanted)
    assert verify(folder) == []
    assert newest_complete(folder.parent) == folder
    found, read_back = read_newest(folder.parent) or (None, None)
    assert found == folder
    assert read_back is not None
    assert_same(read_back.decoded(), wanted)


def test_the_model_loads_with_safetensors(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = nn.Parameter(torch.randn(3, 3).t())  # Not contiguous.
    model.add_module("tied", nn.Linear(3, 3))
    model.tied.weight = model[2].weight
    model.short = nn.Parameter(torch.randn(5).to(torch.bfloat16))
    folder = write(tmp_path, Snapshot(steps=1, model=model.state_dict()))
    loaded = load_file(folder / "model.safetensors")
    assert set(loaded) == set(model.state_dict())
    torch.testing.assert_close(loaded, dict(model.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(read(folder).decoded().model, dict(model.state_dict()), rtol=0, atol=0)


def test_tensors_of_many_blocks_and_many_small_ones(tmp_path: Path) -> None:
    tensors = {f"small.{number}": torch.full((number % 7,), number, dtype=torch.int16) for number in range(3000)}
    tensors["large"] = torch.arange(5 * 2**20)
    tensors["view"] = torch.arange(2**20).reshape(1024, 1024).t()
    stored = write_tensors(tmp_path / "file", tensors)
    assert (tmp_path / "file").stat().st_size == stored.size
    for found in (parse_tensors("file", read_file(tmp_path / "file", stored)), load_file(tmp_path / "file")):
        assert set(found) == set(tensors)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert all(tensor.data_ptr() % tensor.itemsize == 0 for tensor in load_file(tmp_path / "file").values())


def test_size_is_little_more_than_the_tensors(tmp_path: Path) -> None:
    model = {f"layers.{number}.weight": torch.randn(128, 128) for number in range(32)}
    optimizer = {"state": {number: {"exp_avg": weight} for number, weight in enumerate(model.values())}}
    folder = write(tmp_path, Snapshot(steps=1, model=model, optimizer=optimizer))
    total = sum(path.stat().st_size for path in folder.iterdir())
    assert total <= 1.02 * 2 * 32 * 128 * 128 * 4


def test_read_tensors_can_be_changed(tmp_path: Path) -> None:
    write(tmp_path, snapshot(1))
    found = read(tmp_path / "step-00000001").decoded()
    found.model["layer.weight"].add_(1)
    assert found.model["layer.bias"].tolist() == [1, 1]


def test_old_ones_beyond_keep_are_deleted(tmp_path: Path) -> None:
    for steps in range(1, 6):
        write(tmp_path, snapshot(steps), keep=2)
    assert names(tmp_path) == [".lock", "latest.json", "step-00000004", "step-00000005"]
    with pytest.raises(ConfigError, match="must be 1 or more, got 0"):
        write(tmp_path, snapshot(6), keep=0)


def test_newest_is_what_was_written_last(tmp_path: Path) -> None:
    """After a return to an older checkpoint, steps are counted from there again."""
    for steps in (100, 200, 150):
        write(tmp_path, snapshot(steps), keep=2)
    assert [info.steps for info in checkpoints(tmp_path)] == [150, 200]
    assert newest_complete(tmp_path) == tmp_path / "step-00000150"


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, snapshot(1, 1.0))
    folder = write(tmp_path, snapshot(1, 2.0))
    assert_same(read(folder).decoded(), snapshot(1, 2.0))
    assert names(tmp_path) == [".lock", "latest.json", "step-00000001"]


def test_the_list_says_what_is_there(tmp_path: Path) -> None:
    write(tmp_path, snapshot(1))
    write(tmp_path, snapshot(2))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-00000001" / "state.safetensors").unlink()
    newest, oldest = checkpoints(tmp_path)
    assert newest.problem is None
    assert newest.index is not None
    assert (newest.steps, newest.index.strategy, newest.index.world_size) == (2, "allreduce:topk=0.01", 4)
    assert newest.size == sum((newest.folder / name).stat().st_size for name in FILES)
    assert "state.safetensors: No such file" in (oldest.problem or "")


def test_no_checkpoints(tmp_path: Path) -> None:
    assert checkpoints(tmp_path) == []
    assert newest_complete(tmp_path) is None
    assert read_newest(tmp_path / "absent") is None
    with pytest.raises(CheckpointError, match=r"cannot list the checkpoints of .*absent: No such file"):
        checkpoints(tmp_path / "absent")


# Damage


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(CheckpointError, match=r"is not a checkpoint: there is no .*tutti checkpoints RUN lists"):
            read(folder).decoded()
        assert len(verify(folder)) == 1


def test_an_index_cut_off_at_any_byte(tmp_path: Path) -> None:
    path = write(tmp_path, snapshot(1)) / INDEX
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged"):
            read_index(path.parent)
    path.write_bytes(whole + b"\n")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_index(path.parent)


def test_an_index_with_any_flipped_bit(tmp_path: Path) -> None:
    path = write(tmp_path, snapshot(1)) / INDEX
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match="is damaged"):
            read_index(path.parent)


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_or_a_cut_in_a_file_of_tensors(file: str, tmp_path: Path) -> None:
    path = write(tmp_path, snapshot(1)) / file
    whole = path.read_bytes()
    for changed in (whole[:-1], whole + b"\0", b"", *_flipped(whole)):
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=rf"{file} is damaged"):
            read(path.parent).decoded()
        (problem,) = verify(path.parent)
        assert file in problem
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"cannot read .*{file}: No such file"):
        read(path.parent).decoded()


def _flipped(whole: bytes) -> Iterator[bytes]:
    for place in range(0, len(whole), 31):
        changed = bytearray(whole)
        changed[place] ^= 0x10
        yield bytes(changed)


def test_a_newer_format(tmp_path: Path) -> None:
    folder = write(tmp_path, snapshot(1))
    content = json.loads((folder / INDEX).read_text())["index"]
    newer = index_module.CheckpointIndex(**{**content, "files": read_index(folder).files, "format": 2})
    (folder / INDEX).write_bytes(index_bytes(newer))
    with pytest.raises(CheckpointError, match=r"format version 2, and Tutti .* reads version 1.*--upgrade"):
        read(folder).decoded()


@pytest.mark.parametrize("change", [{"files": {}}, {"steps_": 1}, {"format": "1"}, {"trees": 3}], ids=str)
def test_an_index_with_another_content(change: dict[str, Any], tmp_path: Path) -> None:
    import hashlib

    folder = write(tmp_path, snapshot(1))
    content = json.loads((folder / INDEX).read_text())["index"] | change
    body = json.dumps(content)
    digest = hashlib.sha256(body.encode()).hexdigest()
    (folder / INDEX).write_text(f'{{"sha256":"{digest}","index":{body}}}\n')
    with pytest.raises(CheckpointError):
        read(folder).decoded()


def test_a_header_that_contradicts_itself(tmp_path: Path) -> None:
    import hashlib

    from tutti.checkpoint.index import StoredFile

    for header in (b"[]", b'{"a":{"dtype":"F9","shape":[1],"data_offsets":[0,4]}}', b"\xff", b"{",
                   b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'):  # fmt: skip
        data = len(header).to_bytes(8, "little") + header + bytes(4)
        (tmp_path / "file").write_bytes(data)
        with pytest.raises(CheckpointError, match="not a safetensors file"):
            parse_tensors("file", read_file(tmp_path / "file", StoredFile(len(data), hashlib.sha256(data).hexdigest())))


def test_damaged_ones_are_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for steps in (1, 2, 3):
        write(tmp_path, snapshot(steps))
    model = tmp_path / "step-00000003" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"\x77")  # Of the right size: only the checksum tells.
    (tmp_path / "step-00000002" / INDEX).write_text("{}")
    with caplog.at_level(logging.WARNING, "tutti"):
        assert newest_complete(tmp_path) == tmp_path / "step-00000001"
    assert "step-00000003 is skipped: " in caplog.text
    assert "model.safetensors is damaged" in caplog.text
    assert "step-00000002 is skipped: " in caplog.text
    found, _ = read_newest(tmp_path) or (None, None)
    assert found == tmp_path / "step-00000001"
    (tmp_path / "step-00000001" / INDEX).unlink()
    for find in (newest_complete, read_newest):
        with pytest.raises(CheckpointError, match=r"none of the 3 checkpoints of .* is complete"):
            find(tmp_path)


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    for steps in (1, 2, 3):
        write(tmp_path, snapshot(steps))
    (tmp_path / "step-00000002" / INDEX).write_text("{}")
    write(tmp_path, snapshot(4), keep=3)
    assert [info.steps for info in checkpoints(tmp_path)] == [2, 4, 3, 1]
    write(tmp_path, snapshot(5), keep=2)
    assert [info.steps for info in checkpoints(tmp_path)] == [5, 4]


# Errors of the system


def test_no_space_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, snapshot(1))
    before = _content(tmp_path)
    real = os.write

    def full(file: int, data: Any) -> int:
        if os.readlink(f"/proc/self/fd/{file}").endswith("optimizer.safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data)

    monkeypatch.setattr(os, "write", full)
    message = r"cannot write the checkpoint .*step-00000002: .*/optimizer\.safetensors: No space left.*free some space"
    with pytest.raises(CheckpointError, match=message):
        write(tmp_path, snapshot(2))
    assert _content(tmp_path) == before


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    write(tmp_path, snapshot(1))
    before = _content(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        with pytest.raises(CheckpointError, match=r"model\.safetensors: File too large.*ulimit -f"):
            write(tmp_path, Snapshot(steps=2, model={"large": torch.zeros(2**16)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert _content(tmp_path) == before


def _content(run: Path) -> dict[str, bytes]:
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def test_a_file_where_a_folder_is_needed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for run in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(CheckpointError, match=r"cannot write checkpoints to .*file.*A file is where a folder"):
            write(run, snapshot(1))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_no_permission(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match=rf"cannot write checkpoints to .*: {os.strerror(number)}.*choose|Choose"):
        write(tmp_path, snapshot(1))


def test_a_value_that_cannot_be_stored_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, snapshot(1))
    before = _content(tmp_path)
    with pytest.raises(CheckpointError, match=r"^user\['callback'\] is a function"):
        write(tmp_path, Snapshot(steps=2, model={}, state={"user": {"callback": lambda: None}}))
    assert _content(tmp_path) == before


def test_an_old_one_that_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, snapshot(1))
    real = os.rename

    def rename(source: Any, target: Any) -> None:
        if ".deleted-" in str(target):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(source))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with caplog.at_level(logging.WARNING, "tutti"):
        folder = write(tmp_path, snapshot(2), keep=1)
    assert "cannot delete the old checkpoint" in caplog.text
    assert newest_complete(tmp_path) == folder


# Two writers


def test_a_second_writer_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path) as writer:
        writer.write(EncodedSnapshot.of(snapshot(1)))
        message = rf"is in use: process {os.getpid()} on host .*, since 2.*, writes checkpoints to it.*another folder"
        with pytest.raises(CheckpointError, match=message):
            write(tmp_path, snapshot(2))
        writer.write(EncodedSnapshot.of(snapshot(3)))
    write(tmp_path, snapshot(4))
    assert [info.steps for info in checkpoints(tmp_path)] == [4, 3, 1]


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom tutti.checkpoint.run_lock import RunLock\n"
        "lock = RunLock(Path(sys.argv[1]))\nprint('locked', flush=True)\nsys.stdin.read()\nos._exit(9)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match=f"process {process.pid} on host"):
            RunLock(tmp_path)
        process.communicate(timeout=20)
    RunLock(tmp_path).close()


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "tutti"):
        patched.setattr("fcntl.flock", refuse)
        write(tmp_path, snapshot(1))
    assert "file system without locks" in caplog.text
    assert newest_complete(tmp_path) == tmp_path / "step-00000001"


# File systems

MOUNTS = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:5 / /mnt/usb\040stick rw - vfat /dev/sdb1 rw
31 22 0:6 / /mnt/bucket rw - fuse.gcsfuse bucket rw
32 22 0:7 / /mnt/shared rw - 9p host rw
33 22 0:8 / /mnt/nfs rw - nfs4 server:/export rw
34 22 0:9 / /mnt/over rw - vfat /dev/sdc rw
35 22 0:9 / /mnt/over rw - xfs /dev/sdd rw
not a line of mountinfo
"""


@pytest.mark.parametrize(
    ("folder", "kind", "warned"),
    [
        ("/home/me/run", "ext4", False),
        ("/mnt/usb stick/run", "vfat", True),
        ("/mnt/usb stick 2/run", "ext4", False),
        ("/mnt/bucket", "fuse.gcsfuse", True),
        ("/mnt/shared/a/b", "9p", True),
        ("/mnt/nfs/run", "nfs4", False),
        ("/mnt/over/run", "xfs", False),
    ],
)
def test_file_systems(folder: str, kind: str, warned: bool, tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert file_system(Path(folder), tmp_path / "mountinfo") == kind
    warning = warn_about(Path(folder), tmp_path / "mountinfo")
    assert (warning is not None) == warned
    assert warning is None or f"type {kind}" in warning


def test_a_writer_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("tutti.checkpoint.storage.warn_about", lambda run: "renames are not atomic")
    with caplog.at_level(logging.WARNING, "tutti"), CheckpointWriter(tmp_path) as writer:
        writer.write(EncodedSnapshot.of(snapshot(1)))
        writer.write(EncodedSnapshot.of(snapshot(2)))
    assert caplog.messages == ["renames are not atomic"]
    assert file_system(tmp_path, tmp_path / "absent") is None


# Crashes

CALLS = ("open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")


class Killed(BaseException):
    """The process ends here."""


class Faults:
    """The calls to the system that change something, of which the last one allowed fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: int, fault: Callable[[], BaseException], once: bool):
        self.left, self.reached = allowed, False
        for name in CALLS:
            real = getattr(os, name)

            def call(*args: Any, _real: Callable[..., Any] = real, **kwargs: Any) -> Any:
                self.left -= 1
                if self.left == -1 or (self.left < 0 and not once):
                    self.reached = True
                    raise fault()
                return _real(*args, **kwargs)

            monkeypatch.setattr(os, name, call)


def _write_with_fault(run: Path, new: Snapshot, allowed: int, kill: bool) -> bool:
    """Write with one fault, and return whether it was reached."""
    fault = Killed if kill else lambda: OSError(errno.EIO, "Input/output error")
    writer = CheckpointWriter(run, keep=1)
    with pytest.MonkeyPatch.context() as patched:
        faults = Faults(patched, allowed, fault, once=not kill)
        with suppress(Killed, CheckpointError):
            writer.write(EncodedSnapshot.of(new))
    writer.close()
    return faults.reached


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "error"])
@pytest.mark.parametrize("steps", [1, 2], ids=["same step", "next step"])
def test_a_fault_at_any_call_leaves_a_complete_checkpoint(steps: int, kill: bool, tmp_path: Path) -> None:
    old, new = snapshot(1, 1.0), snapshot(steps, 2.0)
    reached, allowed = True, 0
    outcomes = []
    while reached:
        run = tmp_path / str(allowed)
        write(run, old, keep=1)
        reached = _write_with_fault(run, new, allowed, kill)
        found, back = read_newest(run) or (None, None)
        assert found is not None, allowed
        assert back is not None
        back = back.decoded()
        assert newest_complete(run) == found
        outcomes.append(back.model["layer.weight"][0, 0].item())
        assert_same(back, old if outcomes[-1] == 1.0 else new)
        after = write(run, snapshot(3), keep=1)  # The next writer removes what was left.
        assert names(run) == [".lock", "latest.json", after.name]
        allowed += 1
    assert outcomes == sorted(outcomes)  # Never from the new one back to the old one.
    assert set(outcomes) == {1.0, 2.0}
    assert allowed > 20
