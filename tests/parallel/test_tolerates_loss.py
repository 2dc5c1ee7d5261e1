"""Workers that said they may be lost: the others go on without them, in real processes."""

import atexit
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_launch import runs

import tutti
from tutti.errors import WorkerFailed
from tutti.launch.supervisor_pipe import PIPE_VARIABLE, Inbox, SupervisorPipe

GO_ON = "the others go on without it"


class Unusual(Exception):
    """An exception the supervisor knows nothing of."""


class Witness:
    """Tells workers, by a file, that their supervisor has said a number of workers are lost."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str], wanted: int = 1) -> None:
        self.folder, self.capfd, self.wanted = folder, capfd, wanted
        self._said = ""

    @property
    def said(self) -> str:
        self._said += self.capfd.readouterr().err
        return self._said

    @property
    def lines(self) -> list[str]:
        return [line for line in self.said.splitlines() if GO_ON in line]

    def __call__(self, rank: int, values: dict[str, Any]) -> None:
        if len(self.lines) >= self.wanted:
            (self.folder / "noted").touch()


def wait_until_noted(folder: str) -> None:
    while not Path(folder, "noted").exists():
        SupervisorPipe().progress(waits=True)  # So that the witness looks.
        time.sleep(0.01)


def fail(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        sys.exit(7)
    elif how == "raise":
        raise Unusual("no luck\nat all.")
    else:
        atexit.register(os._exit, 3)  # After its result was sent.


REASONS = {
    "kill": "was killed by SIGKILL",
    "exit": "exited with status 7",
    "raise": "failed: Unusual: no luck at all",
    "late": "exited with status 3",
}


def loses_all_but_the_first(folder: str) -> str:
    """Every other rank in its own way."""
    rank = int(os.environ["RANK"])
    SupervisorPipe().tolerate_loss()
    if rank:
        fail(list(REASONS)[rank - 1])
    else:
        wait_until_noted(folder)
    return f"result {rank}"


def test_the_others_go_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    witness = Witness(tmp_path, capfd, wanted=4)
    results = tutti.launch(loses_all_but_the_first, str(tmp_path), workers=5, watch=witness)
    assert results == ["result 0", None, None, None, None]
    expected = [f"[rank {rank}] {reason}: {GO_ON}" for rank, reason in enumerate(REASONS.values(), 1)]
    assert sorted(line for line in witness.said.splitlines() if line.startswith("[rank ")) == expected
    assert "in loses_all_but_the_first" in witness.said, "the traceback of the one whose code failed"


def loses_one_of_a_world(folder: str) -> float:
    """Rank 1 is killed and leaves a child; the others see that end, and reduce on."""
    world = tutti.init()
    SupervisorPipe().tolerate_loss()
    left = None if world.rank == 1 else world.transport.channel("left", [0, 2])
    child = Path(folder, "child")
    if left is None:
        process = subprocess.Popen([sys.executable, "-c", "import select; select.select([], [], [], 60)"])
        child.write_text(str(process.pid))
    world.transport.all_reduce(torch.ones(1)).wait()
    if left is None:
        fail("kill")
    wait_until_noted(folder)
    while runs(int(child.read_text())):  # Ended now, not with the run.
        time.sleep(0.01)
    total = torch.tensor([float(world.rank)])
    assert left is not None
    left.all_reduce(total).wait()
    left.close()
    world.close()
    return total.item()


def test_the_others_talk_on_and_children_of_the_lost_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    witness = Witness(tmp_path, capfd)
    assert tutti.launch(loses_one_of_a_world, str(tmp_path), workers=3, watch=witness) == [2.0, None, 2.0]
    assert witness.said == f"[rank 1] was killed by SIGKILL: {GO_ON}\n"


def loses_by_knock_on(folder: str) -> str:
    world = tutti.init()
    SupervisorPipe().tolerate_loss()
    world.transport.all_reduce(torch.ones(1)).wait()
    if world.rank == 1:
        fail("kill")
    if world.rank == 0:
        world.transport.irecv(torch.zeros(1), 1).wait()
    wait_until_noted(folder)
    return "well"


def test_who_fails_because_of_the_lost_is_lost_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    witness = Witness(tmp_path, capfd, wanted=2)
    assert tutti.launch(loses_by_knock_on, str(tmp_path), workers=3, watch=witness) == [None, None, "well"]
    first, second = witness.lines
    assert first == f"[rank 1] was killed by SIGKILL: {GO_ON}"
    assert second.startswith("[rank 0] failed: RankLost: rank 0: rank 1 is gone")


# --- when all that may be lost are lost ---


def loses_all(folder: str) -> None:
    SupervisorPipe().tolerate_loss()
    if os.environ["RANK"] != "2":
        wait_until_noted(folder)
    fail("raise" if os.environ["RANK"] == "2" else "kill")


def test_all_are_lost(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    witness = Witness(tmp_path, capfd)
    with pytest.raises(WorkerFailed, match="rank 2 failed: Unusual: no luck") as caught:
        tutti.launch(loses_all, str(tmp_path), workers=3, watch=witness)
    assert (caught.value.rank, caught.value.status) == (2, 1)
    assert "in loses_all" in caught.value.traceback
    # One line where the launcher finds that both killed ones have ended at the same time.
    assert len(witness.lines) in (1, 2), "after the last there are no others"
    assert len([line for line in witness.said.splitlines() if line.startswith("[rank ")]) == 3


def loses_the_only_one(folder: str) -> None:
    if os.environ["RANK"] == "1":
        SupervisorPipe().tolerate_loss()
        fail("exit")
    wait_until_noted(folder)


def test_the_only_one_that_may_be_lost_is_lost(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The others end well, but whoever did the work is gone."""
    witness = Witness(tmp_path, capfd)
    with pytest.raises(WorkerFailed, match="rank 1 exited with status 7"):
        tutti.launch(loses_the_only_one, str(tmp_path), workers=2, watch=witness)
    assert witness.said == f"[rank 1] exited with status 7: {GO_ON}\n"


def needs_the_other(folder: str) -> None:
    world = tutti.init()
    if world.rank == 1:
        SupervisorPipe().tolerate_loss()
    world.transport.all_reduce(torch.ones(1)).wait()
    if world.rank == 1:
        fail("kill")
    wait_until_noted(folder)
    world.transport.irecv(torch.zeros(1), 1).wait()


def test_who_fails_because_all_are_lost_is_not_to_blame(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    witness = Witness(tmp_path, capfd)
    with pytest.raises(WorkerFailed, match="rank 1 was killed by SIGKILL") as caught:
        tutti.launch(needs_the_other, str(tmp_path), workers=2, watch=witness)
    assert (caught.value.rank, caught.value.status) == (1, 137)
    first, second = witness.said.splitlines()
    assert first == f"[rank 1] was killed by SIGKILL: {GO_ON}"
    assert second.startswith("[rank 0] RankLost: rank 0: rank 1 is gone")


# --- who may not be lost ---


def loses_a_needed_one(takes_back: bool) -> None:
    world = tutti.init()
    if world.rank != 1 or takes_back:
        SupervisorPipe().tolerate_loss()
    if world.rank == 1 and takes_back:
        SupervisorPipe().tolerate_loss(False)
    world.transport.all_reduce(torch.ones(1)).wait()
    if world.rank == 1:
        fail("kill")
    # Rank 2 fails after rank 0, which it waits for: the run need not wait until somebody stops it.
    world.transport.irecv(torch.zeros(1), 1 - world.rank // 2).wait()


@pytest.mark.parametrize("takes_back", [False, True])
def test_a_needed_worker_is_lost(takes_back: bool, capfd: pytest.CaptureFixture[str]) -> None:
    start_s = time.monotonic()
    with pytest.raises(WorkerFailed, match="rank 1 was killed by SIGKILL"):
        tutti.launch(loses_a_needed_one, takes_back, workers=3)
    assert time.monotonic() - start_s < 30
    said = capfd.readouterr().err
    assert GO_ON not in said, "nobody does"
    assert "[rank 0] RankLost: rank 0: rank 1 is gone" in said


def test_a_simulated_rank_does_not_speak_for_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as source:
        with os.fdopen(writer, "wb"):
            monkeypatch.setenv(PIPE_VARIABLE, str(writer))
            tutti.simulate(lambda: SupervisorPipe().tolerate_loss(), workers=2)
            SupervisorPipe().tolerate_loss()
            SupervisorPipe().tolerate_loss(False)
        data = source.read()
    inbox = Inbox()
    inbox.feed(data[: len(data) // 2])
    inbox.feed(data[len(data) // 2 :])
    assert data.count(b"E") == 2, "only what this process said"
    assert (inbox.tolerates_loss, inbox.ever_tolerated_loss) == (False, True)
