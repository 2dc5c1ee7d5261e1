"""Scripts under a framework, each in processes of its own, and what they print."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def results(*command: str, timeout: float = 280) -> dict[str, Any]:
    """Run a command of Python, and return the results that it prints, by task."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=FOLDER,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [line[line.index("{") :] for line in ended.stdout.splitlines() if '{"task"' in line]
    return {each["task"]: each["result"] for each in map(json.loads, lines)}
