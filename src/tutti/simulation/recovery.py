"""Times of a recovery from a loss that no message carries: how long starting and connecting take in virtual time."""

PATIENCE_S = 10.0
"""How long a rank may be silent before the others go on without it."""
STARTUP_S = 0.7
"""From the start of a worker's process to its `tutti.init`: it is forked from one that has imported torch."""
CONNECT_S = 0.02
"""Seconds to open connections between the members of a generation, in addition to its messages."""
NOTICE_S = 0.04
"""From the end of a process until the coordinator has had it looked at, beside the messages of that."""
