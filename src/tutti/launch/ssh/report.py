"""Reports of agents on their hosts, and which findings would keep a run from working there."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import tutti
from tutti.launch.host import host_id


def make_report(folder: str, script: str | None) -> dict[str, Any]:
    """Describe this host; `script` is looked for in `folder`, if that is there."""
    path = None if script is None else os.path.join(folder, script)
    return {
        "versions": versions(),
        "host_id": host_id(),
        "lacks_script": path is not None and os.path.isdir(folder) and not os.path.isfile(path),
        # As sshd sees it: the address of the launcher on the way to this host.
        "client": os.environ.get("SSH_CONNECTION", "").partition(" ")[0],
    }


def versions() -> dict[str, str]:
    """Versions that must be equal on all hosts. torch is not imported for it."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    return {"Python": platform.python_version(), "torch": torch, "Tutti": tutti.__version__}


def problems_in(report: dict[str, Any], script: str | None, folder: str) -> list[str]:
    """Say what of a host's report would keep `script` from running there as it does here."""
    here, there = versions(), report["versions"]
    found = [f"{name} is {there.get(name)} there and {here[name]} here" for name in here if there[name] != here[name]]
    if report["lacks_script"]:
        found.append(f"there is no {script} in {folder}")
    return found
