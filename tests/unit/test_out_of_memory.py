"""A worker that the kernel killed for want of memory is told apart from one that a user killed."""

import os
import signal
from pathlib import Path

import pytest

import tutti
from tutti.errors import WorkerFailed
from tutti.launch import local_launcher
from tutti.launch.out_of_memory import oom_kills, suspected_oom


def counts(folder: Path, number: int) -> Path:
    file = folder / "vmstat"
    file.write_text(f"nr_free_pages 5\noom_kill {number}\noom_kill_other 9\n")
    return file


def test_the_count_of_the_kernel(tmp_path: Path) -> None:
    assert oom_kills(counts(tmp_path, 7)) == 7
    assert oom_kills(tmp_path / "missing") == 0
    assert oom_kills() >= 0, "this machine's"


@pytest.mark.parametrize(("after", "said"), [(3, ""), (4, "killed a process for that"), (6, "killed 3 processes")])
def test_a_count_that_has_grown_is_the_likely_reason(after: int, said: str, tmp_path: Path) -> None:
    text = suspected_oom(3, counts(tmp_path, after))
    assert said in text
    assert bool(text) == bool(said)


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_launcher_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_launcher, "oom_kills", lambda: -1)  # As if the kernel had killed one since.
    with pytest.raises(WorkerFailed, match=r"rank 0 was killed by SIGKILL, most likely for want of memory: the kernel"):
        tutti.launch(dies, workers=1)
