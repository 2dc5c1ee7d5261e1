"""`CommunicationCost`: what a strategy adds to one worker's step."""

from typing import NamedTuple


class CommunicationCost(NamedTuple):
    """What one worker's step costs beyond the same step of a worker that trains alone."""

    exposed_s: float
    """Seconds of communication, encoding and decoding per step that computation does not hide."""
    num_bytes: float
    """Bytes sent by one worker per step."""
    memory_bytes: float = 0.0
    """Approximate extra memory of one worker, in bytes."""
    coding_s: float = 0.0
    """Seconds of encoding and decoding per step, hidden or not."""
    num_exchanges: float = 1.0
    """Exchanges per step: below 1 where ranks exchange once in several steps."""
    num_buckets: float = 0.0
    """Buckets exchanged per step."""
    wire_s: float = 0.0
    """Seconds per step during which the link is in use, exposed or hidden behind computation."""
