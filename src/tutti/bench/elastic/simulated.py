"""Seeded runs in virtual time, in which workers are killed, stopped, cut off, asked to leave and joined at random.

How it works. A case is a strategy, a cluster, a number of workers and failures, all drawn from the seed and the case's
number. The run is short and real: float64 gradients, the code of every elastic run, modelled clocks. The same run
without failures is what its end is compared with.

*Is every sample used once in every epoch?* Each rank records the samples of every batch that it draws, with its
position in the data before. When ranks change, they agree how far each of the ranks before was. A batch counts if it
lies before that. The batches that count must have every sample once in every epoch, under every strategy. Under an
exact one the parameters show as well that it is so. Where each worker's gradients are added to the model as they are,
the model has a parameter for every sample, which shows how often the sample is in it. What is missing must be among
the samples that the run has counted as lost; nothing may be in it twice.
"""

import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tutti.cluster import Cluster, Compute, Host, Link
from tutti.data.shard import shard
from tutti.data.sharded_data import ShardedData
from tutti.errors import TuttiError
from tutti.job.distribution import distribute
from tutti.launch import init
from tutti.simulation.runs.simulate import Simulation, simulate
from tutti.world import Elasticity

_STEPS, _EPOCHS, _BATCH, _LR = 6, 3, 2, 0.05
"""Steps of an epoch, epochs, samples of a worker in a step while all are there, and the learning rate."""
_SAMPLE_S = 0.1
"""Computing time of a sample: a run takes some virtual seconds, as failures do."""
_TOLERANCE = 1e-10
_LINK = Link("1gbit", "50us")
_STOPPED = f"SystemExit: {128 + signal.SIGTERM}"


@dataclass(frozen=True)
class SimulatedSubject:
    """A strategy, and what its end must be like."""

    strategy: str
    exact: bool = False
    """Whether the result is that of the undisturbed run."""
    counts_uses: bool = False
    """Whether each use of a sample moves the model by the sample's own gradient, whatever the others do."""
    fewest: int = 1
    """Workers that it needs."""


SUBJECTS = (
    *(SimulatedSubject(name, exact=True) for name in ("native", "ring", "tree", "hierarchical", "poseidon")),
    *(SimulatedSubject(name, exact=True) for name in ("butterfly", "recursive_doubling", "ring_blocking")),
    SimulatedSubject("onebit:exact_below=0"),
    SimulatedSubject("topk:0.1"),
    SimulatedSubject("averaging:every=4"),
    SimulatedSubject("bmuf:every=4"),
    SimulatedSubject("diloco:every=4"),
    SimulatedSubject("ps:bsp"),
    SimulatedSubject("ps:ssp=2"),
    SimulatedSubject("ps:async"),
    SimulatedSubject("ps:async,aware"),
    SimulatedSubject("ps:softsync=2", fewest=2),
    SimulatedSubject("peers", counts_uses=True),
    SimulatedSubject("gossip"),
)


@dataclass(frozen=True)
class SimulatedCase:
    """A run with failures."""

    number: int
    subject: SimulatedSubject
    workers: tuple[int, int]
    hosts: str
    """"one", "each" or "two": how ranks are placed."""
    chaos: str

    def __str__(self) -> str:
        fewest, most = self.workers
        return f"{self.number}: {self.subject.strategy}, {fewest}:{most}, {self.hosts} host: {self.chaos}"


@dataclass
class CaseOutcome:
    """The end of a case."""

    case: SimulatedCase
    problems: list[str] = field(default_factory=list)
    difference: float = 0.0
    """Of parameters from those of the undisturbed run, relative to the largest."""
    num_lost: int = 0
    """Ranks that were lost or have left."""
    lost_samples: int = 0
    """Samples that the run has counted as lost."""
    virtual_s: float = 0.0


@dataclass(frozen=True)
class _End:
    """The end of a run on one rank."""

    steps: int
    parameters: Tensor
    uses: Tensor
    """Of each sample, in all epochs."""
    lost_ranks: int
    lost_samples: int


@dataclass
class _Record:
    """What all ranks of a run have drawn, and how far they agreed that each of them was."""

    draws: list[tuple[int, int, tuple[int, int], list[int]]] = field(default_factory=list)
    """Of each batch: generation, rank, position before, and samples."""
    positions: dict[int, list[list[int]]] = field(default_factory=dict)
    """By generation, at its end; of each of its ranks."""
    disagreements: list[str] = field(default_factory=list)
    beginnings: dict[int, int] = field(default_factory=dict)
    """Number of ranks with which a world has begun, by generation: it begins anew if all ranks are lost."""

    def counted(self) -> Iterator[list[int]]:
        """Yield the samples of batches that were not void, since the world has begun."""
        first = max(self.beginnings)
        for generation, rank, before, numbers in self.draws:
            if generation < first:
                continue
            ends = self.positions.get(generation)
            if ends is None or tuple(ends[rank]) > before:
                yield numbers

    def follow(self, batches: ShardedData, elastic: Elasticity) -> Callable[[int, list[int]], None]:
        """Note the positions on which this rank agrees with the others; return what notes a batch of a rank."""
        regroup, numbers = batches.regroup, [-1]

        def noted(positions: list[list[int]]) -> None:
            if numbers[0] >= 0:
                before = self.positions.setdefault(numbers[0], positions)
                if before != positions:
                    self.disagreements.append(f"generation {numbers[0]}: {before} and {positions}")
            numbers[0] = elastic.member.number
            regroup(positions)

        def draw(rank: int, samples: list[int]) -> None:
            if numbers[0] < 0 and not elastic.has_joined:
                assert elastic.member.generation is not None
                self.beginnings[elastic.member.number] = len(elastic.member.generation.members)
            numbers[0] = elastic.member.number
            self.draws.append((numbers[0], rank, batches.position, samples))

        batches.regroup = noted  # type: ignore[method-assign]
        return draw


class _CountedModel(nn.Module):
    """A small network, with a parameter for every sample."""

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.uses = nn.Parameter(torch.zeros(num_samples, dtype=torch.float64))

    def forward(self, inputs: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(inputs), self.uses[numbers]


def cases(count: int, seed: int) -> Iterator[SimulatedCase]:
    """Draw cases: strategies in turn, the rest at random."""
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        subject = SUBJECTS[number % len(SUBJECTS)]
        most = draw.randint(3, 5)
        hosts = draw.choice(("one", "each", "two"))
        fewest = max(subject.fewest, draw.randint(1, 2))
        yield SimulatedCase(number, subject, (fewest, most), hosts, _failures(draw, most, hosts))


def _failures(draw: random.Random, workers: int, hosts: str) -> str:
    """Draw the text of failures."""
    clauses, leaves = [], 0
    for _ in range(draw.randint(1, 4)):
        at = f"at {draw.uniform(0, 4):.3f}s"
        whom = draw.choice(["any", str(draw.randrange(workers))])
        lasts = f"for {draw.choice((draw.uniform(0.05, 3), 12)):.3f}s"
        kind = draw.choice(["kill", "kill", "kill", "stop", "leave", "join", *([] if hosts == "one" else ["cut"])])
        if kind == "leave" and leaves == workers - 2:
            kind = "kill"
        leaves += kind == "leave"
        number = draw.randrange(2 if hosts == "two" else workers)
        clauses.append(
            {
                "kill": f"kill {whom} {at}",
                "stop": f"stop {whom} {lasts} {at}",
                "leave": f"leave {whom} {at}",
                "join": f"join {at}",
                "cut": f"cut host {number} {lasts} {at}",
            }[kind]
        )
    return "; ".join([*clauses, f"seed {draw.randrange(1000)}"])


def judge(case: SimulatedCase) -> CaseOutcome:
    """Simulate a case, and compare its end with that of the run without failures."""
    outcome = CaseOutcome(case)
    threads = threading.active_count()
    try:
        record = _Record()
        found = _simulate(case.subject, case.workers, case.hosts, case.chaos, record)
    except TuttiError as error:
        if _STOPPED in str(error):  # The last worker that had the state was asked to leave.
            return outcome
        outcome.problems.append(f"{type(error).__name__}: {error}")
        return outcome
    if (left := threading.active_count() - threads) > 0:
        outcome.problems.append(f"{left} threads are left")
    ends: list[_End] = [end for end in found.results if end is not None]
    outcome.virtual_s = found.seconds
    outcome.num_lost = max(end.lost_ranks for end in ends)
    outcome.lost_samples = max(end.lost_samples for end in ends)
    size = record.beginnings[max(record.beginnings)]
    _judge_parameters(outcome, ends, _of_all(case.subject, size, case.workers[1], case.hosts))
    _judge_samples(outcome, ends[0], record)
    return outcome


def _judge_parameters(outcome: CaseOutcome, ends: list[_End], wanted: _End) -> None:
    subject = outcome.case.subject
    largest = float(wanted.parameters.abs().max())
    if any(not torch.isfinite(end.parameters).all() for end in ends):
        outcome.problems.append("parameters are not finite")
    spread = max(float((end.parameters - ends[0].parameters).abs().max()) for end in ends) / largest
    if spread > _TOLERANCE:
        outcome.problems.append(f"ranks end with parameters that differ by {spread:.1e}")
    if not subject.exact:
        return
    outcome.difference = max(float((end.parameters - wanted.parameters).abs().max()) for end in ends) / largest
    if outcome.difference > _TOLERANCE:
        outcome.problems.append(f"parameters differ by {outcome.difference:.1e} from those of the undisturbed run")
    if ends[0].steps != wanted.steps:
        outcome.problems.append(f"{ends[0].steps} steps, and {wanted.steps} in the undisturbed run")


def _judge_samples(outcome: CaseOutcome, end: _End, record: _Record) -> None:
    """Look whether each sample was used once in every epoch."""
    num_samples = end.uses.numel()
    counts = Counter(number for batch in record.counted() for number in batch)
    twice = {number: counts[number] for number in range(num_samples) if counts[number] > _EPOCHS}
    num_missing = sum(max(0, _EPOCHS - counts[number]) for number in range(num_samples))
    if twice:
        outcome.problems.append(f"uses of samples that are more than {_EPOCHS}: {twice}")
    if num_missing > outcome.lost_samples:
        outcome.problems.append(f"{num_missing} samples were not used, and {outcome.lost_samples} count as lost")
    if record.disagreements:
        outcome.problems.append(f"ranks do not agree on positions: {record.disagreements}")
    if not outcome.case.subject.counts_uses:
        return
    uses = end.uses.round()
    missing, doubled = int((_EPOCHS - uses).clamp(min=0).sum()), int((uses - _EPOCHS).clamp(min=0).sum())
    if missing > outcome.lost_samples:
        outcome.problems.append(f"{missing} uses are not in the model, and {outcome.lost_samples} count as lost")
    if doubled:
        outcome.problems.append(f"{doubled} uses are in the model twice")


@cache
def _of_all(subject: SimulatedSubject, size: int, most: int, hosts: str) -> _End:
    """Return the end of a run without failures of so many workers, on the data of a run of `most`."""
    end: _End = _simulate(subject, (size, size), hosts, None, _Record(), most).results[0]
    return end


def _simulate(
    subject: SimulatedSubject,
    workers: tuple[int, int],
    hosts: str,
    chaos: str | None,
    record: _Record,
    most: int | None = None,
) -> Simulation:
    most = most or workers[1]
    placed = {
        "one": (Host(name="h", link=_LINK, ranks=most),),
        "each": tuple(Host(name=f"h{number}", link=_LINK, ranks=1) for number in range(most)),
        "two": (Host(name="a", link=_LINK, ranks=most - most // 2), Host(name="b", link=_LINK, ranks=most // 2)),
    }
    cluster = Cluster(link=_LINK, hosts=placed[hosts], compute=Compute(sample_s=_SAMPLE_S))
    return simulate(_train, subject, most, record, workers=workers, chaos=chaos, cluster=cluster)


def _train(subject: SimulatedSubject, most: int, record: _Record) -> _End:
    """Train to the end, with any other members. The function of every rank."""
    world = init()
    torch.manual_seed(0)
    num_samples = _STEPS * _BATCH * most
    inputs = torch.randn(num_samples, 6, dtype=torch.float64)
    data = TensorDataset(inputs, inputs @ torch.randn(6, 2, dtype=torch.float64), torch.arange(num_samples))
    model = _CountedModel(num_samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
    job = distribute(model, optimizer, subject.strategy)
    batches = shard(DataLoader(data, batch_size=_BATCH, shuffle=True))
    assert world.elastic is not None
    draw = record.follow(batches, world.elastic)
    for epoch in batches.epochs(_EPOCHS):
        for x, y, numbers in epoch:
            if world.sample_counts.num_samples:  # Else it stands in where this rank has none, and has no weight.
                draw(world.rank, numbers.tolist())
            output, uses = model(x, numbers)
            loss = (output - y).square().mean() + (uses.sum() if subject.counts_uses else uses.mean())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    changes = job.metrics.changes
    job.finish()
    steps = job.steps
    uses = -model.uses.detach() / _LR
    parameters = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    return _End(steps, parameters, uses, changes.lost_ranks, changes.lost_samples)


def run(count: int, seed: int, done: Callable[[CaseOutcome], None] = lambda outcome: None) -> list[CaseOutcome]:
    """Simulate cases 0 to `count` - 1 of a seed."""
    outcomes = []
    for case in cases(count, seed):
        outcomes.append(judge(case))
        done(outcomes[-1])
    return outcomes
