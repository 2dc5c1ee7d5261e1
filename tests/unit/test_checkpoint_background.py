"""Snapshots in memory: copies that reuse the memory of the one before, and never that of one which is being written."""

import threading
from pathlib import Path

import pytest
import torch

from tutti.checkpoint.background import BackgroundWriter
from tutti.checkpoint.copies import TensorCopies
from tutti.checkpoint.index import MODEL
from tutti.checkpoint.snapshots import EncodedSnapshot, Snapshot, TakenApart
from tutti.checkpoint.storage import CheckpointWriter, read_newest


def copied(steps: int, memory: TensorCopies | None = None, **model: torch.Tensor) -> EncodedSnapshot:
    return TakenApart(Snapshot(steps=steps, model=model)).copied(memory)


def test_a_copy_overwrites_the_one_before_where_it_fits() -> None:
    first = copied(1, same=torch.ones(3), grows=torch.ones(2), changes=torch.ones(2), goes=torch.ones(1))
    source = {"same": torch.arange(3.0), "grows": torch.zeros(4), "changes": torch.zeros(2, dtype=torch.int64)}
    second = copied(2, first.copies, **source)
    before, after = first.tensors[MODEL], second.tensors[MODEL]
    assert after.keys() == source.keys()
    for name, tensor in source.items():
        assert torch.equal(after[name], tensor)
        assert after[name].dtype == tensor.dtype
        assert after[name].data_ptr() != tensor.data_ptr()
    reused = {name for name in after if after[name].data_ptr() == before[name].data_ptr()}
    assert reused == {"same"}


def test_memory_is_given_back_only_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Event(), threading.Event()
    write = CheckpointWriter.write

    def held_up(writer: CheckpointWriter, snapshot: EncodedSnapshot) -> Path:
        entered.set()
        assert go_on.wait(10)
        return write(writer, snapshot)

    monkeypatch.setattr(CheckpointWriter, "write", held_up)
    writer = BackgroundWriter(tmp_path, keep=3)
    assert writer.memory() is None
    first = copied(1, weight=torch.ones(2))
    writer.submit(first)
    assert entered.wait(10)
    # Lets the writer go on only once the main thread waits for it, or has failed to.
    threading.Timer(0.1, go_on.set).start()
    memory = writer.memory()
    assert go_on.is_set()
    assert memory is first.copies
    writer.submit(copied(2, memory, weight=torch.zeros(2)))
    writer.close()
    found = read_newest(tmp_path)
    assert found is not None
    assert torch.equal(found[1].decoded().model["weight"], torch.zeros(2))


def test_memory_of_a_failed_write_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(writer: CheckpointWriter, snapshot: EncodedSnapshot) -> Path:
        raise OSError("no")

    monkeypatch.setattr(CheckpointWriter, "write", fail)
    writer = BackgroundWriter(tmp_path, keep=3)
    first = copied(1, weight=torch.ones(2))
    writer.submit(first)
    assert writer.memory() is first.copies
    writer.abandon()
