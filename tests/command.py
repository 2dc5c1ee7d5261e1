"""Commands in tests: what the `call` fixture gives, and one that is stopped in the middle."""

import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import warm


class Ended(NamedTuple):
    """How a command in this very process ended."""

    status: int
    out: str
    err: str


Call = Callable[..., Ended]


def assert_refused(ended: Ended, message: str, folder: Path) -> None:
    """It was a mistake, explained in a line, and nothing was written."""
    assert ended.status == 2, ended
    assert re.search(message, ended.err), ended.err
    assert "Traceback" not in ended.err
    assert list(folder.iterdir()) == []


def stop_in_the_middle(words: list[str], sign: signal.Signals, folder: Path) -> float:
    """Start a run called "long" that would never end, and send it a signal once it has reported.

    It must end as asked, without a traceback, and say where its record is. Returns how long that took.
    """
    process = subprocess.Popen(
        [*warm.main_of("tutti.cli"), *words, "--epochs", "1000000", "--name", "long"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    record = folder / "runs" / "long" / "metrics.jsonl"
    try:
        while not (record.exists() and record.stat().st_size):
            assert process.poll() is None, "it ended early"
            time.sleep(0.02)
        process.send_signal(sign)
        sent_s = time.monotonic()
        output, _ = process.communicate(timeout=15)
        took_s = time.monotonic() - sent_s
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + sign, output
    assert "Traceback" not in output
    assert re.search(r"stopped; the (partial record of the )?run is in runs/long[^\n]*\n$", output), output
    return took_s
