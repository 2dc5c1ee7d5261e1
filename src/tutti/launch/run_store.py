"""`RunStore`: the store of torch's own process groups, which a launcher serves to the workers of a run."""

import os
import socket
import sys
from typing import Any

from tutti.launch.lab import namespaces
from tutti.launch.start import StoreProcess, WorkerStarter


class RunStore:
    """Serves the store in this process if it has imported torch, else in one that the fork server makes."""

    def __init__(
        self,
        listener: socket.socket,
        starter: WorkerStarter,
        environment: dict[str, str],
        namespace: str | None = None,
    ) -> None:
        """Serve on `listener`, which is closed here, in the network namespace in which it is."""
        self.process: StoreProcess | None = None
        """The process that serves it, if this one does not."""
        self._store: Any = None
        # Workers get the port of a socket that listens already. Were only a free number chosen here, another process
        # could take it before the store does.
        address: str = listener.getsockname()[0]
        self.port: int = listener.getsockname()[1]
        with listener:
            if "torch" not in sys.modules:
                self.process = starter.start_store(listener, environment)
            if self.process is not None:
                return
            from tutti.launch.store import serve  # Imports torch.

            file = os.dup(listener.fileno())  # A copy, because the store takes its file over.
            if namespace is None:
                self._store = serve(address, self.port, file)
            else:
                # Making a store also connects to it, and only from inside is its address reached.
                self._store = namespaces.inside(namespace, lambda: serve(address, self.port, file))

    def close(self) -> None:
        """End the service, or let go of the process, which ends with the connection to the fork server."""
        self._store = None
        if self.process is not None:
            self.process.close()
