"""FSDP2 in virtual time beside the same job in a lab: parameters and step times are compared."""

import hashlib
import statistics
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from tutti.bench.backend import BACKENDS, WRAPPERS, shard
from tutti.cluster import Cluster, Compute
from tutti.collectives import all_gather_json, recursive_doubling, run
from tutti.launch import init, launch
from tutti.launch.lab.lab import Lab
from tutti.plan.network import cluster_with, measure_network
from tutti.recipes import recipe
from tutti.simulation.runs.calibrate import batch_size_of
from tutti.simulation.runs.simulate import simulate
from tutti.transports.torch_store import torch_store
from tutti.world import World, world

_WARM_UP = 3
"""Steps that are not timed: they allocate, and FSDP2 initialises itself in the first."""


@dataclass(frozen=True)
class FSDPFidelity:
    """Step times and parameters of one model under FSDP2, in a lab and simulated."""

    model: str
    workers: int
    lab_s: dict[str, float]
    """Median seconds per step in the lab, by backend."""
    simulated_s: float
    same_bits: dict[str, bool]
    """Whether the final parameters in the lab are bit-identical to the simulated ones, by backend."""

    @property
    def error(self) -> float:
        """Relative error of the simulated step time."""
        return self.simulated_s / self.lab_s["tutti"] - 1

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and derived numbers as JSON types."""
        return {**vars(self), "error": self.error}


def compare(model: str, lab: Lab, steps: int) -> FSDPFidelity:
    """Train under FSDP2 in a lab, on Gloo and on Tutti, and in virtual time.

    The time that a step of DDP takes in the lab beyond its simulated time is added to every simulated step. It is the
    cost of waking threads and of cores that compute and communicate.
    """
    by_rank = launch(_in_lab, model, steps, on=lab)
    measured, workers = by_rank[0], len(by_rank)
    compute = Compute(flops=measured["flops"], step_s=measured["step_s"])
    cluster = cluster_with(measured["network"], "calibrated", compute=compute)
    # DDP is the reference, not FSDP2: an error of FSDP2's own simulation must stay visible.
    unexplained_s = measured["reference_s"] - _simulated(model, "DDP", steps, workers, cluster)[0]
    charged = replace(compute, step_s=measured["step_s"] + max(0.0, unexplained_s))
    step_s, digest = _simulated(model, "FSDP2", steps, workers, replace(cluster, compute=charged))
    same_bits = {backend: measured["digests"][backend] == digest for backend in BACKENDS}
    return FSDPFidelity(model, workers, measured["seconds"], step_s, same_bits)


def _simulated(model: str, wrapper: str, steps: int, workers: int, cluster: Cluster) -> tuple[float, str]:
    """Return the slowest rank's seconds per step in virtual time, and the digest of the parameters."""
    results = simulate(train_steps, model, wrapper, steps, workers=workers, cluster=cluster).results
    return max(seconds for seconds, _ in results), results[0][1]


def _in_lab(model: str, steps: int) -> dict[str, Any]:
    """Measure the computing speed while all ranks compute, and train on both backends, on one rank. Collective."""
    lab_world = init()
    store = torch_store(lab_world.transport.membership, "fidelity")  # type: ignore[attr-defined]
    measured: dict[str, Any] = {
        "network": measure_network(lab_world.transport),
        **_measure_computing(model, lab_world, store),
    }

    def trained(wrapper: str, backend: str) -> tuple[float, str]:
        # Groups are made one after the other in one store, so each has keys of its own.
        where = {
            "store": dist.PrefixStore(f"{wrapper}/{backend}", store),
            "rank": lab_world.rank,
            "world_size": lab_world.size,
        }
        rank_s, digest = train_steps(model, wrapper, steps, backend, where)
        return max(all_gather_json(rank_s, lab_world.transport)), digest

    fsdp = {backend: trained("FSDP2", backend) for backend in BACKENDS}
    measured["reference_s"] = trained("DDP", "tutti")[0]
    measured["seconds"] = {backend: seconds for backend, (seconds, _) in fsdp.items()}
    measured["digests"] = {backend: digest for backend, (_, digest) in fsdp.items()}
    return measured


def train_steps(
    model: str, wrapper: str, steps: int, backend: str = "tutti", where: dict[str, Any] | None = None
) -> tuple[float, str]:
    """Train a recipe under DDP or FSDP2 for some steps: the median seconds of one, and a digest of the parameters."""
    dist.init_process_group(backend, **(where or {}))
    rank, size = dist.get_rank(), dist.get_world_size()
    made = recipe(model)
    # The same parameters and samples in the lab and in virtual time, so that the digests can be compared.
    torch.manual_seed(0)
    wrapped = WRAPPERS[wrapper](made.model(), dist.group.WORLD)
    optimizer = made.optimizer(wrapped)
    batch_size = batch_size_of(model, size)
    x, y = (part[rank * batch_size : (rank + 1) * batch_size] for part in made.example(batch_size * size))
    # The transport's clock, which is virtual in a simulation: the same function runs in both.
    times = [world().transport.now()]
    for _ in range(_WARM_UP + steps):
        made.loss(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(world().transport.now())
    # Collective under FSDP2, so all ranks do it, and before the group is destroyed.
    parameters = b"".join(_full_tensor(p).detach().numpy().tobytes() for p in wrapped.parameters())
    digest = hashlib.sha256(parameters).hexdigest()
    dist.destroy_process_group()
    return statistics.median(later - earlier for earlier, later in list(pairwise(times))[_WARM_UP:]), digest


def _full_tensor(parameter: Any) -> torch.Tensor:
    """Gather a parameter of which this rank may have only a shard. Collective."""
    full: torch.Tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return full


def _measure_computing(model: str, lab_world: World, store: dist.Store) -> dict[str, float]:
    """Measure FLOP/s and the seconds of an optimiser's step under FSDP2, of each rank by itself, all at once."""
    # A group of one: FSDP2's own work is timed, without communication. All ranks run at once, as they do in training.
    where: dict[str, Any] = {"store": dist.PrefixStore(f"alone{lab_world.rank}", store), "rank": 0, "world_size": 1}
    dist.init_process_group("tutti", **where)
    made = recipe(model)
    sharded = shard(made.model(), dist.group.WORLD)
    optimizer = made.optimizer(sharded)
    x, y = made.example(batch_size_of(model, lab_world.size))
    rows = []
    for _ in range(_WARM_UP + 15):
        run(recursive_doubling.steps(torch.zeros(1), lab_world.transport))  # A barrier: all start together.
        times = [time.perf_counter()]
        made.loss(sharded(x), y).backward()
        times.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
        rows.append([later - earlier for earlier, later in pairwise(times)])
    # Counted in a pass of its own, because counting slows it down.
    with FlopCounterMode(display=False) as counter:
        made.loss(sharded(x), y).backward()
    dist.destroy_process_group()
    computing_s, step_s = (statistics.median(column) for column in zip(*rows[_WARM_UP:], strict=True))
    # All ranks wait for the slowest, so the simulated ranks all compute as slowly.
    by_rank = all_gather_json([computing_s, step_s], lab_world.transport)
    slowest_s, step_s = (max(column) for column in zip(*by_rank, strict=True))
    return {"flops": counter.get_total_flops() / slowest_s, "step_s": step_s}
