"""An optimiser's state in shared memory: what ranks find after another rank was killed while it published."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tutti.strategies.parameter_server.shared_memory.optimizer_state import SharedOptimizerState

NUMEL = 6


class Killed(BaseException):
    """Stands for the end of the process."""


class TornDirectories(np.ndarray):
    """Directories whose writer is killed when half of one is written."""

    def __setitem__(self, key: Any, value: Any) -> None:
        half = len(value) // 2
        super().__setitem__((key[0], slice(0, half)), value[:half])
        raise Killed


class KilledAtStore(np.ndarray):
    """A header whose writer is killed before its store to one of `positions`."""

    positions: tuple[int, ...] = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        if key in self.positions:
            raise Killed
        super().__setitem__(key, value)


class Rank:
    """A rank's optimiser state and its view of the shared memory."""

    def __init__(self, memory: Tensor) -> None:
        self.state: dict[int, dict[str, Any]] = {0: {}, 1: {}}
        self.shared = SharedOptimizerState(memory, 2, lambda index: self.state[index])

    def add(self, index: int, key: str, value: float) -> None:
        self.state[index][key] = torch.full((3,), value)
        self.state[index].setdefault("step", 0)
        self.state[index]["step"] += 1

    def step(self, index: int, key: str, value: float) -> None:
        self.shared.refresh()
        self.add(index, key, value)
        self.shared.publish()


@pytest.fixture
def memory() -> Tensor:
    return torch.zeros(SharedOptimizerState.required_bytes(NUMEL, 2), dtype=torch.uint8)


def kill_in_directory(writer: Rank) -> None:
    writer.shared._directories = writer.shared._directories.view(TornDirectories)


def kill_at(writer: Rank, *positions: int) -> None:
    header = writer.shared._header.view(KilledAtStore)
    header.positions = positions
    writer.shared._header = header


KILLS = {
    "directory": kill_in_directory,
    "length": lambda writer: kill_at(writer, 1, 2),
    "generation": lambda writer: kill_at(writer, 0),
}


@pytest.mark.parametrize("num_steps_before", [1, 2])
@pytest.mark.parametrize("kill", KILLS.values(), ids=KILLS.keys())
def test_a_rank_killed_while_it_publishes_leaves_the_last_directory_readable(
    memory: Tensor, kill: Any, num_steps_before: int
) -> None:
    writer, late, current = Rank(memory), Rank(memory), Rank(memory)
    for number in range(num_steps_before):
        writer.step(0, f"moment{number}", 1.0 + number)
    current.shared.refresh()
    kill(writer)
    with pytest.raises(Killed):
        writer.step(1, "moment_with_a_long_name" * 20, 5.0)
    for rank in (late, current):  # One has never read a directory; one has read the last.
        rank.shared.refresh()
        assert set(rank.state[0]) == {*(f"moment{number}" for number in range(num_steps_before)), "step"}
        assert rank.state[0]["moment0"].tolist() == [1.0] * 3
        assert rank.state[0]["step"] == num_steps_before
        assert rank.state[1] == {}


def test_ranks_go_on_after_a_rank_was_killed_while_it_published(memory: Tensor) -> None:
    writer, survivor, late = Rank(memory), Rank(memory), Rank(memory)
    writer.step(0, "moment", 1.0)
    kill_in_directory(writer)
    with pytest.raises(Killed):
        writer.step(1, "moment", 5.0)
    survivor.step(1, "moment", 2.0)
    late.shared.refresh()
    assert late.state[0]["moment"].tolist() == [1.0] * 3
    assert late.state[1]["moment"].tolist() == [2.0] * 3
    late.state[1]["moment"].fill_(3.0)  # In place, so every rank has it.
    assert survivor.state[1]["moment"].tolist() == [3.0] * 3


@pytest.mark.parametrize("has_state", [True, False])
def test_after_a_reset_other_ranks_have_the_new_state_only(memory: Tensor, has_state: bool) -> None:
    first, second, third = Rank(memory), Rank(memory), Rank(memory)
    first.step(0, "moment", 1.0)
    second.step(1, "moment", 2.0)
    # `third` has read no directory: its reset must still differ from all that the others know.
    third.state = {0: {"variance": torch.full((3,), 7.0)} if has_state else {}, 1: {}}
    third.shared.reset()
    for rank in (first, second, Rank(memory)):
        rank.shared.refresh()
        assert rank.state[1] == {}
        assert {key: value.tolist() for key, value in rank.state[0].items()} == (
            {"variance": [7.0] * 3} if has_state else {}
        )
