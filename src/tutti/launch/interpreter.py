"""Python processes that run a part of Tutti."""

import sys


def main_of(module: str) -> list[str]:
    """The command that calls a module's `main` in a process of its own.

    What that imports, torch above all, stays to the end. Python's collector need not look at it, neither while it comes
    nor later nor when the process ends: that would take almost as long as the rest of the imports.
    """
    start = f"import gc; gc.disable(); from {module} import main; gc.freeze(); gc.enable(); main()"
    return [sys.executable, "-c", start]
