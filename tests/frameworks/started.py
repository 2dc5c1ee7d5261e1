"""Scripts under a framework, each in processes of its own, and what they record."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

_VARIABLE = "TUTTI_TEST_RECORD"

_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def record(task: str, result: Any) -> None:
    """Record a result, in the process of one rank."""
    with open(os.environ[_VARIABLE], "a") as file:
        print(json.dumps({"task": task, "result": result}), file=file)


def results(*command: str, timeout: float = 280) -> dict[str, Any]:
    """Run a command of Python, and return the results that it records, by task."""
    with tempfile.NamedTemporaryFile("r") as recorded:
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            cwd=FOLDER,
            env={**os.environ, **_QUIET, _VARIABLE: recorded.name},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return {each["task"]: each["result"] for each in map(json.loads, recorded)}
