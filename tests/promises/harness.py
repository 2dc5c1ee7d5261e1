"""Run a user's script on one worker and on several, and tell how it ended.

A case is a function of a `Script`: it builds a model, trains it in the user's own way, and returns it. Without a world
it is plain PyTorch on whole batches, the reference. With a world, every rank trains on its part of the same batches.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from support import run_threads
from tutti.errors import TuttiError
from tutti.job import Job, distribute
from tutti.job.compatibility import Column
from tutti.parallel import Mesh
from tutti.strategies import parse
from tutti.world import World

NUM_RANKS = 2
STEPS = 6
TIMEOUT = timedelta(seconds=10)

_data = torch.Generator().manual_seed(1)
X = torch.randn(STEPS, 12, 6, generator=_data, dtype=torch.float64)
Y = (X @ torch.randn(6, 3, generator=_data, dtype=torch.float64)).argmax(-1)

compiler = Lock()
"""Held while torch compiles: ranks that are threads share its compiler."""


def filled(model: nn.Module) -> nn.Module:
    """The model in float64 with the same values every time: ranks that are threads share torch's generator."""
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.data = 0.5 * torch.sin(7.0 * torch.arange(p.numel(), dtype=torch.float64) + number).view_as(p)
    return model.double()


def net() -> nn.Sequential:
    """The model of most cases."""
    return filled(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)))  # type: ignore[return-value]


def sgd(model: nn.Module, **options: Any) -> Optimizer:
    """SGD with momentum, so that an optimiser's state matters."""
    return SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.5, **options})


def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """One plain step of training; returns its loss."""
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class _NoJob:
    """The job of a script that runs on one worker in plain PyTorch."""

    is_leader = True

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    @contextmanager
    def consensus(self, *_: nn.Module, **__: Any) -> Iterator[None]:
        yield

    def clip_grad_norm(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **_: args[0] if args else None


@dataclass
class Script:
    """What a case needs to know: its world and strategy, if any, and this rank's part of the data."""

    strategy: str = ""
    mesh: Mesh | None = None
    world: World | None = None
    jobs: list[Job] = field(default_factory=list)
    initial: dict[Tensor, Tensor] = field(default_factory=dict)
    """What each parameter was when its model was distributed first."""

    @property
    def rank(self) -> int:
        return 0 if self.world is None else self.world.rank

    @property
    def num_parts(self) -> int:
        """Parts that each batch is divided into: ranks that hold one model together get the whole batch."""
        if self.world is None:
            return 1
        return self.world.size if self.mesh is None else self.mesh.data

    @property
    def steps_by_mean_gradient(self) -> bool:
        return bool(self.strategy) and parse(self.strategy).steps_by_mean_gradient

    def distribute(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> Any:
        if self.world is None:
            for p in model.parameters():
                self.initial.setdefault(p, p.detach().clone())
            return _NoJob(model)
        if self.strategy == "ps:async":  # Every update is a step, so that there are twice as many: at half the rate.
            for group in optimizer.param_groups:
                group["lr"] /= NUM_RANKS
        job = distribute(model, optimizer, self.strategy, world=self.world, mesh=self.mesh, **options)
        self.jobs.append(job)
        return job

    def part(self, tensor: Tensor) -> Tensor:
        """This rank's rows."""
        # Adjacent ranks split the layers of one replica.
        replica = self.rank // (1 if self.mesh is None else self.mesh.tensor)
        return tensor.tensor_split(self.num_parts)[replica % self.num_parts]

    def batches(self, first: int = 0, last: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of the batches of these steps."""
        for number in range(first, last):
            yield self.part(X[number]), self.part(Y[number])


Case = Callable[[Script], nn.Module]


@dataclass(frozen=True)
class Ended:
    """How a case ended under a strategy."""

    how: str
    """"equal" to one worker, "trained" about as far as one worker, "refused" or "wrong"."""
    text: str = ""
    """The error, or how far the weights are from those of one worker."""


def run_case(case: Case, column: Column, transport: str = "shared_memory", tolerance: float = 1e-9) -> Ended:
    """Run a case on one worker and on several, and compare."""

    def rank(world: World) -> tuple[Tensor, Tensor]:
        script = Script(column.strategy, column.mesh, world)
        try:
            model = case(script)
            for job in script.jobs:
                job.finish()
        except BaseException as error:
            for job in script.jobs:
                job.__exit__(type(error), error, None)  # As `with job` does: it releases process groups.
            raise
        return _parameters(model), _buffers(model)

    results = run_threads(
        rank, size=NUM_RANKS if column.mesh is None else column.mesh.size, transport=transport, timeout=TIMEOUT
    )
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        return _judge_errors(errors)
    if any(not torch.equal(torch.cat(results[0]), torch.cat(other)) for other in results):
        return Ended("wrong", "ranks differ at the end")
    return _judge_weights(*results[0], alone(case), tolerance)


@dataclass(frozen=True)
class _Alone:
    """A case on one worker: where it began, and where it ended."""

    initial: Tensor
    parameters: Tensor
    buffers: Tensor


@cache
def alone(case: Case) -> _Alone:
    """Run a case on one worker, once for all strategies."""
    script = Script()
    model = case(script)
    # By their order: a copy, such as an average of weights, and a model that was loaded began where the first one did.
    initial = list(script.initial.values())[: len(list(model.parameters()))]
    return _Alone(_flat(initial), _parameters(model), _buffers(model))


def _judge_errors(errors: list[BaseException]) -> Ended:
    """One rank's error ends the run, as the launcher sees it; it must be Tutti's, with words for the user."""
    foreign = [error for error in errors if not isinstance(error, TuttiError)]
    if foreign:
        return Ended("wrong", f"raw error: {foreign[0]!r}")
    return Ended("refused", "\n".join(map(str, errors)))


def _judge_weights(parameters: Tensor, buffers: Tensor, reference: _Alone, tolerance: float) -> Ended:
    """Weights should be those of one worker, or else have gone the same way, about as far."""
    expected = torch.cat([reference.parameters, reference.buffers])
    difference = float((torch.cat([parameters, buffers]) - expected).abs().max())
    if difference <= tolerance:
        return Ended("equal")
    gone, wanted = parameters - reference.initial, reference.parameters - reference.initial
    along = float((gone @ wanted) / wanted.square().sum().clamp_min(1e-30))
    sideways = float((gone - along * wanted).norm() / wanted.norm().clamp_min(1e-30))
    fits = 0.4 <= along <= 2.0 and sideways <= 0.8
    text = f"differs by {difference:.1e}; went {along:.2f} of one worker's way and {sideways:.2f} beside it"
    return Ended("trained" if fits else "wrong", text)


def _parameters(model: nn.Module) -> Tensor:
    return _flat(list(model.parameters()))


def _buffers(model: nn.Module) -> Tensor:
    return _flat(list(model.buffers()))


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(each.detach().double().reshape(-1) for each in tensors)])
