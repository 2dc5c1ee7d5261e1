"""The scripts in examples/frameworks run, and print what they promise."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "frameworks"

RUN = ("-m", "tutti", "run", "--workers", "2", "--spawn")
EXAMPLES = {
    "lightning_digits.py": ("lightning", (), "accuracy", (0.9, 1.0)),
    "transformers_text.py": ("transformers", RUN, "loss", (0.0, 2.5)),
    "accelerate_digits.py": ("accelerate", RUN, "accuracy", (0.9, 1.0)),
}
"""What each needs, how it is started, and what it prints with a value between two limits."""

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize("name", EXAMPLES)
def test_runs(name: str) -> None:
    needed, command, what, (least, most) = EXAMPLES[name]
    pytest.importorskip(needed)
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", *command, name],
        cwd=FOLDER,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (found,) = re.findall(rf"{what} ([\d.]+)", ended.stdout)
    assert least <= float(found) <= most


def test_every_example_is_run() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == EXAMPLES.keys()
