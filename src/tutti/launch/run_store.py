"""`RunStore`: the store of torch's own process groups, which a launcher serves to the workers of a run."""

import os
import sys
from typing import Any

from tutti.launch.lab import namespaces
from tutti.launch.lab.placement import ProcessPlacement
from tutti.launch.start import StoreProcess, WorkerStarter


class RunStore:
    """Serves the store in this process if it has imported torch, else in one that the fork server makes."""

    def __init__(self, placement: ProcessPlacement, starter: WorkerStarter, environment: dict[str, str]) -> None:
        self.process: StoreProcess | None = None
        """The process that serves it, if this one does not."""
        self._store: Any = None
        # Workers get the port of a socket that listens already. Were only a free number chosen here, another process
        # could take it before the store does.
        listener = placement.listen()
        self.port: int = listener.getsockname()[1]
        with listener:
            if "torch" not in sys.modules:
                self.process = starter.start_store(listener, environment)
            if self.process is not None:
                return
            from tutti.launch.store import serve  # Imports torch.

            # A copy, because the store takes its file over, and the block closes `listener`.
            address, file = placement.address, os.dup(listener.fileno())
            if (namespace := placement.store_host.namespace) is None:
                self._store = serve(address, self.port, file)
            else:
                # Making a store also connects to it, and only from inside is its address reached.
                self._store = namespaces.inside(namespace, lambda: serve(address, self.port, file))

    def close(self) -> None:
        """End the service, or let go of the process, which ends with the connection to the fork server."""
        self._store = None
        if self.process is not None:
            self.process.close()
