"""Run a user's script on one worker and on several, and tell how it ended.

A case is a function of a `Script`: it builds a model, trains it in the user's own way, and returns it. Without a world
it is plain PyTorch on whole batches, the reference. With a world, every rank trains on its part of the same batches.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from support import run_threads
from tutti.errors import TuttiError
from tutti.job import Job, distribute
from tutti.strategies import parse
from tutti.world import World

FAMILIES = {
    "all-reduce": "ring",
    "compressed": "onebit:exact_below=1",
    "poseidon": "poseidon",
    "local steps": "bmuf:every=2",
    "gossip": "gossip",
    "peers": "peers",
    "servers": "ps:bsp",
    "stale servers": "ps:ssp=1",
}
"""One strategy of every family."""

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

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    @contextmanager
    def consensus(self, *_: nn.Module, **__: Any) -> Iterator[None]:
        yield

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **_: args[0] if args else None


@dataclass
class Script:
    """What a case needs to know: its world and strategy, if any, and this rank's part of the data."""

    strategy: str
    world: World | None = None
    jobs: list[Job] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return 0 if self.world is None else self.world.rank

    @property
    def size(self) -> int:
        return 1 if self.world is None else self.world.size

    def distribute(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> Any:
        if self.world is None:
            return _NoJob()
        job = distribute(model, optimizer, self.strategy, world=self.world, **options)
        self.jobs.append(job)
        return job

    def part(self, tensor: Tensor) -> Tensor:
        """This rank's rows."""
        return tensor.tensor_split(self.size)[self.rank]

    def batches(self, first: int = 0, last: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of the batches of these steps."""
        for number in range(first, last):
            yield self.part(X[number]), self.part(Y[number])


Case = Callable[[Script], nn.Module]


@dataclass(frozen=True)
class Ended:
    """How a case ended under a strategy."""

    how: str
    """"equal" to one worker, "trained" (inexact strategies: about as well as one worker), "refused" or "wrong"."""
    text: str = ""
    """The error, or what is wrong."""


def run_case(case: Case, strategy: str, transport: str = "shared_memory", tolerance: float = 1e-9) -> Ended:
    """Run a case on one worker and on several, and compare."""
    reference = _weights(case(Script(strategy)))

    def rank(world: World) -> Tensor:
        script = Script(strategy, world)
        model = case(script)
        for job in script.jobs:
            job.finish()
        return _weights(model)

    results = run_threads(rank, size=NUM_RANKS, transport=transport, timeout=TIMEOUT)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        return _judge_errors(errors)
    if any(not torch.equal(results[0], other) for other in results):
        return Ended("wrong", "ranks differ at the end")
    if parse(strategy).exact:
        difference = float((results[0] - reference).abs().max())
        return (
            Ended("equal")
            if difference <= tolerance
            else Ended("wrong", f"differs from one worker by {difference:.1e}")
        )
    return _judge_inexact(results[0], reference, _weights(net()))


def _judge_errors(errors: list[BaseException]) -> Ended:
    """One rank's error ends the run, as the launcher sees it; it must be Tutti's, with words for the user."""
    foreign = [error for error in errors if not isinstance(error, TuttiError)]
    if foreign:
        return Ended("wrong", f"raw error: {foreign[0]!r}")
    return Ended("refused", "\n".join(map(str, errors)))


def _judge_inexact(weights: Tensor, reference: Tensor, initial: Tensor) -> Ended:
    """Weights of an inexact strategy should have gone the way of one worker's, about as far."""
    if weights.shape != reference.shape or initial.shape != reference.shape:
        return Ended("trained")
    gone, wanted = weights - initial, reference - initial
    along = float((gone @ wanted) / wanted.square().sum().clamp_min(1e-30))
    sideways = float((gone - along * wanted).norm() / wanted.norm().clamp_min(1e-30))
    fits = 0.4 <= along <= 2.0 and sideways <= 0.8
    return Ended("trained" if fits else "wrong", f"went {along:.2f} of one worker's way and {sideways:.2f} beside it")


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in [*model.parameters(), *model.buffers()]])


__all__ = ["FAMILIES", "STEPS", "Case", "Ended", "Script", "X", "Y", "copy", "net", "run_case", "sgd", "step"]
