"""`--help` imports no torch, so that it appears at once."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from tutti.cli import main
sys.argv = ["tutti", *{words}]
try:
    main()
except SystemExit:
    pass
print([name for name in {heavy} if name in sys.modules], file=sys.stderr)
"""

HEAVY = ("torch", "numpy", "numba", "matplotlib")

COMMANDS = [
    "", "run", "train", "plan", "profile", "doctor", "reproduce", "lab", "lab run", "simulate", "simulate scaling",
    "simulate clusters", "bench", "bench step", "bench compression", "bench strategies", "bench meshes",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_no_torch(command: str) -> None:
    script = SCRIPT.format(words=[*command.split(), "--help"], heavy=HEAVY)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50)
    assert "Usage: tutti" in ended.stdout
    assert ended.stderr == "[]\n"
