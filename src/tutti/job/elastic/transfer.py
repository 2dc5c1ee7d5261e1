"""The state of a job that ranks take over from another one, sent by that rank to all.

A rank needs it if it is new, or if it missed the end of a step that others have completed. It takes over all or
nothing: everything is received before anything is changed, because the rank that sends may be lost in the middle.
"""

from typing import Any

from tutti.collectives.nested import broadcast_nested
from tutti.transports import Transport


def share_state(state: dict[str, Any] | None, transport: Transport, source: int) -> dict[str, Any]:
    """Return on every rank the state that rank `source` gives. Collective.

    Args:
        state: a nest of tensors and plain values; None on all other ranks.
    """
    received: dict[str, Any] = broadcast_nested(state, transport, source)
    return received
