"""A coordinator in a process of its own: `coordinator.py PORT`. Says its process number and port, and serves."""

import os
import signal
import sys

from tutti.coordination import Coordinator
from tutti.launch.control_plane import listener
from tutti.launch.control_settings import find_patience, find_secret
from tutti.launch.host import host_id

opened = listener("127.0.0.1", int(sys.argv[1]))
coordinator = Coordinator(opened, find_secret(), host_id=host_id(), patience=find_patience())
print("coordinator", os.getpid(), coordinator.port, flush=True)
while True:
    signal.pause()  # Ended by whoever started it.
