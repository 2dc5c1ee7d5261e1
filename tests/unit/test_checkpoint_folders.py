"""Folders of checkpoints beside those of others: what is not Tutti's stays, and what cannot be deleted stops nobody."""

import errno
import logging
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tutti.checkpoint import durable
from tutti.checkpoint.index import FORMAT, INDEX, checkpoints, first_complete, index_bytes, newest_complete, read_index
from tutti.checkpoint.storage import CheckpointWriter, Snapshot, read_newest, write
from tutti.errors import CheckpointError


def snapshot(steps: int) -> Snapshot:
    return Snapshot(steps=steps, model={"weight": torch.full((3,), float(steps))})


def test_a_folder_of_another_program_is_never_deleted(tmp_path: Path) -> None:
    foreign = tmp_path / "step-00000001" / "model.pt"
    foreign.parent.mkdir()
    foreign.write_text("weights")
    for steps in (5, 6, 7):
        write(tmp_path, snapshot(steps), keep=1)
    assert foreign.read_text() == "weights"
    with pytest.raises(CheckpointError, match=r"step-00000001 is in the way, .* files of another program\. Move it"):
        write(tmp_path, snapshot(1))
    assert foreign.read_text() == "weights"
    assert newest_complete(tmp_path) == tmp_path / "step-00000007"
    assert [entry.name for entry in tmp_path.glob(".writing-*")] == []


def test_one_of_tuttis_that_has_lost_its_index_is_deleted(tmp_path: Path) -> None:
    (write(tmp_path, snapshot(1)) / INDEX).unlink()
    write(tmp_path, snapshot(2), keep=1)
    assert [info.steps for info in checkpoints(tmp_path)] == [2]


@pytest.mark.parametrize("leftover", [".deleted-step-00000001", ".writing-step-00000002"])
def test_what_cannot_be_deleted_does_not_stop_others_from_being_written(
    leftover: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on NFS, where a folder stays as long as somebody reads a file in it."""
    (tmp_path / leftover).mkdir()
    (tmp_path / leftover / ".nfs0001").touch()
    real = shutil.rmtree

    def remove(folder: Path, **options: Any) -> None:
        if (folder / ".nfs0001").exists():
            raise OSError(errno.EBUSY, "Device or resource busy", str(folder / ".nfs0001"))
        real(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", remove)
    with caplog.at_level(logging.WARNING, "tutti"):
        for steps in (1, 2, 2):
            write(tmp_path, snapshot(steps), keep=1)
    assert "Device or resource busy" in caplog.text
    assert [info.steps for info in checkpoints(tmp_path)] == [2]


def test_a_reader_takes_the_newer_ones_of_a_writer_that_has_deleted_what_it_was_to_read(tmp_path: Path) -> None:
    write(tmp_path, snapshot(1))
    tried = []

    def read(folder: Path) -> str:
        tried.append(folder.name)
        if len(tried) == 1:
            write(tmp_path, snapshot(2), keep=1)
            raise CheckpointError(f"{folder} is not a checkpoint")
        return "content"

    assert first_complete(tmp_path, read) == (tmp_path / "step-00000002", "content")
    assert tried == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("find", [newest_complete, read_newest])
def test_a_run_that_a_newer_version_has_continued_is_not_taken_back(
    find: Callable[[Path], Any], tmp_path: Path
) -> None:
    write(tmp_path, snapshot(1))
    newer = write(tmp_path, snapshot(2))
    index = replace(read_index(newer), format=FORMAT + 1)
    (newer / INDEX).write_bytes(index_bytes(index))
    with pytest.raises(CheckpointError, match=r"continued by a newer Tutti: .*--upgrade tutti-train\. To go back"):
        find(tmp_path)
    write(tmp_path, snapshot(3))  # Someone went back, and has come further since.
    assert find(tmp_path) is not None


def test_the_names_of_new_folders_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(durable, "sync_folder", synced.append)
    run = tmp_path / "runs" / "a"
    CheckpointWriter(run).close()
    assert set(synced) == {tmp_path, tmp_path / "runs"}
    synced.clear()
    CheckpointWriter(run).close()
    assert synced == []


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_synchronise_folders(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def synchronise(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(number, os.strerror(number))
        real(file)

    monkeypatch.setattr(os, "fsync", synchronise)
    assert newest_complete(write(tmp_path / "run", snapshot(1)).parent) is not None


@pytest.mark.parametrize("problem", [PermissionError(errno.EACCES, "Permission denied"), FileNotFoundError()])
def test_one_that_cannot_be_looked_at_does_not_stop_others_from_being_deleted(
    problem: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that another user has damaged, or that somebody deletes at the same time."""
    strange = tmp_path / "step-00000001"
    strange.mkdir()
    real = Path.iterdir

    def listed(folder: Path) -> Any:
        if folder == strange:
            raise problem
        return real(folder)

    monkeypatch.setattr(Path, "iterdir", listed)
    for steps in (2, 3):
        write(tmp_path, snapshot(steps), keep=1)
    assert {info.steps for info in checkpoints(tmp_path)} == {1, 3}


def test_a_folder_whose_checkpoints_cannot_be_listed_is_not_left_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(folder: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", listed)
        with pytest.raises(CheckpointError, match="Permission denied"):
            CheckpointWriter(tmp_path, continues=False)
    CheckpointWriter(tmp_path, continues=False).close()
