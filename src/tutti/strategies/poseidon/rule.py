"""The choice of a method for each layer: by the published rule (SACP), or by predicted time on the measured link.

With P workers, a weight of M outputs and N inputs, and K rows in a worker's batch, a gradient can travel as a matrix of
M N numbers, or as sufficient factors of K (M + N) numbers:

| method | how | numbers sent by one worker |
| --- | --- | --- |
| "full" | all-reduce of the matrix | 2 (P-1)/P M N |
| "broadcast" | factors to all workers; each multiplies all of them | (P-1) K (M + N) |
| "owners" | factors to owners of rows, which multiply and send the rows to all | (P-1) (K (M/P + N) + M N/P) |
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from tutti.cluster import Link

Method = Literal["full", "broadcast", "owners"]
"""The matrix by all-reduce, factors to all workers, or factors to the owners of rows of the matrix."""

METHODS: tuple[Method, ...] = get_args(Method)

Cost = Callable[[int], float]
"""Returns by how many seconds so many more bytes prolong the all-reduce, which biases and other layers need anyway."""

_LEAST_BUCKET_BYTES, _MOST_BUCKET_BYTES = 2**16, 4 * 2**20
"""Smallest and largest bucket that is chosen from the link."""
_LATENCIES = 10
"""A bucket should take this many latencies of the link to send, so that latency is a small part of its time."""


@dataclass(frozen=True)
class LayerShape:
    """The shape of a layer's weight, and the number of rows of a worker's batch in that layer."""

    name: str
    """Name of the weight."""
    num_out: int
    num_in: int
    rows: int
    """Rows of the factors: samples, times positions of a sequence or an image."""
    itemsize: int = 4
    """Bytes per number."""
    convolution: bool = False
    """Whether it is a convolution with a kernel of 1. Its factors have a row for every position of every image."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradient as a matrix."""
        return self.num_out * self.num_in * self.itemsize


@dataclass(frozen=True)
class Decision:
    """The method chosen for a layer, with what every method would cost."""

    shape: LayerShape
    method: Method
    sent_bytes: dict[Method, float]
    """Bytes sent by one worker per step, by method."""
    seconds: dict[Method, float]
    """Predicted seconds per step, by method."""


def published_floats(shape: LayerShape, num_workers: int) -> dict[str, float]:
    """Return the numbers that all workers send together, as Zhang et al. (2015) count them, by protocol."""
    # The paper's letters.
    P, K, M, N = num_workers, shape.rows, shape.num_out, shape.num_in
    return {"broadcast": (P - 1) ** 2 * K * (M + N), "owners": P * K * (M + N) + P * M * N, "full": 2 * P * M * N}


def published(shape: LayerShape, num_workers: int) -> Method:
    """Return the choice of SACP (Zhang et al. 2015, algorithm 3). Only fully connected layers have one."""
    if shape.convolution:
        return "full"
    floats = published_floats(shape, num_workers)
    # The paper's algorithm does not consider sending the matrix, "full".
    return "broadcast" if floats["broadcast"] <= floats["owners"] else "owners"


def bucket_bytes_on(link: Link | None) -> int:
    """Return the bucket size for gradients sent in full: the smallest that still uses the link well, if it is known."""
    if link is None:
        return _MOST_BUCKET_BYTES
    # Seconds of latency divided by seconds per byte: the bytes that travel in the time of one latency.
    num_bytes = _LATENCIES * link.latency_s / link.seconds_per_byte
    return int(min(_MOST_BUCKET_BYTES, max(_LEAST_BUCKET_BYTES, num_bytes)))


def sent_bytes(shape: LayerShape, num_workers: int) -> dict[Method, float]:
    """Return the bytes that one worker sends per step, by method."""
    # With owners, each of the others gets 1/P of the columns of E, all of A, and this rank's 1/P of the result.
    others, share = num_workers - 1, (num_workers - 1) / num_workers
    from_outputs, from_inputs = shape.rows * shape.num_out * shape.itemsize, shape.rows * shape.num_in * shape.itemsize
    return {
        "full": 2 * share * shape.num_bytes,
        "broadcast": others * (from_outputs + from_inputs),
        "owners": share * from_outputs + others * from_inputs + share * shape.num_bytes,
    }


def seconds(shape: LayerShape, num_workers: int, link: Link, extra_s: Cost, flops: float) -> dict[Method, float]:
    """Return the predicted seconds per step, by method, if the link and the worker do nothing else.

    Factors cost sending and multiplying: backward has computed a worker's own product, and the other workers' rows are
    extra work. Their owner shares it among all workers, and adds a second message's latency.

    Args:
        link: the share of the link that one worker has.
        extra_s: the time that the matrix adds to the all-reduce.
        flops: floating-point operations per second of a matrix product.
    """
    sent = sent_bytes(shape, num_workers)
    # A product of K × M by K × N takes 2 K M N operations: a multiplication and an addition each.
    peer_products_s = 2.0 * (num_workers - 1) * shape.rows * shape.num_out * shape.num_in / flops
    return {
        "full": extra_s(shape.num_bytes),
        "broadcast": link.seconds(sent["broadcast"]) + peer_products_s,
        "owners": link.seconds(sent["owners"]) + link.latency_s + peer_products_s / num_workers,
    }


def decide(shape: LayerShape, rule: str, num_workers: int, link: Link, extra_s: Cost, flops: float) -> Decision:
    """Choose a method: by predicted time ("priced"), by the published rule ("sacp"), or the one that the rule names."""
    times = seconds(shape, num_workers, link, extra_s, flops)
    method: Method
    if rule == "priced":
        method = min(METHODS, key=lambda candidate: times[candidate])
    elif rule == "sacp":
        method = published(shape, num_workers)
    else:
        # `Poseidon` has checked the text: here it can only be the name of a method.
        assert rule in METHODS
        method = rule
    return Decision(shape, method, sent_bytes(shape, num_workers), times)
