"""The coordinator of a run that the launcher serves, and how others on this machine find it."""

import os
import socket
import sys
from pathlib import Path

from tutti.coordination import Coordinator, Secret
from tutti.coordination.description import start_time
from tutti.launch.control_plane_address import listen_on
from tutti.launch.control_settings import COORDINATOR, ENCRYPT, SECRET, find_patience, find_secret
from tutti.launch.elastic_run import ElasticRun
from tutti.launch.host import host_id
from tutti.launch.run_registry import RunningRun, announce


def serve_coordinator(
    listening: tuple[socket.socket, str] | None,
    variables: dict[str, str],
    elastic: ElasticRun | None,
    num_workers: int,
) -> Coordinator:
    """Serve the coordinator of a run, with a secret of this run alone unless the user has given one.

    Args:
        listening: a socket that listens, and its address as all hosts of the run reach it; None for the address that
            `elastic` names. Launchers on other hosts need to know the secret, so it is the user's own then.
        variables: of all workers, to which those are added by which they find it.
        num_workers: how many this launcher starts.
    """
    environment = {**os.environ, **variables}
    listen = None if elastic is None else elastic.listen
    given = SECRET in environment or listen is not None
    secret = find_secret(environment) if given else Secret.generate(_encrypts(variables))
    if listening is None:
        assert listen is not None
        listening = listen_on(listen)
    listener, address = listening
    patience = find_patience(environment)
    made = Coordinator(listener, secret, host_id=host_id(), address=address, patience=patience)
    variables[SECRET] = secret.text
    variables[COORDINATOR] = f"{address}:{made.port}"
    if elastic is not None:
        made.set_limits(elastic.minimum, elastic.maximum, num_workers)
    return made


def announce_run(coordinator: Coordinator, variables: dict[str, str], num_workers: int) -> Path | None:
    """Write where the coordinator of this run is, for `tutti status`; return the file, if there is a place for it."""
    pid = os.getpid()
    about = RunningRun(
        pid,
        start_time(pid),
        coordinator.address,
        coordinator.port,
        variables[SECRET],
        _encrypts(variables),
        num_workers,
        " ".join(sys.argv)[:200],
    )
    return announce(about)


def _encrypts(variables: dict[str, str]) -> bool:
    return {**os.environ, **variables}.get(ENCRYPT) != "0"
