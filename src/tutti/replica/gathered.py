"""`gather_state`: the states of all ranks on every rank, to be saved."""

from typing import Any

import torch

from tutti.collectives import all_gather, all_gather_json, parts, run
from tutti.collectives.packing import from_bytes, to_bytes
from tutti.transports import Transport


def gather_state(local: Any, transport: Transport) -> list[Any]:
    """Return the nested containers, numbers and tensors of every rank, by rank. Collective; the same on every rank."""
    if transport.size == 1:
        return [local]
    data = to_bytes(local)
    sizes = all_gather_json(data.numel(), transport)
    # Every rank's bytes are padded to the longest, since the all-gather works on parts of equal size.
    rows = torch.zeros(max(sizes) * transport.size, dtype=torch.uint8, device="cpu")
    slices = parts(rows.numel(), transport.size)
    rows[slices[transport.rank]][: data.numel()] = data
    run(all_gather.steps(rows, transport))
    return [from_bytes(rows[part][:size]) for part, size in zip(slices, sizes, strict=True)]
