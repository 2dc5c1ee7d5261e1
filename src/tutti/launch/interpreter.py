"""Commands that run a module of Tutti in a Python process of its own."""

import sys


def main_of(module: str) -> list[str]:
    """The command that calls a module's `main` in a process of its own.

    The garbage collector is off during the imports, and never looks at what was imported: torch stays to the end, and
    collecting it during the imports and at exit would take almost as long as the imports themselves.
    """
    start = f"import gc; gc.disable(); from {module} import main; gc.freeze(); gc.enable(); main()"
    return [sys.executable, "-c", start]
