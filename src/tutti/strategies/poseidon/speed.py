"""How fast this machine multiplies, which is what rebuilding gradients from factors costs."""

import statistics

import torch

from tutti.strategies.poseidon.rule import LayerShape
from tutti.transports import Transport

_TRIES = 5
_MOST_OPERATIONS = 2e9
"""In one product: enough to tell, and quickly done."""


def product_speed(shapes: list[LayerShape], device: torch.device, transport: Transport) -> float:
    """Operations a second of the largest product there is to make, in part if it is very large."""
    largest = max(shapes, key=lambda shape: shape.rows * shape.num_out * shape.num_in, default=None)
    if largest is None or not largest.rows:
        return 1e11  # Of no consequence.
    each = 2.0 * largest.num_out * largest.num_in
    rows = max(1, min(largest.rows * transport.size, int(_MOST_OPERATIONS / each)))
    outputs = torch.ones(rows, largest.num_out, device=device)  # Nothing is drawn: that would be the user's numbers.
    inputs = torch.ones(rows, largest.num_in, device=device)
    times = []
    for _ in range(_TRIES):
        start_s = transport.now()
        torch.mm(outputs.t(), inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(transport.now() - start_s)
    return rows * each / max(1e-9, statistics.median(times))
