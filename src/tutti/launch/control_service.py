"""The coordinator of a run that the launcher serves, and how others on this machine find it."""

import os
import sys
from pathlib import Path

from tutti.coordination import Coordinator, Secret
from tutti.coordination.description import start_time
from tutti.launch.control_plane_address import listen_on
from tutti.launch.control_settings import COORDINATOR, ENCRYPT, SECRET, find_patience, find_secret
from tutti.launch.host import host_id
from tutti.launch.lab.placement import ProcessPlacement
from tutti.launch.run_registry import RunningRun, announce


def serve_coordinator(
    placement: ProcessPlacement, environment: dict[str, str], listen: str | None = None
) -> Coordinator:
    """Serve the coordinator of a run, with a secret of this run alone unless the user has given one.

    Args:
        placement: the hosts of the run, one of which it listens on.
        environment: variables of all workers, to which those are added by which they find it.
        listen: an address of this host on which it listens instead, with a port or without. Launchers on other hosts
            need to know the secret, so it is the user's own then.
    """
    given = SECRET in environment or listen is not None
    secret = find_secret(environment) if given else Secret.generate(environment.get(ENCRYPT) != "0")
    listener, address = (placement.listen(), placement.address) if listen is None else listen_on(listen)
    patience = find_patience(environment)
    made = Coordinator(listener, secret, host_id=host_id(), address=address, patience=patience)
    environment[SECRET] = secret.text
    environment[COORDINATOR] = f"{address}:{made.port}"
    return made


def announce_run(coordinator: Coordinator, placement: ProcessPlacement, environment: dict[str, str]) -> Path | None:
    """Write where the coordinator of this run is, for `tutti status`; return the file, if there is a place for it."""
    if placement.store_host.namespace is not None:
        return None  # Its address is inside a lab, where this machine does not reach it.
    pid = os.getpid()
    about = RunningRun(
        pid,
        start_time(pid),
        coordinator.address,
        coordinator.port,
        environment[SECRET],
        environment.get(ENCRYPT) != "0",
        placement.num_workers,
        " ".join(sys.argv)[:200],
    )
    return announce(about)
