"""Collective operations: plain functions over a transport."""

from tutti.collectives.broadcast import broadcast, broadcast_all
from tutti.collectives.messages import gather_json, share_json
from tutti.collectives.native import native

__all__ = ["broadcast", "broadcast_all", "gather_json", "native", "share_json"]
