"""Training steps that benchmarks time: without communication, under DDP, and under a Tutti strategy."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tutti.bench.models import BenchmarkModel
from tutti.job import Job, distribute
from tutti.strategies import parse
from tutti.transports import HostsTransport
from tutti.transports.torch_store import torch_store
from tutti.world import World


@contextmanager
def torch_group(world: World) -> Iterator[None]:
    """Make torch's default process group (Gloo) between the ranks of `world`, and destroy it at the end."""
    transport = world.transport.inner if isinstance(world.transport, HostsTransport) else world.transport
    # One rank alone has no membership, and needs no store that others can reach.
    membership = getattr(transport, "membership", None)
    store = torch_store(membership, "ddp") if membership is not None else dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_step(
    model: nn.Module,
    benchmark: BenchmarkModel,
    after_backward: Callable[[], None] = lambda: None,
    wrap_optimizer: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: optimizer,
) -> tuple[Callable[[], None], Any]:
    """Return a function that trains `model` for one step with SGD, and the (wrapped) optimiser.

    `model` may be a wrapped copy of the benchmark's; the batch and the loss are the benchmark's.
    """
    optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.001))
    x, y = benchmark.batch

    def step() -> None:
        benchmark.loss(model(x), y).backward()
        after_backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer


def solo_step(benchmark: BenchmarkModel) -> Callable[[], None]:
    """Make a step on a copy of the model, without any communication."""
    return make_step(copy.deepcopy(benchmark.model), benchmark)[0]


def ddp_step(benchmark: BenchmarkModel) -> Callable[[], None]:
    """Make a step on a copy of the model under DDP, on torch's default process group."""
    # Gradients are views of buckets, as Tutti's are: otherwise DDP would copy each one into its bucket and back.
    model = DistributedDataParallel(copy.deepcopy(benchmark.model), gradient_as_bucket_view=True)
    return make_step(model, benchmark)[0]


def tutti_step(benchmark: BenchmarkModel, world: World, strategy: str | None = None) -> tuple[Callable[[], None], Job]:
    """Make a step on a copy of the model under a Tutti strategy, by default all-reduce, and the job to finish later."""
    model = copy.deepcopy(benchmark.model)
    step, optimizer = make_step(model, benchmark)
    return step, distribute(model, optimizer, None if strategy is None else parse(strategy), world=world)
