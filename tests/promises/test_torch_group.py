"""`tutti.init(torch_distributed=True)`: code that calls torch.distributed works beside Tutti."""

from typing import Any

import torch
import torch.distributed as dist

import tutti


def use() -> dict[str, Any]:
    world = tutti.init(torch_distributed=True)
    assert tutti.init(torch_distributed=True) is world  # A second call changes nothing.
    total = torch.tensor([world.rank + 1.0])
    dist.all_reduce(total)
    model = torch.nn.Linear(2, 1)
    job = tutti.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    mean = job.reduce(world.rank)
    job.finish()
    found = {"size": dist.get_world_size(), "backend": dist.get_backend(), "total": total.item(), "mean": mean}
    world.close()
    assert not dist.is_initialized()
    return found


def test_torch_distributed_works_in_processes() -> None:
    expected = {"size": 2, "backend": "tutti", "total": 3.0, "mean": 0.5}
    assert tutti.launch(use, workers=2) == [expected, expected]


def test_torch_distributed_works_in_virtual_time() -> None:
    found = tutti.simulate(use, workers=3).results
    assert [each["total"] for each in found] == [6.0, 6.0, 6.0]


def keep_own() -> bool:
    dist.init_process_group("tutti")
    group = dist.group.WORLD
    world = tutti.init(torch_distributed=True)
    world.close()
    kept = dist.is_initialized() and dist.group.WORLD is group
    dist.destroy_process_group()
    return kept


def test_a_group_that_exists_is_left_alone() -> None:
    assert tutti.launch(keep_own, workers=2) == [True, True]


def test_alone() -> None:
    assert use() == {"size": 1, "backend": "tutti", "total": 1.0, "mean": 0.0}
