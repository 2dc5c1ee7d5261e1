"""Models split over ranks, and torch's own programs on the backend, with tensors on a GPU."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import tutti
from tutti.recipes.models import mlp

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

MESHES = (tutti.Mesh(tensor=2), tutti.Mesh(pipe=2), tutti.Mesh(data=2))
"""Two ranks each."""


def _problem(device: str) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x, y = mlp(8, 17, 6, 6, 5).double(), *(torch.randn(16, each, dtype=torch.float64) for each in (8, 5))
    return model.to(device), x.to(device), y.to(device)


def _alone() -> list[Tensor]:
    model, x, y = _problem("cpu")
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _on_meshes() -> list[list[Tensor]]:
    tutti.init()
    found = []
    for mesh in MESHES:
        model, x, y = _problem("cuda")
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
        with tutti.distribute(model, optimizer, mesh=mesh, example=x[: len(x) // mesh.data]) as job:
            x, y = (each.chunk(job.world.size)[job.world.rank] for each in (x, y))
            pipeline = job.pipeline(F.mse_loss) if mesh.pipe > 1 else None
            for _ in range(5):
                optimizer.zero_grad()
                if pipeline is None:
                    F.mse_loss(model(x), y).backward()
                else:
                    pipeline(x, y)
                optimizer.step()
        found.append([parameter.detach().cpu() for parameter in model.parameters()])
    return found


def test_a_split_model_on_a_gpu_ends_where_one_process_does() -> None:
    for everyones in tutti.launch(_on_meshes, workers=2):
        for mesh, parameters in zip(MESHES, everyones, strict=True):
            for got, want in zip(parameters, _alone(), strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=1e-10, msg=lambda said, m=mesh: f"{m}: {said}")


def _by_ddp(backend: str) -> list[Tensor]:
    dist.init_process_group(backend)
    rank = dist.get_rank()
    model, x, y = _problem("cuda")
    ddp = DistributedDataParallel(model)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        F.mse_loss(ddp(x.chunk(2)[rank]), y.chunk(2)[rank]).backward()
        optimizer.step()
    everyones = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(everyones, x + rank)
    dist.destroy_process_group()
    return [each.detach().cpu() for each in (*model.parameters(), *everyones)]


def test_torchs_own_programs_on_a_gpu() -> None:
    for found, wanted in zip(
        *(tutti.launch(_by_ddp, backend, workers=2) for backend in ("tutti", "gloo")), strict=True
    ):
        for got, want in zip(found, wanted, strict=True):
            assert torch.equal(got, want)
