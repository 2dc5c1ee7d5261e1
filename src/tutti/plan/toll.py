"""What a strategy adds to a step."""

from typing import NamedTuple


class Toll(NamedTuple):
    """Of one worker, beyond what it would take alone."""

    exposed_s: float
    """Communication, encoding and decoding that computing does not hide."""
    num_bytes: float
    """Sent, a step."""
    memory_bytes: float = 0.0
    """About."""
    coding_s: float = 0.0
    """The part of it that is encoding and decoding, hidden or not."""
    num_exchanges: float = 1.0
    """Times that ranks exchange something, a step."""
    num_buckets: float = 0.0
    """Of these exchanges, a step."""
    wire_s: float = 0.0
    """While which the link is in use, a step: what of it is not exposed is hidden under computing."""
