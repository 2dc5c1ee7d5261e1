"""Results of the reproduction on block momentum."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Metric = Literal["perplexity", "accuracy"]
SINGLE = "single worker"


@dataclass(frozen=True, kw_only=True)
class BlockMomentumTask:
    """A model, and how it is trained with every method and number of workers."""

    name: str
    recipe: str
    wide: bool = False
    """Whether the perceptron 784-1024-1024-10 replaces the recipe's model."""
    batch: int
    """Samples in one worker's batch."""
    block_steps: int
    """Local steps between two synchronisations of BMUF and averaging."""
    epochs: int
    learning_rate: float
    """Initial learning rate of plain SGD; it decreases linearly to 0."""
    workers: tuple[int, ...]
    methods: tuple[str, ...]
    max_workers: dict[str, int] = field(default_factory=dict)
    """Largest number of workers of some methods, where it differs from that of the others."""
    seeds: int = 1
    """Number of seeds."""
    link: str = "100mbit"
    """Rate of the link of every worker's host."""
    tests_per_epoch: int = 1
    target: float | None = None
    """Test accuracy up to which the time is measured."""
    strategies: dict[str, str] = field(default_factory=dict)
    """Strategies of methods that are not the usual ones."""


class LearningPoint(NamedTuple):
    """One test during training."""

    epochs: float
    seconds: float
    """Virtual seconds since the start of training."""
    value: float
    """Test perplexity or accuracy."""


@dataclass(frozen=True, kw_only=True)
class BlockMomentumRun:
    """One training run in virtual time."""

    task: str
    method: str
    workers: int
    seed: int
    strategy: str
    metric: Metric
    value: float
    """Final test perplexity or accuracy."""
    bytes_per_step: int
    """Bytes sent by one worker per step, on average."""
    learning_rate: float
    steps: int
    points: tuple[LearningPoint, ...]

    @property
    def seconds(self) -> float:
        """Virtual seconds of the whole training."""
        return self.points[-1].seconds

    @property
    def value_text(self) -> str:
        """Final perplexity with three decimals, or accuracy in percent."""
        return f"{self.value:.3f}" if self.metric == "perplexity" else f"{self.value:.2%}"


@dataclass(frozen=True, kw_only=True)
class BlockMomentumResults:
    """All training runs."""

    machine: str
    quick: bool
    step_s: float
    """Virtual seconds of computation per step of a worker."""
    latency: str
    """Latency of every link."""
    tasks: tuple[BlockMomentumTask, ...]
    runs: tuple[BlockMomentumRun, ...]

    def runs_of(self, task: BlockMomentumTask) -> list[BlockMomentumRun]:
        """Return the runs of a task."""
        return [run for run in self.runs if run.task == task.name]
