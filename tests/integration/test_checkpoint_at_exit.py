"""A script that comes to its end while a checkpoint is written, or after a signal."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import warm
from tutti.checkpoint.index import newest_complete

SCRIPT = """
import os, signal, threading, time, torch, tutti
from concurrent.futures import thread as futures
from tutti.checkpoint import tensor_files

write_all = tensor_files.write_all

def write_late(file, data):
    while not futures._shutdown:  # Set when the main thread has come to the end of the script.
        time.sleep(0.01)
    write_all(file, data)

tutti.init()
model = torch.nn.Linear(8, 8)
job = tutti.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""

UNFINISHED = """
tensor_files.write_all = write_late
job.checkpoint("run")
"""

SIGNALLED = """
with job:
    job.checkpoint("run")
    os.kill(os.getpid(), signal.SIGTERM)
print("finished", flush=True)
threading.Event().wait()
"""


def run(script: str, folder: Path, python: Sequence[str] = (sys.executable,)) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python, "-c", SCRIPT + script],
        cwd=folder,
        env={**os.environ, "TUTTI_GRACE": "1s"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_a_checkpoint_that_is_being_written_at_the_end_is_not_lost(tmp_path: Path) -> None:
    """In a real interpreter, as it is Python's own end that waits for the writer."""
    ended = run(UNFINISHED, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert newest_complete(tmp_path / "run") is not None, ended.stderr


def test_a_signal_after_the_last_checkpoint_still_ends_the_process(tmp_path: Path) -> None:
    ended = run(SIGNALLED, tmp_path, warm.python())
    assert "finished" in ended.stdout, ended.stderr
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert "still not at an end 1 s after SIGTERM" in ended.stderr


def test_a_signal_ends_the_process_also_where_nobody_reads_its_output(tmp_path: Path) -> None:
    unread = """
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 2)
"""
    ended = run(unread + SIGNALLED, tmp_path, warm.python())
    assert ended.returncode == 128 + signal.SIGTERM


FAILED = """
import tutti, torch, time
from tutti.checkpoint import tensor_files
from tutti.launch import worker

write_all, describe, failing = tensor_files.write_all, worker.describe_failure, []

def write_late(file, data):
    while not failing:  # Until the script has failed.
        time.sleep(0.01)
    write_all(file, data)

tensor_files.write_all = write_late
worker.describe_failure = lambda error: failing.append(error) or describe(error)
tutti.init()
model = torch.nn.Linear(8, 8)
job = tutti.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
job.checkpoint("run")
raise ValueError("a mistake of the script")
"""


def test_a_checkpoint_that_is_being_written_when_a_script_fails_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILED)
    command = [*warm.main_of("tutti.cli"), "run", "--workers", "1", "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 1
    assert "a mistake of the script" in ended.stderr
    assert newest_complete(tmp_path / "run") is not None, ended.stderr
