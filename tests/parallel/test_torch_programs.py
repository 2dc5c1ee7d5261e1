"""DDP, FSDP2, DTensor and pipelining, unchanged, on Gloo and on Tutti: in processes and in virtual time."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tutti
from torch_programs import PROGRAMS, run_programs
from tutti.transports.torch_store import torch_store

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # CharGPT ends in a view, which nobody changes.

Bits = dict[str, list[str]]


def everything() -> dict[str, Any]:
    """All programs on four ranks and on two, on both backends; and then a rank is killed."""
    world = tutti.init()
    world.tolerate_loss(True)
    store = torch_store(world.transport.membership, "programs")  # type: ignore[attr-defined]
    found: dict[str, Any] = {}
    for backend in ("gloo", "tutti"):
        four = dist.PrefixStore(f"four {backend}", store)
        found[f"{backend} 4"] = run_programs(backend, store=four, rank=world.rank, world_size=4)
        pair, rank = divmod(world.rank, 2)
        two = dist.PrefixStore(f"two {pair} {backend}", store)
        found[f"{backend} 2"] = run_programs(backend, store=two, rank=rank, world_size=2)
    found["lost"] = _lose_one()
    return found


def _lose_one() -> tuple[str, str, float]:
    """What the others are told in the backward pass of DDP and in a collective, and how long after."""
    dist.init_process_group("tutti")  # As the launcher says.
    rank, tensor = dist.get_rank(), torch.ones(3)
    dist.all_reduce(tensor)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).mean().backward()
    dist.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    start_s, told = time.monotonic(), []
    for call in (lambda: model(torch.ones(2, 4)).mean().backward(), lambda: dist.all_reduce(tensor)):
        try:
            call()
        except RuntimeError as error:
            told.append(f"{type(error).__name__}: {error}")
    in_backward, in_a_collective = told
    return in_backward, in_a_collective, time.monotonic() - start_s


@pytest.fixture(scope="module")
def lived() -> list[dict[str, Any]]:
    return tutti.launch(everything, workers=4)


@pytest.mark.parametrize("program", [each.__name__ for each in PROGRAMS])
@pytest.mark.parametrize("size", [2, 4])
def test_same_bits_on_tutti_as_on_gloo(lived: list[dict[str, Any]], program: str, size: int) -> None:
    for found in lived[:3]:
        assert found[f"tutti {size}"][program] == found[f"gloo {size}"][program]


@pytest.mark.parametrize("program", [each.__name__ for each in PROGRAMS])
def test_same_bits_in_virtual_time(lived: list[dict[str, Any]], simulated: list[Bits], program: str) -> None:
    for rank in range(3):
        assert simulated[rank][program] == lived[rank]["gloo 4"][program]


@pytest.fixture(scope="module")
def simulated() -> list[Bits]:
    cluster = tutti.Cluster(link=tutti.Link("1gbit", "50us"))
    return tutti.simulate(run_programs, "tutti", workers=4, cluster=cluster).results


def test_a_killed_rank_is_named_to_the_others_at_once(lived: list[dict[str, Any]]) -> None:
    assert lived[3] is None
    for found in lived[:3]:
        in_backward, said, seconds = found["lost"]
        assert "rank 3 is gone" in in_backward
        assert said.startswith("RankLost: rank ")
        assert "rank 3 is gone" in said
        assert seconds < 10
