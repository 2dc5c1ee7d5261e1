"""Results of the reproduction on training without a parameter server."""

from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import Literal, NamedTuple

from tutti.strategies import parse

TaskName = Literal["sites", "gossip"]

ALL_REDUCE = "all-reduce"
SERVERS = ("1 server", "1 server, equal shares", "N servers")
EXACT = "peers, exact"
EXACT_SMALL_INBOX = "peers, exact, inbox of 2"
RESIDUAL, NO_RESIDUAL = "peers, threshold with residual", "peers, threshold without residual"


@dataclass(frozen=True)
class DecentralisedMethod:
    """A strategy, and the learning rate used with it."""

    name: str
    strategy: str
    separate_updates: bool = False
    """Whether every worker's update is applied separately, not in a mean: it then has an N-th of the learning rate."""
    equal_shares: bool = False
    """Whether all workers make the same number of steps under servers too; otherwise fast ones make more."""

    @property
    def num_dedicated_servers(self) -> int:
        """Ranks that the strategy adds to the workers as servers."""
        return parse(self.strategy).num_dedicated_servers


@dataclass(frozen=True, kw_only=True)
class DecentralisedTask:
    """A recipe on a part of its data, and how it is trained."""

    name: TaskName
    recipe: str
    cluster: str
    """The preset `africa-wan`, or `even`."""
    batch: int
    """Samples per step of all workers together."""
    num_train: int
    num_test: int
    epochs: int
    learning_rate: float
    """Learning rate of a step that is made of one update of every worker."""
    workers: tuple[int, ...]
    methods: tuple[DecentralisedMethod, ...]
    momentum: float = 0.0
    decays: bool = False
    """Whether the learning rate decreases linearly to 0."""
    tests_per_epoch: int = 4
    seeds: tuple[int, ...] = (0,)

    @property
    def num_steps(self) -> int:
        """Steps per worker; an average where workers make different numbers of steps."""
        return self.epochs * (self.num_train // self.batch)


class StepPoint(NamedTuple):
    """One test during training."""

    steps: float
    """Steps per worker, on average."""
    seconds: float
    """Virtual seconds since the start of training."""
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class DecentralisedRun:
    """One training run in virtual time."""

    task: TaskName
    workers: int
    method: str
    strategy: str
    seed: int
    batch: int
    """Samples in one worker's batch."""
    learning_rate: float
    accuracy: float
    """Final test accuracy of the agreed parameters."""
    local_accuracy: tuple[float, float]
    """Lowest and highest test accuracy of the workers' own parameters before they agree."""
    seconds: float
    """Virtual seconds of the whole training."""
    steps: tuple[int, ...]
    """Steps of every worker."""
    bytes_per_step: int
    """Bytes sent between hosts per step of one worker."""
    spectral_gap: float | None
    """Spectral gap of the gossip graph; None for other strategies."""
    points: tuple[StepPoint, ...]

    def seconds_to(self, accuracy: float) -> float | None:
        """Return the virtual seconds until an accuracy was first reached; None if it never was."""
        return next((point.seconds for point in self.points if point.accuracy >= accuracy), None)

    @property
    def step_ms(self) -> float:
        """Virtual milliseconds per step of a worker."""
        return 1000 * self.seconds / mean(self.steps)

    @property
    def largest_drop(self) -> float:
        """Largest decrease of the accuracy from one test to the next, in points."""
        drops = [100 * (before.accuracy - after.accuracy) for before, after in pairwise(self.points)]
        return max([0.0, *drops])


@dataclass(frozen=True, kw_only=True)
class TrafficByWorkers:
    """Bytes that one worker sends per step with a method, for several numbers of workers."""

    method: str
    workers: tuple[int, ...]
    bytes_per_step: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DecentralisedResults:
    """All training runs and traffic counts."""

    machine: str
    quick: bool
    step_s: float
    """Virtual seconds of computation per step of a worker, whatever its batch."""
    jitter: float
    """Relative spread of the compute times."""
    even_link: str
    """Link of every host on the cluster `even`."""
    hub: str
    """Site of the single server."""
    wan: str
    """Description of the preset `africa-wan`."""
    tasks: tuple[DecentralisedTask, ...]
    runs: tuple[DecentralisedRun, ...]
    traffic: tuple[TrafficByWorkers, ...]

    def task(self, name: TaskName) -> DecentralisedTask:
        """Return the task of a name."""
        return next(task for task in self.tasks if task.name == name)

    def first_seed(self, task: TaskName, workers: int) -> dict[str, DecentralisedRun]:
        """Return the runs of the first seed, by method."""
        runs: dict[str, DecentralisedRun] = {}
        for run in self.runs:
            if (run.task, run.workers) == (task, workers):
                runs.setdefault(run.method, run)
        return runs

    def gossip_runs(self, method: str) -> list[DecentralisedRun]:
        """Return the runs of a method in the gossip task, one per seed."""
        return [run for run in self.runs if (run.task, run.method) == ("gossip", method)]

    def gossip_methods(self) -> list[str]:
        """Return the methods of the gossip task without the baseline."""
        return [method.name for method in self.task("gossip").methods if method.name != ALL_REDUCE]

    def points_from_all_reduce(self, method: str) -> list[float]:
        """Return by how many points a method of the gossip task ends above all-reduce, by seed."""
        pairs = zip(self.gossip_runs(method), self.gossip_runs(ALL_REDUCE), strict=True)
        return [round(100 * (run.accuracy - reference.accuracy), 3) for run, reference in pairs]
