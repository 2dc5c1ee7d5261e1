"""Meshes of real processes."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

import tutti


def _train() -> tuple[list[float], list[list[float]], list[int]]:
    """Losses and last parameters of a model with dropout in pieces, then of it in stages; the world's sizes, drops."""
    world = tutti.init()
    sizes = [tutti.world().size]
    x = torch.linspace(-1, 1, 8 * 8).view(8, 8)
    losses, parameters, dropped = [], [], list[int]()
    for mesh in (tutti.Mesh(tensor=2), tutti.Mesh(pipe=2)):
        torch.manual_seed(world.rank)  # As a script may do that wants every rank to draw its own.
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 8))
        optimizer = SGD(model.parameters(), lr=0.1)
        job = tutti.distribute(model, optimizer, mesh=mesh, example=x)
        sizes.append(tutti.world().size)
        pipeline = job.pipeline(F.mse_loss)
        model[3].register_forward_hook(lambda *about: dropped.append(int((about[2] == 0).sum())))
        for _ in range(3):
            optimizer.zero_grad()
            loss = pipeline(x, x)
            optimizer.step()
        job.finish()
        sizes.append(tutti.world().size)
        losses.append(loss.item())
        parameters.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist())
    assert len(dropped) > 2
    return losses, parameters, [*sizes, *dropped[:2]]


def test_ranks_agree_on_what_they_share() -> None:
    """Dropout too: what ranks along `tensor` drop is the same, or whole layers would drift apart."""
    first, second = tutti.launch(_train, workers=2)
    assert first == second
    assert first[2][:5] == [2, 1, 2, 1, 2]
