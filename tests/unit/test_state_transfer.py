"""The state of a job, sent by several ranks to several others: ranks are threads."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import run_ok, run_threads
from tutti.errors import RankLost
from tutti.job.elastic import transfer
from tutti.job.elastic.transfer import SharedState, receive_state, send_state
from tutti.world import World


def state(own: int) -> SharedState:
    """As a rank has it: with small and large tensors, of several types and memory orders, and without elements."""
    drawn = torch.Generator().manual_seed(1)
    large = torch.randn(300, 70, generator=drawn, dtype=torch.float64)
    equal = {
        "model": {
            "weight": large,
            "turned": large.t(),
            "half": torch.randn(5, generator=drawn).to(torch.bfloat16),
            "images": torch.randn(2, 3, 64, 64, generator=drawn).to(memory_format=torch.channels_last),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(7.0), "moment": torch.ones(40_000)}}, "groups": [{"lr": 0.1}]},
    }
    mine = {"rank": own, "mask": torch.tensor([True, False]), "empty": torch.empty(0, 3), "large": large + own}
    return SharedState(equal, mine)


def assert_equal(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(got, wanted)
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_equal(got[key], value)
    elif isinstance(wanted, list):
        for ours, theirs in zip(got, wanted, strict=True):
            assert_equal(ours, theirs)
    else:
        assert got == wanted


def take_part(world: World, sources: list[int], takers: list[int]) -> SharedState | None:
    if world.rank in takers:
        return receive_state(world.transport, sources)
    if world.rank in sources:
        send_state(state(world.rank), world.transport, sources, takers)
    return None


@pytest.mark.parametrize("transport", ["sockets", "shared_memory"])
@pytest.mark.parametrize(
    ("sources", "takers"), [([0], [1]), ([1, 0, 3], [2]), ([3], [0, 1, 2]), ([2, 0], [1, 3])], ids=str
)
def test_takers_get_the_state_of_the_first_source(
    sources: list[int], takers: list[int], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_MESSAGE_BYTES", 10_000)
    results = run_ok(take_part, sources, takers, size=4, transport=transport)
    for rank, received in enumerate(results):
        assert (received is not None) == (rank in takers)
        if received is not None:
            wanted = state(sources[0])
            assert_equal(received.equal, wanted.equal)
            assert_equal(received.own, wanted.own)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300_000), max_size=6),
    num_sources=st.integers(1, 5),
    message=st.integers(1_000, 200_000),
)
def test_the_parts_of_all_sources_are_the_whole(sizes: list[int], num_sources: int, message: int) -> None:
    value = {str(number): torch.arange(size, dtype=torch.int32) for number, size in enumerate(sizes)}
    packed = transfer._Packed(value)
    other = transfer._Packed.empty(packed.head)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "_MESSAGE_BYTES", message)
        for number in range(num_sources):
            sent, received = (list(each.parts(number, num_sources)) for each in (packed, other))
            assert [part.numel() for part in sent] == [part.numel() for part in received]
            assert all(0 < part.numel() <= message for part in sent)
            for ours, theirs in zip(sent, received, strict=True):
                theirs.copy_(ours)
    assert_equal(other.unpacked(), value)


def lose_a_source(world: World, sources: list[int], takers: list[int], lost: int) -> None:
    if world.rank == lost:
        world.close()
    else:
        take_part(world, sources, takers)


@pytest.mark.parametrize("lost", [0, 1])
def test_the_loss_of_any_source_ends_the_wait_of_takers(lost: int) -> None:
    results = run_threads(lose_a_source, [0, 1], [2], lost, size=3, transport="sockets")
    assert isinstance(results[2], RankLost)
