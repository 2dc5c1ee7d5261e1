"""Results of the reproduction of Poseidon."""

from dataclasses import dataclass
from statistics import mean
from typing import Literal

LateWorkers = Literal["even", "one slow", "pauses"]
NO_EXCHANGE = "no exchange"
"""In place of a strategy, for workers that exchange nothing."""


@dataclass(frozen=True, kw_only=True)
class PoseidonConfig:
    """What is simulated and measured."""

    models: tuple[str, ...] = ("cifar-quick", "alexnet", "googlenet")
    workers: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rates: tuple[str, ...] = ("40gbit", "1gbit")
    """Link rates; the first is the source's."""
    bounds: tuple[int, ...] = (0, 1, 2, 3, 5, 10, 20)
    """Bounds of staleness."""
    stale_rate: str = "40gbit"
    stale_workers: int = 8
    stale_steps: int = 120
    stale_seeds: int = 5
    """Number of seeds of the random pauses."""
    traffic_workers: int = 8
    traffic_rows: tuple[int, ...] = (16, 256)
    """Batch sizes of a worker for which the traffic is counted."""
    lab_models: tuple[str, ...] = ("cifar-quick", "alexnet", "googlenet")
    lab_workers: tuple[int, ...] = (2, 4, 8)
    lab_rate: str = "1gbit"
    lab_narrowing: int = 4
    """Factor by which AlexNet's fully connected layers are narrower in the lab."""
    lab_rounds: int = 5
    lab_round_s: float = 0.5


@dataclass(frozen=True)
class PoseidonVariant:
    """A form of Poseidon that is compared, with the text of its strategy."""

    name: str
    strategy: str


@dataclass(frozen=True, kw_only=True)
class AssumedCompute:
    """Assumed compute speed of a worker for one model."""

    batch_size: int
    images_per_s: float
    step_s: float
    """Virtual seconds of computation per step."""
    flops: float
    """Operations per second that this speed amounts to."""
    bucket_bytes: int


@dataclass(frozen=True, kw_only=True)
class SimulatedSpeedUp:
    """Simulated training with one model, link rate, variant and number of workers."""

    model: str
    rate: str
    variant: str
    workers: int
    speed_up: float
    """Images per second, relative to one worker."""
    step_s: float
    """Virtual seconds per step."""
    images_per_s: float
    efficiency: float
    bytes_per_worker: float
    """Bytes sent by one worker per step."""
    num_messages: int
    wall_s: float
    """Wall-clock seconds that the simulation took."""


@dataclass(frozen=True, kw_only=True)
class BoundedStalenessTime:
    """Simulated time per step of AlexNet with one bound of staleness and one kind of late workers."""

    cluster: LateWorkers
    bound: int
    strategy: str
    compute_s: float
    """Virtual seconds of computation per step."""
    step_s: tuple[float, ...]
    """Virtual seconds per step, for every seed."""


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters in convolutions and in fully connected layers."""

    model: str
    published: tuple[float, float]
    here: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class LayerTraffic:
    """Traffic of a fully connected layer by the published formulas, and bytes that a worker sends here."""

    model: str
    layer: str
    num_out: int
    num_in: int
    num_rows: int
    """Samples in one worker's batch."""
    workers: int
    published_floats: dict[str, float]
    """Numbers sent per step by all workers, by method."""
    sacp: str
    """Method that the published rule (SACP) chooses."""
    sent_bytes: dict[str, float]
    """Bytes sent per step by one worker, by method, as implemented here."""


@dataclass(frozen=True, kw_only=True)
class CountedTraffic:
    """Bytes sent per step by one worker for consecutive fully connected layers, counted and by formula."""

    rule: str
    workers: int
    num_rows: int
    widths: tuple[int, ...]
    sent_bytes: float
    formula_bytes: float

    @property
    def error(self) -> float:
        """Relative difference of the count from the formula."""
        return self.sent_bytes / self.formula_bytes - 1


@dataclass(frozen=True, kw_only=True)
class LabRun:
    """Steps of a small model on real hosts."""

    model: str
    workers: int
    batch: int
    seconds: dict[str, float]
    """Median wall-clock seconds per step, by strategy."""
    sent_bytes: dict[str, float]
    """Bytes sent per step by one worker, by strategy."""


@dataclass(frozen=True, kw_only=True)
class PoseidonResults:
    """All simulations and measurements."""

    machine: str
    quick: bool
    config: PoseidonConfig
    latency: str
    """Latency of the simulated links."""
    slowdown: float
    """How many times as long the slow worker computes."""
    pause_every_steps: int
    """Mean steps of computation between two pauses."""
    pause_steps: int
    """Mean length of a pause, in steps of computation."""
    variants: tuple[PoseidonVariant, ...]
    compute: dict[str, AssumedCompute]
    """By model."""
    lab_missing: str | None
    """Why the lab was not used; None if it was."""
    lab: tuple[LabRun, ...]
    parameters: tuple[ParameterCount, ...]
    layers: tuple[LayerTraffic, ...]
    speed_ups: tuple[SimulatedSpeedUp, ...]
    staleness: tuple[BoundedStalenessTime, ...]
    traffic: tuple[CountedTraffic, ...]

    def by_workers(self, model: str, rate: str, variant: str) -> dict[int, SimulatedSpeedUp]:
        """Return the simulations of a variant, by number of workers."""
        key = model, rate, variant
        return {row.workers: row for row in self.speed_ups if (row.model, row.rate, row.variant) == key}

    def speed_up(self, model: str, rate: str, variant: str, workers: int) -> float:
        """Return the speed-up over one worker."""
        return self.by_workers(model, rate, variant)[workers].speed_up

    def step_seconds(self, cluster: LateWorkers) -> dict[int, float]:
        """Return the mean time per step over the seeds, by bound of staleness."""
        return {row.bound: mean(row.step_s) for row in self.staleness if row.cluster == cluster}
