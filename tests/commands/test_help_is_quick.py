"""`--help` imports no torch, so that it appears at once."""

import subprocess
import sys

SCRIPT = """
import sys
from tutti.cli import main
for command in {commands}:
    sys.argv = ["tutti", *command.split(), "--help"]
    try:
        main()
    except SystemExit:
        pass
    found = [name for name in {heavy} if name in sys.modules]
    if found:
        sys.exit(f"tutti {{command}} imported {{found}}")
"""

HEAVY = ("torch", "numpy", "numba", "matplotlib")

COMMANDS = [
    "", "run", "train", "plan", "profile", "doctor", "checkpoints", "reproduce", "lab", "lab run", "simulate",
    "simulate scaling", "simulate clusters", "bench", "bench step", "bench compression", "bench strategies",
    "bench meshes",
]  # fmt: skip


def test_help_imports_no_torch() -> None:
    """One process asks for all of them, and looks after each."""
    script = SCRIPT.format(commands=COMMANDS, heavy=HEAVY)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=50)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("Usage: tutti") == len(COMMANDS)
