"""The command that starts an agent on a host over ssh, and what it gets on its standard input."""

import os
import shlex
import sys
from collections.abc import Mapping

from tutti.errors import ConfigError
from tutti.launch.control_settings import SECRET
from tutti.launch.ssh.frames import PROBLEM
from tutti.launch.supervisor_pipe import HOST, IMPORTING, PARENT, PIPE_VARIABLE

SSH = "TUTTI_SSH"
"""Variable with another ssh command, such as "ssh -F FILE"."""

_PASSED = ("TUTTI_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "TORCH", "NCCL_", "GLOO_")
"""Variables with such a prefix go from the launcher to workers on other hosts; all others are those of the hosts."""

_KEPT = {HOST, IMPORTING, PARENT, PIPE_VARIABLE, SSH, "PYTHONHOME"}

# The first line of the input is read byte by byte, because what follows it is for the agent.
_BOOT = f"""
import json, os, sys
hello = json.loads(open(0, "rb", buffering=0, closefd=False).readline())
os.environ.update(hello["environment"])
sys.path[1:1] = [each for each in hello["environment"].get("PYTHONPATH", "").split(":") if each]
try:
    from tutti.launch.ssh.agent import main
except Exception as error:
    print("{PROBLEM.decode()}Tutti cannot be imported there (%s: %s)" % (type(error).__name__, error), flush=True)
    sys.exit(1)
main(hello)
"""


def remote_shell(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The ssh command, which never asks for anything: nobody would see the question."""
    try:
        words = shlex.split(environment.get(SSH, "ssh"))
    except ValueError as error:
        raise ConfigError(f"{SSH} is no command ({error}): '{environment[SSH]}'.") from error
    return [*words, "-o", "BatchMode=yes", "-T"]


def agent_command(folder: str, python: str) -> str:
    """What ssh has the host run: the agent, in `folder`. Whatever the user's shell is, sh reads it."""
    problem = PROBLEM.decode()
    script = (
        f"cd {shlex.quote(folder)} 2>/dev/null || echo {shlex.quote(problem + 'there is no folder ' + folder)}; "
        f"if [ ! -x {shlex.quote(python)} ]; then "
        f"echo {shlex.quote(problem + 'there is no Python at ' + python)}; exit 1; fi; "
        f"exec {shlex.quote(python)} -c {shlex.quote(_BOOT)}"
    )
    return f"exec sh -c {shlex.quote(script)}"


def passed_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of this process that workers on other hosts get."""
    passed = {name: text for name, text in environment.items() if name.startswith(_PASSED) and name not in _KEPT}
    if "PYTHONPATH" in passed:  # Folders are taken from this one, also where it is missing and the agent is elsewhere.
        folders = filter(None, passed["PYTHONPATH"].split(os.pathsep))
        passed["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, folders))
    return passed


def ssh_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of the ssh command itself, which must not show the secret of the run."""
    return {name: text for name, text in environment.items() if name != SECRET}


def own_python() -> str:
    """The Python of this process, which is looked for at the same place on every host."""
    return sys.executable
