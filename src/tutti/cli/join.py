"""`tutti join`: workers on this host for a run that was started on another."""

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from tutti.cli.options import Grace
from tutti.cli.run import durations, naming_late_options
from tutti.cli.run_options import Arguments, Script, Spawn
from tutti.errors import ConfigError


class AddressFirst(TyperCommand):
    """A command whose options come after its first argument, and before the second."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the first argument behind the options, where the parser takes it."""
        if args and not args[0].startswith("-"):
            first, *rest = args
            num_words = self._count_words_of_options(rest)
            args = [*rest[:num_words], first, *rest[num_words:]]
        return super().parse_args(ctx, args)

    def _count_words_of_options(self, words: list[str]) -> int:
        """Return how many words come before the first that is neither an option nor the value of one."""
        with_value = {name for each in self.params for name in each.opts if not getattr(each, "is_flag", False)}
        count = 0
        while count < len(words) and words[count].startswith("-"):
            count += 2 if words[count] in with_value else 1
        return count


def join(
    context: typer.Context,
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS:PORT", help="Where the run is reached, as its tutti run has printed.")
    ],
    script: Script,
    args: Arguments = None,
    workers: Annotated[int, typer.Option("--workers", "-n", min=1, help="Number of processes on this host.")] = 1,
    restarts: Annotated[
        int, typer.Option("--restarts", min=0, help="Number of workers that are started here in place of lost ones.")
    ] = 10,
    grace: Grace = None,
    spawn: Spawn = False,
) -> None:
    """Add workers on this host to a run that was started on another with --workers MIN:MAX and --listen.

    Example: tutti join 10.0.0.1:29400 --workers 2 train.py

    The secret of the run comes from TUTTI_SECRET, from a pipe on standard input, or from the user's secret file.
    """
    if not Path(script).is_file():
        raise ConfigError(f"there is no script '{script}' in {Path.cwd()}.")
    from tutti.coordination.link import Endpoint
    from tutti.launch.control_plane_address import parse_address
    from tutti.launch.control_settings import SECRET, find_secret
    from tutti.launch.elastic_run import ElasticRun
    from tutti.launch.joined_run import JoinedRun
    from tutti.launch.local import run_script

    host, port = parse_address(address, "the first argument")
    if not port:
        raise ConfigError(f"the first argument is ADDRESS:PORT, as tutti run has printed it; got '{address}'.")
    secret = find_secret({**os.environ, **_piped_secret(SECRET, os.environ)}, make=False)
    environment = durations(TUTTI_GRACE=grace)
    if spawn:
        environment["TUTTI_START"] = "spawn"
    run = JoinedRun(Endpoint(host, port), secret, workers)
    try:
        minimum, maximum = run.limits
        elastic = ElasticRun(minimum=minimum, maximum=maximum, restarts=restarts)
        with naming_late_options(context, script, args):
            run_script([script, *(args or [])], elastic, environment, joins=run)
    finally:
        run.close()


def _piped_secret(name: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with the secret, if it comes by a pipe on standard input and not by the environment."""
    if name in environment or sys.stdin is None:  # It was closed.
        return {}
    if not stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        return {}
    # Ended by the other end of the pipe, or by a line.
    text = sys.stdin.readline().strip()
    return {name: text} if text else {}
