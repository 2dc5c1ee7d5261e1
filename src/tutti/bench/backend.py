"""`tutti bench backend`: DDP, FSDP2 and single operations on Tutti's process groups and on Gloo's."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from tutti.bench.interleaved import Candidates, InterleavedTimer
from tutti.bench.models import BenchmarkModel, make_benchmark_model
from tutti.bench.training_steps import make_step, torch_group
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe

BACKENDS = ("gloo", "tutti")
SIZES, LAB_SIZES = (4, 4 * 2**10, 256 * 2**10, 4 * 2**20), (4, 4 * 2**10, 256 * 2**10)
"""Bytes of the operations that are timed alone: on one host, and over slow links."""

_WARM_UP_STEPS = 4
"""Untimed calls: DDP rebuilds its buckets after the first, FSDP2 allocates, and connections open."""


@dataclass(frozen=True)
class BackendBenchmark:
    """Models to train, and sizes of single operations."""

    models: tuple[str, ...]
    rounds: int
    sizes: tuple[int, ...] = SIZES
    round_s: float = 0.1


def measure(benchmark: BackendBenchmark) -> list[dict[str, Any]]:
    """Time steps and single operations on both backends, on all ranks. Returns one row each, on every rank."""
    world, supervisor = init(), SupervisorPipe()
    torch.manual_seed(0)
    rows = []
    with torch_group(world):
        # Both groups live in the same processes, so that ranks, cores and memory are the same for both.
        groups = {"gloo": dist.group.WORLD, "tutti": dist.new_group(backend="tutti")}
        jobs: list[tuple[str, str, Callable[[Any], Callable[[], Any]]]] = []
        for model in benchmark.models:
            benchmark_model = make_benchmark_model(model, world.size)
            jobs += [(wrapper, model, partial(_stepper, benchmark_model, wrapper)) for wrapper in WRAPPERS]
        for size in benchmark.sizes:
            jobs += [(name, str(size), partial(make, size)) for name, make in OPERATIONS.items()]
        # One job after the other, with both backends interleaved in each.
        for name, subject, make in jobs:
            supervisor.progress(doing=f"{name} {subject}")
            candidates: Candidates = {backend: make(groups[backend]) for backend in BACKENDS}
            for candidate in candidates.values():
                for _ in range(_WARM_UP_STEPS):
                    candidate()
            times = InterleavedTimer(benchmark.rounds, benchmark.round_s, 200, total_s=60.0).medians(
                candidates, world.transport
            )
            rows.append({"operation": name, "subject": subject, "workers": world.size, "seconds": times})
    return rows


def _stepper(benchmark_model: BenchmarkModel, wrapper: str, group: Any) -> Callable[[], None]:
    """Return a step of a copy of the model, wrapped for a group."""
    return make_step(WRAPPERS[wrapper](copy.deepcopy(benchmark_model.model), group), benchmark_model)[0]


def _ddp(model: nn.Module, group: Any) -> nn.Module:
    """Wrap the model in DDP, with gradients that are views of its buckets, as Tutti's are."""
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


def shard(model: nn.Module, group: Any) -> nn.Module:
    """Wrap the model in FSDP2: every layer with parameters is a group, and the rest is one group."""
    from torch.distributed.fsdp import fully_shard  # Imported here, because it is slow to import.

    mesh = DeviceMesh.from_group(group, "cpu")
    # Inner layers first, as FSDP2 requires: the call on the model takes the parameters that are left.
    for layer in layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def layers(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that FSDP2 gathers one at a time: its blocks, or every layer with parameters."""
    blocks = getattr(model, "blocks", None)
    if blocks is not None:
        return list(blocks)
    return [module for module in model.modules() if not list(module.children()) and list(module.parameters())]


def _all_reduce(size: int, group: Any) -> Callable[[], None]:
    """Return a function that sums `size` bytes over the group."""
    tensor = torch.zeros(size // 4)
    return lambda: dist.all_reduce(tensor, group=group)


def _all_gather(size: int, group: Any) -> Callable[[], None]:
    gathered = torch.zeros(size // 4 * group.size())  # `size` is that of one rank's part.
    # Newer versions of torch have another name for it.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return lambda: gather(gathered, gathered[: size // 4], group=group)


def _reduce_scatter(size: int, group: Any) -> Callable[[], None]:
    """Return a function that sums and scatters; `size` is that of one rank's part."""
    output, flat = torch.zeros(size // 4), torch.zeros(size // 4 * group.size())
    reduce: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return lambda: reduce(output, flat, group=group)


def _broadcast(size: int, group: Any) -> Callable[[], None]:
    """Return a function that sends `size` bytes from rank 0 to all ranks."""
    tensor = torch.zeros(size // 4)
    return lambda: dist.broadcast(tensor, src=0, group=group)


def _ping_pong(size: int, group: Any) -> Callable[[], None]:
    """Send a message from rank 0 to rank 1 and back; other ranks do nothing."""
    tensor, rank = torch.zeros(size // 4), dist.get_rank(group)

    # One rank sends first and the other receives first; if both sent first, blocking sends could wait for each other.
    def call() -> None:
        if rank == 0:
            dist.send(tensor, 1, group=group)
            dist.recv(tensor, 1, group=group)
        elif rank == 1:
            dist.recv(tensor, 0, group=group)
            dist.send(tensor, 0, group=group)

    return call


OPERATIONS: dict[str, Callable[[int, Any], Callable[[], None]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "ping-pong": _ping_pong,
}

WRAPPERS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {"DDP": _ddp, "FSDP2": shard}
