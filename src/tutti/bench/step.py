"""Training steps: the same model solo, under DDP, under Tutti and with a flat Open MPI all-reduce."""

import copy
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tutti.bench.under_mpi import communicator
from tutti.collectives import all_gather_json
from tutti.errors import UnknownName
from tutti.job import distribute
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.recipes import RECIPES, recipe
from tutti.recipes.models import mlp
from tutti.transports import HostsTransport
from tutti.world import World

ROUND_SECONDS = 0.1


class BenchmarkModel(NamedTuple):
    """A model, a batch per rank and a loss."""

    model: nn.Module
    batch: tuple[Tensor, Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]


MLPS = {"mlp-0.1M": (784, 128, 10), "mlp-1.9M": (784, 1024, 1024, 10), "mlp-20M": (784, 4096, 4096, 10)}

CASES = [*MLPS, *RECIPES]

MLP_BATCH = 64


@dataclass(frozen=True)
class StepTimes:
    """Median seconds per step of each way to train, for one model and number of workers."""

    case: str
    num_parameters: int
    workers: int
    seconds: dict[str, float]

    def ratio(self, peer: str) -> float | None:
        """How many times faster Tutti is than `peer`."""
        return self.seconds[peer] / self.seconds["tutti"] if peer in self.seconds else None

    @property
    def efficiency(self) -> float:
        """What is left of the speed each worker has when it exchanges nothing."""
        return self.seconds["solo"] / self.seconds["tutti"]

    def as_dict(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "num_parameters": self.num_parameters,
            "workers": self.workers,
            "seconds": self.seconds,
            "times_ddp": self.ratio("ddp"),
            "times_mpi": self.ratio("mpi"),
            "efficiency": self.efficiency,
        }


def make_benchmark_model(name: str, workers: int, batch_size: int | None = None) -> BenchmarkModel:
    """The case of that name, with so many samples, or this rank's share of its own batch."""
    if name in MLPS:
        size = batch_size or MLP_BATCH
        batch = torch.randn(size, 784), torch.randint(0, 10, (size,))
        return BenchmarkModel(mlp(*MLPS[name]), batch, F.cross_entropy)
    if name not in RECIPES:
        raise UnknownName("benchmark case", name, CASES)
    made = recipe(name)
    return BenchmarkModel(made.model(), made.example(batch_size or max(1, made.batch_size // workers)), made.loss)


def measure(cases: list[str], rounds: int) -> list[dict[str, Any]]:
    """Time every case on this rank and its peers; the rows, on every rank."""
    world, link = init(), SupervisorPipe()
    torch.manual_seed(0)
    rows = []
    with torch_group(world):
        for number, name in enumerate(cases):
            link.progress(done=number, total=len(cases), case=name)
            rows.append(_measure_case(name, world, rounds).as_dict())
    return rows


@contextmanager
def torch_group(world: World) -> Iterator[None]:
    """torch's default group, for DDP, between the same processes."""
    transport = world.transport.inner if isinstance(world.transport, HostsTransport) else world.transport
    membership = getattr(transport, "membership", None)
    store = dist.PrefixStore("ddp", membership.store) if membership is not None else dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _measure_case(name: str, world: World, rounds: int) -> StepTimes:
    case = make_benchmark_model(name, world.size)
    num_parameters = sum(p.numel() for p in case.model.parameters())
    ways: dict[str, Callable[[], Any]] = {"solo": solo(case), "ddp": ddp(case)}
    ways["tutti"], job = _tutti(case, world)
    if world.size > 1 and (everyone := communicator()) is not None:
        ways["mpi"] = _mpi(case, everyone)
    times = _interleaved(ways, world, rounds)
    job.finish()
    return StepTimes(name, num_parameters, world.size, times)


def _interleaved(ways: dict[str, Callable[[], Any]], world: World, rounds: int) -> dict[str, float]:
    """Median seconds a step of each way, the slowest rank's, a round of each in turn."""
    now = world.transport.now
    for way in ways.values():
        for _ in range(3):
            way()
    start = now()
    ways["tutti"]()
    per_round = max(1, int(ROUND_SECONDS / max(_slowest(now() - start, world), 1e-5)))
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            _slowest(0.0, world)  # A barrier: all start together.
            start = now()
            for _ in range(per_round):
                ways[name]()
            samples[name].append(_slowest(now() - start, world) / per_round)
    return {name: statistics.median(values) for name, values in samples.items()}


def _slowest(seconds: float, world: World) -> float:
    return max(all_gather_json(seconds, world.transport))


def stepper(
    model: nn.Module,
    case: BenchmarkModel,
    between: Callable[[], None] = lambda: None,
    wrap: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: optimizer,
) -> tuple[Callable[[], None], Any]:
    """A step of training, and its optimiser: SGD, in whatever `wrap` makes of it."""
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.001))
    x, y = case.batch

    def step() -> None:
        case.loss(model(x), y).backward()
        between()
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer


def solo(case: BenchmarkModel) -> Callable[[], None]:
    return stepper(copy.deepcopy(case.model), case)[0]


def ddp(case: BenchmarkModel) -> Callable[[], None]:
    return stepper(DistributedDataParallel(copy.deepcopy(case.model), gradient_as_bucket_view=True), case)[0]


def _tutti(case: BenchmarkModel, world: World) -> tuple[Callable[[], None], Any]:
    model = copy.deepcopy(case.model)
    step, optimizer = stepper(model, case)
    return step, distribute(model, optimizer, world=world)


def _mpi(case: BenchmarkModel, everyone: Any) -> Callable[[], None]:
    """One flat MPI all-reduce after backward: what a careful user of mpi4py would write."""
    from mpi4py import MPI

    model = copy.deepcopy(case.model)
    parameters = list(model.parameters())
    flat = torch.empty(sum(p.numel() for p in parameters))
    views = [
        part.view(p.shape) for part, p in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)
    ]

    def exchange() -> None:
        torch._foreach_copy_(views, [p.grad for p in parameters if p.grad is not None])
        everyone.Allreduce(MPI.IN_PLACE, flat.numpy())
        flat.div_(everyone.size)
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view

    return stepper(model, case, exchange)[0]
