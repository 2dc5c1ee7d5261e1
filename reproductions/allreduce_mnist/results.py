"""Results of the reproduction of Fourie (2019)."""

from dataclasses import dataclass
from typing import Literal

Network = Literal["loopback", "lab"]


@dataclass(frozen=True, kw_only=True)
class AllReduceConfig:
    """What is measured."""

    widths: tuple[int, ...] = (25, 400, 1600, 6400)
    """Widths h of the second hidden layer, which set the message size."""
    workers: tuple[int, ...] = (2, 4, 8)
    rounds: int = 5
    """Timed rounds; the algorithms are interleaved within each."""
    accuracy_recipe: str = "mnist-mlp"
    epochs: int = 20
    seeds: tuple[int, ...] = (0, 1, 2)
    accuracy_workers: int = 4
    sizes: tuple[int, ...] = tuple(2**exponent for exponent in range(10, 23))
    """Message sizes, in bytes, at which the all-reduce alone is timed."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmStepTimes:
    """Time of a training step with every algorithm, for one network, number of workers and message size."""

    network: Network
    workers: int
    width: int
    num_bytes: int
    """Size of the message: the gradients of the whole model."""
    seconds: dict[str, float]
    """Median over the rounds of the slowest rank's wall-clock time, by algorithm."""


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """Bandwidth and latency of the lab's links, measured by ping-pong."""

    bits_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class CollectiveTimes:
    """Time of an all-reduce alone with every algorithm, at one message size."""

    num_bytes: int
    seconds: dict[str, float]
    predicted: dict[str, float]
    """Seconds by the cost formulas, with the measured link."""
    cheapest: str
    """Algorithm that the cost formulas choose."""


@dataclass(frozen=True, kw_only=True)
class CollectiveComparison:
    """All-reduce alone, on the hosts of the lab."""

    workers: int
    hosts: int
    link: MeasuredLink
    rows: tuple[CollectiveTimes, ...]


@dataclass(frozen=True, kw_only=True)
class RoundingError:
    """Difference between an algorithm's float32 sum and the exact sum, in units of the float32 rounding."""

    mean: float
    """Mean absolute difference."""
    largest: float
    bias: float
    """Mean signed difference."""
    fraction_differing: float
    """Fraction of the elements that differ from the butterfly's."""


@dataclass(frozen=True, kw_only=True)
class FinalAccuracy:
    """Outcome of one complete training run."""

    algorithm: str
    seed: int
    accuracy: float
    distance: float
    """Relative distance of the final parameters from the butterfly's, at the same seed."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class AllReduceResults:
    """All measurements."""

    machine: str
    quick: bool
    rate: str
    """Rate of the lab's links."""
    lab_missing: str | None
    """Why the lab was not used; None if it was."""
    config: AllReduceConfig
    step_times: tuple[AlgorithmStepTimes, ...]
    collectives: CollectiveComparison | None
    """None without the lab."""
    rounding: dict[str, RoundingError]
    """By algorithm."""
    accuracy: tuple[FinalAccuracy, ...]
