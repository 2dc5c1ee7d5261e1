"""torch.distributed.checkpoint on the backend "tutti": FSDP2 models saved on two ranks, loaded on three and on one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import tutti
from torch_programs import bits
from tutti.collectives import all_gather_json
from tutti.transports.torch_store import torch_store
from tutti.world import World

NUM_RANKS, NUM_SAVING = 3, 2


class Training:
    """A sharded model, its optimiser, and their states as torch.distributed.checkpoint takes them."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(7, 10), nn.ReLU(), nn.Linear(10, 5))  # Divided unevenly by 2 and by 3.
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self) -> None:
        torch.manual_seed(dist.get_rank())
        self.model(torch.randn(4, 7)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def bits(self) -> list[str]:
        """Of the whole model and of Adam's state."""
        states = [self.optimizer.state[each][key] for each in self.model.parameters() for key in ("exp_avg", "step")]
        return bits([*self.model.parameters(), *states])


@contextmanager
def group(world: World, store: dist.Store, name: str, size: int) -> Iterator[bool]:
    """A default group of the first `size` ranks; whether this one is among them. All others wait for them."""
    if world.rank < size:
        prefixed = dist.PrefixStore(name, store)
        dist.init_process_group("tutti", store=prefixed, rank=world.rank, world_size=size)
    try:
        yield world.rank < size
    finally:
        if world.rank < size:
            dist.destroy_process_group()
        all_gather_json(0, world.transport)


def save_and_load(folder: Path) -> dict[str, list[str]]:
    """What two ranks saved, at once and in the background, and what three ranks and one rank loaded."""
    torch.set_num_threads(1)
    world, found = tutti.init(), {}
    store = torch_store(world.transport.membership, "checkpoints")  # type: ignore[attr-defined]
    with group(world, store, "save", NUM_SAVING) as here:
        if here:
            training = Training(seed=0)
            training.step()
            found["saved"] = training.bits()
            dcp.save(training.state(), checkpoint_id=folder / "plain")
            training.step()
            found["saved in the background"] = training.bits()
            # A group of its own: its collectives run in another thread than those of the steps.
            pending: Any = dcp.async_save(
                training.state(), checkpoint_id=folder / "background", process_group=dist.new_group()
            )
            training.step()
            pending.result()
            assert training.bits() != found["saved in the background"]
    for size in (NUM_RANKS, 1):
        with group(world, store, f"load {size}", size) as here:
            if here:
                for name in ("plain", "background"):
                    training = Training(seed=1)
                    training.load(folder / name)
                    found[f"{name} on {size}"] = training.bits()
                    training.step()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    return tutti.launch(save_and_load, tmp_path_factory.mktemp("checkpoints"), workers=NUM_RANKS)


@pytest.mark.parametrize("size", [NUM_RANKS, 1])
@pytest.mark.parametrize(("name", "saved"), [("plain", "saved"), ("background", "saved in the background")])
def test_other_numbers_of_ranks_load_the_same_bits(
    found: list[dict[str, list[str]]], name: str, saved: str, size: int
) -> None:
    for rank in range(size):
        assert found[rank][f"{name} on {size}"] == found[0][saved]


def test_what_was_saved_differs(found: list[dict[str, list[str]]]) -> None:
    assert found[0]["saved"] == found[1]["saved"]
    assert found[0]["saved"] != found[0]["saved in the background"]
