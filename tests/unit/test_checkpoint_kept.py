"""What is left of a run's checkpoints, on the disk and in memory."""

from dataclasses import replace
from pathlib import Path

import torch

from tutti.checkpoint.index import FORMAT, INDEX, checkpoints, index_bytes, read_index
from tutti.checkpoint.storage import Snapshot, read, write


def snapshot(steps: int) -> Snapshot:
    state = {"large": torch.zeros(10_000), "small": torch.ones(2)}
    return Snapshot(steps=steps, model={"weight": torch.zeros(2)}, state=state)


def test_a_checkpoint_of_a_newer_format_is_not_deleted(tmp_path: Path) -> None:
    newer = write(tmp_path, snapshot(1))
    index = newer / INDEX
    index.write_bytes(index_bytes(replace(read_index(newer), format=FORMAT + 1)))
    torn = write(tmp_path, snapshot(2))
    (torn / INDEX).write_bytes(b"{")
    for steps in (3, 4):
        write(tmp_path, snapshot(steps), keep=1)
    assert sorted(info.steps for info in checkpoints(tmp_path)) == [1, 4]


def test_a_small_value_does_not_keep_a_whole_file_in_memory(tmp_path: Path) -> None:
    small = read(write(tmp_path, snapshot(1))).decoded().state["small"]
    assert small.untyped_storage().nbytes() == small.nbytes
