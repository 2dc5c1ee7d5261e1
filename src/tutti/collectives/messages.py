"""Broadcast and all-gather of small control values, as JSON.

JSON rather than pickle, because a received pickle can run code. Each value travels as two messages: its length, then
its bytes.
"""

import json
from typing import Any

import torch

from tutti.collectives.steps import run
from tutti.collectives.tree import broadcast
from tutti.transports import Transport


def all_gather_json(value: Any, transport: Transport) -> list[Any]:
    """Return every rank's `value`, by rank. Collective.

    Rank 0 collects all values in the order of ranks, and broadcasts the list.
    """
    if transport.size == 1:
        return [value]
    if transport.rank == 0:
        values = [value] + [receive_json(transport, rank) for rank in range(1, transport.size)]
        return list(_broadcast(values, transport))
    send_json(value, transport, 0)
    return list(_broadcast(None, transport))


def broadcast_json(value: Any, transport: Transport) -> Any:
    """Return rank 0's `value` on every rank. Collective; what other ranks pass is ignored."""
    return value if transport.size == 1 else _broadcast(value, transport)


def _broadcast(value: Any, transport: Transport) -> Any:
    data = _encode(value) if transport.rank == 0 else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = torch.tensor([data.numel()], device="cpu")
    run(broadcast(length, transport))
    if transport.rank != 0:
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    run(broadcast(data, transport))
    return _decode(data)


def send_json(value: Any, transport: Transport, dst: int) -> None:
    """Send the length of a value, then its bytes. Returns when both have left."""
    data = _encode(value)
    transport.isend(torch.tensor([data.numel()], device="cpu"), dst).wait()
    transport.isend(data, dst).wait()


def receive_json(transport: Transport, src: int) -> Any:
    """Wait for a value that `send_json` sends."""
    length = torch.empty(1, dtype=torch.int64, device="cpu")
    transport.irecv(length, src).wait()
    data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    transport.irecv(data, src).wait()
    return _decode(data)


def _encode(value: Any) -> torch.Tensor:
    # A bytearray, because torch warns about memory that cannot be written to.
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
