"""Measurement of the speed of matrix products, which rebuilding gradients from factors costs."""

import statistics

import torch

from tutti.strategies.poseidon.rule import LayerShape
from tutti.transports import Transport

_TRIES = 5
"""Products that are timed, of which the median counts."""

_MOST_OPERATIONS = 2e9
"""Largest number of operations of a timed product: enough to measure, and quickly done."""


def product_speed(shapes: list[LayerShape], device: torch.device, transport: Transport) -> float:
    """Return the operations per second of the largest product to make, or of a part of it if it is very large."""
    largest = max(shapes, key=lambda shape: shape.rows * shape.num_out * shape.num_in, default=None)
    if largest is None or not largest.rows:
        return 1e11  # There is nothing to multiply, so any speed will do.
    operations_per_row = 2.0 * largest.num_out * largest.num_in
    # All ranks' rows, as "broadcast" multiplies them.
    rows = max(1, min(largest.rows * transport.size, int(_MOST_OPERATIONS / operations_per_row)))
    outputs = torch.ones(rows, largest.num_out, device=device)  # Not random: drawing would change the user's sequence.
    inputs = torch.ones(rows, largest.num_in, device=device)
    times = []
    for _ in range(_TRIES):
        start_s = transport.now()
        torch.mm(outputs.t(), inputs)
        if device.type == "cuda":
            # Kernels are asynchronous: without this only the launch would be timed.
            torch.cuda.synchronize(device)
        times.append(transport.now() - start_s)
    return rows * operations_per_row / max(1e-9, statistics.median(times))
