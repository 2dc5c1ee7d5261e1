"""Under mpirun: torch.distributed on Tutti over MPI, and then Tutti's own training, in the same processes."""

import runpy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tutti


def exchange(rank: int, size: int) -> None:
    """Collectives and messages, waited for and not, among all and among some."""
    tensor, everyones = torch.full((3,), float(rank)), [torch.empty(3) for _ in range(size)]
    summing = dist.all_reduce(tensor, async_op=True)
    assert summing is not None
    summing.wait()
    assert tensor.tolist() == [size * (size - 1) / 2] * 3
    dist.all_gather(everyones, torch.full((3,), float(rank)))
    assert [float(each[0]) for each in everyones] == list(range(size))
    came, left = torch.empty(1), (rank - 1) % size
    receiving = dist.irecv(came, left)
    assert receiving is not None
    doubled = receiving.get_future().then(lambda future: 2 * float(future.value()[0]))
    dist.send(torch.tensor([rank + 0.5]), (rank + 1) % size)
    assert doubled.wait() == 2 * left + 1
    pair = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        dist.broadcast(tensor.fill_(rank), size - 1, group=pair)
        assert tensor.tolist() == [size - 1.0] * 3


def train(rank: int, size: int) -> None:
    """DDP of a few steps; one process that sees all batches ends where it does."""
    batches = torch.randn(4, size, 8, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3)).double()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3)).double()
    if rank == 0:
        model.load_state_dict(alone.state_dict())
    for each, mine in ((alone, batches.flatten(1, 2)), (DistributedDataParallel(model), batches[:, rank])):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for batch in mine:
            each(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for got, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


world = tutti.init()
dist.init_process_group("tutti", store=dist.HashStore(), rank=world.rank, world_size=world.size)
exchange(world.rank, world.size)
train(world.rank, world.size)
dist.destroy_process_group()
runpy.run_path(str(Path(__file__).with_name("train_a_little.py")))
