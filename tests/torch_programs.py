"""Plain programs of torch.distributed: each trains for a few steps and returns the bits that came of it."""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tutti.recipes import recipe


def bits(tensors: Iterable[Tensor]) -> list[str]:
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in tensors]
    return [hashlib.sha256(each.detach().contiguous().numpy().tobytes()).hexdigest()[:16] for each in whole]


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 64), nn.ReLU(), nn.Linear(64, 33), nn.ReLU(), nn.Linear(33, 8))


def _train(model: nn.Module, alike: bool = False) -> list[str]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        torch.manual_seed(10 * step + (0 if alike else dist.get_rank()))
        model(torch.randn(8, 33)).square().mean().backward()
        if not alike:  # torch cannot clip gradients of which some only are split.
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return bits(model.parameters())


def ddp() -> list[str]:
    return _train(DistributedDataParallel(_mlp(), bucket_cap_mb=0.005))


def fsdp() -> list[str]:
    model = _mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return _train(model)


def tensor_parallel() -> list[str]:
    model = _mlp()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return _train(model, alike=True)


def pipeline() -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    stage = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, size, torch.device("cpu")), n_microbatches=4, loss_fn=nn.functional.mse_loss
    )
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    torch.manual_seed(100)
    x, target = torch.randn(8, 16), torch.randn(8, 16)
    for _ in range(3):
        schedule.step(*([x] if rank == 0 else []), **({"target": target} if rank == size - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
    return bits(stage.parameters())


def char_gpt() -> list[str]:
    """FSDP2 of a transformer, whose blocks are gathered one at a time."""
    made = recipe("char-gpt")
    torch.manual_seed(0)
    model = made.model()
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    optimizer = made.optimizer(model)
    x, y = (part[dist.get_rank() :: dist.get_world_size()] for part in made.example(8))
    for _ in range(2):
        made.loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return bits(model.parameters())


PROGRAMS = (ddp, fsdp, tensor_parallel, pipeline, char_gpt)


def run_programs(backend: str, **where: Any) -> dict[str, list[str]]:
    """All of them, one after the other, in one world."""
    torch.set_num_threads(1)
    dist.init_process_group(backend, **where)
    try:
        return {program.__name__: program() for program in PROGRAMS}
    finally:
        dist.destroy_process_group()
