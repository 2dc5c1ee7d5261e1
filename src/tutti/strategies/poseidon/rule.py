"""Which way of exchanging a layer's gradient is the cheapest: as Poseidon's authors have it, and by the link there is.

With P workers, a weight of M outputs and N inputs, and K rows in a worker's batch, a gradient can travel as a matrix of
M N numbers, or as factors of K (M + N).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from tutti.cluster import Link

Method = Literal["full", "broadcast", "owners"]
"""The matrix, summed; factors to everybody; factors to whoever owns a part of the matrix, which hands out its sum."""

METHODS: tuple[Method, ...] = get_args(Method)

Cost = Callable[[int], float]
"""Seconds that a sum over all workers takes longer, by bytes: biases and other layers are summed in any case."""

_LEAST_BUCKET_BYTES, _MOST_BUCKET_BYTES = 2**16, 4 * 2**20
_LATENCIES = 10
"""A bucket is on its way for so many latencies of the link, if it is not to wait for them."""


@dataclass(frozen=True)
class LayerShape:
    """A layer's weight, and how many rows a worker's batch has there."""

    name: str
    num_out: int
    num_in: int
    rows: int
    itemsize: int = 4
    convolution: bool = False
    """Of kernel 1: it has factors, with a row for every place of every image."""

    @property
    def num_bytes(self) -> int:
        """Of the whole gradient."""
        return self.num_out * self.num_in * self.itemsize


@dataclass(frozen=True)
class Decision:
    """How a layer's gradient travels, and what each way would send and take."""

    shape: LayerShape
    method: Method
    sent_bytes: dict[Method, float]
    """By a worker, in a step."""
    seconds: dict[Method, float]


def published_floats(shape: LayerShape, num_workers: int) -> dict[str, float]:
    """Numbers on the wire of all workers together, as Zhang et al. (2015) count them for their three protocols."""
    P, K, M, N = num_workers, shape.rows, shape.num_out, shape.num_in
    return {"broadcast": (P - 1) ** 2 * K * (M + N), "owners": P * K * (M + N) + P * M * N, "full": 2 * P * M * N}


def published(shape: LayerShape, num_workers: int) -> Method:
    """The structure-aware protocol's choice (Zhang et al. 2015, algorithm 3): only fully connected layers have one."""
    if shape.convolution:
        return "full"
    floats = published_floats(shape, num_workers)
    return "broadcast" if floats["broadcast"] <= floats["owners"] else "owners"


def bucket_bytes_on(link: Link | None) -> int:
    """How large buckets of what goes in full are: as small as a link is still used well with, if there is one."""
    if link is None:
        return _MOST_BUCKET_BYTES
    worth = _LATENCIES * link.latency_s / link.seconds_per_byte
    return int(min(_MOST_BUCKET_BYTES, max(_LEAST_BUCKET_BYTES, worth)))


def sent_bytes(shape: LayerShape, num_workers: int) -> dict[Method, float]:
    """What one worker sends in a step, in each way."""
    others, share = num_workers - 1, (num_workers - 1) / num_workers
    from_outputs, from_inputs = shape.rows * shape.num_out * shape.itemsize, shape.rows * shape.num_in * shape.itemsize
    return {
        "full": 2 * share * shape.num_bytes,
        "broadcast": others * (from_outputs + from_inputs),
        "owners": share * from_outputs + others * from_inputs + share * shape.num_bytes,
    }


def seconds(shape: LayerShape, num_workers: int, link: Link, more_s: Cost, flops: float) -> dict[Method, float]:
    """What each way takes when nothing else does: sending, and multiplying what others would have multiplied."""
    sent = sent_bytes(shape, num_workers)
    beyond_own = 2.0 * (num_workers - 1) * shape.rows * shape.num_out * shape.num_in / flops
    return {
        "full": more_s(shape.num_bytes),
        "broadcast": link.seconds(sent["broadcast"]) + beyond_own,
        "owners": link.seconds(sent["owners"]) + link.latency_s + beyond_own / num_workers,
    }


def decide(shape: LayerShape, rule: str, num_workers: int, link: Link, more_s: Cost, flops: float) -> Decision:
    """By a rule's name: "priced" takes the fastest, "sacp" what is published, and a method's name that method."""
    times = seconds(shape, num_workers, link, more_s, flops)
    method: Method
    if rule == "priced":
        method = min(METHODS, key=lambda each: times[each])
    elif rule == "sacp":
        method = published(shape, num_workers)
    else:
        assert rule in METHODS
        method = rule
    return Decision(shape, method, sent_bytes(shape, num_workers), times)
