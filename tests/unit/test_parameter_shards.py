"""Buckets cut into shards for servers, and optimisers that step shards as they would the whole."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn, optim

from tutti.codecs.scale_groups import MAX_GROUP_NUMEL
from tutti.errors import ConfigError
from tutti.replica import Bucket
from tutti.replica.buckets import Memory, Slot, cut_buckets, kind_of
from tutti.strategies.compatibility import refusals
from tutti.strategies.parameter_server.ledger import Update
from tutti.strategies.parameter_server.optimizer_options import OptimizerOptions
from tutti.strategies.parameter_server.shard_optimizer import (
    ELEMENTWISE,
    ShardOptimizer,
    merge_segment_states,
    needs_whole_parameters,
    reject_closure,
)
from tutti.strategies.parameter_server.shards import ParameterShard, cut_into_shards
from tutti.strategies.parameter_server.strategy import ParameterServer
from tutti.transports import SingleRankTransport

shapes = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 9000)),
        st.tuples(st.integers(1, 70), st.integers(1, 90)),
        st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3)),
        st.just(()),
        st.just((0,)),
    ),
    min_size=1,
    max_size=8,
)


def buckets_of(
    tensors: list[Tensor], statistics: list[Tensor] | None = None, max_bytes: int = 2**22, exact_below: int = 0
) -> list[Bucket]:
    own = [Slot(f"p{number}", tensor) for number, tensor in enumerate(tensors)]
    kept = [Slot(f"s{number}", tensor) for number, tensor in enumerate(statistics or [])]
    kinds: dict[Any, list[Slot]] = {}
    for slot in [*own, *kept]:
        kinds.setdefault(kind_of(slot.tensor), []).append(slot)
    memories = {kind: Memory(slots, SingleRankTransport(), False, exact_below) for kind, slots in kinds.items()}
    return cut_buckets((own, kept), memories, max_bytes)


def check_tiles(buckets: list[Bucket], shards: list[ParameterShard], num_servers: int) -> None:
    """Every element is in one shard, once, where the shard says it is."""
    assert [shard.index for shard in shards] == list(range(len(shards)))
    assert all(0 <= shard.server < num_servers for shard in shards)
    for bucket in buckets:
        mine = [shard for shard in shards if shard.bucket_index == bucket.index]
        times = np.zeros(bucket.flat.numel(), int)
        elements = [np.zeros(slot.tensor.numel(), int) for slot in bucket.slots]
        for shard in mine:
            assert shard.numel > 0
            times[shard.bucket_range] += 1
            for segment in shard.segments:
                elements[segment.slot_index][segment.start : segment.stop] += 1
                assert bucket.starts[segment.slot_index] + segment.start == shard.bucket_range.start + segment.offset
                assert segment.is_whole == (
                    segment.stop - segment.start == bucket.slots[segment.slot_index].tensor.numel()
                )
        assert (times[: len(times) - len(bucket.slots)] == 1).all()
        assert not times[len(times) - len(bucket.slots) :].any(), "flags travel in headers"
        assert all((each == 1).all() for each in elements)


@given(
    shapes=shapes,
    statistics=st.lists(st.tuples(st.integers(1, 300)), max_size=2),
    num_servers=st.integers(1, 9),
    whole=st.booleans(),
    compressed=st.booleans(),
    max_bytes=st.sampled_from([500, 20_000, 2**22]),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), min_size=8, max_size=8),
)
def test_shards_tile_every_bucket(
    shapes: list[tuple[int, ...]],
    statistics: list[tuple[int, ...]],
    num_servers: int,
    whole: bool,
    compressed: bool,
    max_bytes: int,
    dtypes: list[torch.dtype],
) -> None:
    tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
    kept = [torch.zeros(shape) for shape in statistics]
    buckets = buckets_of(tensors, kept, max_bytes, exact_below=100 if compressed else 0)
    shards = cut_into_shards(buckets, num_servers, whole, compressed)
    check_tiles(buckets, shards, num_servers)
    for shard in shards:
        bucket = buckets[shard.bucket_index]
        lossy = compressed and shard.bucket_range.stop <= bucket.values.numel()
        assert (shard.groups is not None) == lossy
        assert shard.is_trained == bucket.of_parameters
        assert shard.num_bytes == shard.numel * bucket.flat.itemsize
        if shard.groups is not None:
            check_groups(shard)
        if whole:
            assert all(segment.is_whole for segment in shard.segments)
    loads = [sum(shard.num_bytes for shard in shards if shard.server == server) for server in range(num_servers)]
    assert max(loads) - min(loads) <= max((shard.num_bytes for shard in shards), default=0)


def check_groups(shard: ParameterShard) -> None:
    """Scale groups cover what belongs to parameters, and nothing between them."""
    assert shard.groups is not None
    assert shard.groups.numel == shard.numel
    covered, owned = np.zeros(shard.numel, int), np.zeros(shard.numel, int)
    for start, stop in zip(shard.groups.starts, shard.groups.stops, strict=True):
        covered[start:stop] += 1
    for segment in shard.segments:
        owned[segment.offset : segment.offset + segment.stop - segment.start] += 1
    assert (covered == owned).all()


@given(shapes=shapes, num_servers=st.integers(1, 9))
def test_elementwise_shards_have_equal_sizes_up_to_a_scale_group(
    shapes: list[tuple[int, ...]], num_servers: int
) -> None:
    (bucket,) = buckets_of([torch.zeros(shape) for shape in shapes])
    parts = [
        shard.numel
        for shard in cut_into_shards([bucket], num_servers, False, False)
        if shard.bucket_range.start < len(bucket.values)
    ]
    num_parts = min(num_servers, max(1, bucket.values.numel() // 1024))
    for numel in parts:
        assert abs(numel - bucket.values.numel() / num_parts) <= MAX_GROUP_NUMEL + 16


def test_large_parameters_are_spread_evenly() -> None:
    (bucket,) = buckets_of([torch.zeros(1000, 1000), torch.zeros(1000), torch.zeros(10, 1000), torch.zeros(10)])
    for num_servers in (2, 3, 7):
        shards = cut_into_shards([bucket], num_servers, False, False)
        assert sorted(shard.server for shard in shards) == list(range(num_servers))
        for shard in shards:
            assert abs(shard.numel - bucket.values.numel() / num_servers) <= 1000 + 16, "rows are of 1000"


def test_parameters_that_stay_whole_are_spread_as_well_as_they_can_be() -> None:
    (bucket,) = buckets_of([torch.zeros(3000), torch.zeros(100), torch.zeros(2900), torch.zeros(6000)])
    shards = cut_into_shards([bucket], 2, True, False)
    assert sorted(len(shard.segments) for shard in shards) == [1, 3]
    assert sorted(shard.server for shard in shards) == [0, 1]


def test_a_tiny_model_is_one_shard() -> None:
    (bucket,) = buckets_of([torch.zeros(3), torch.zeros(2, 2)])
    (shard,) = cut_into_shards([bucket], 8, False, False)
    assert [segment.slot_index for segment in shard.segments] == [0, 1]


# Options


def parameter() -> Tensor:
    return nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.SGD([parameter()], lr=0.1, momentum=0.9, nesterov=True),
        optim.AdamW([{"params": [parameter()]}, {"params": [parameter()], "lr": 3e-4, "betas": (0.5, 0.6)}], lr=0.01),
        optim.Rprop([parameter()], etas=(0.4, 1.3)),
        optim.Adam([parameter()], amsgrad=True, maximize=True),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_options_round_trip(optimizer: optim.Optimizer) -> None:
    options = OptimizerOptions(optimizer)
    wanted = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    blank = copy.deepcopy(wanted)
    for group in blank:
        for key, value in group.items():
            if isinstance(value, bool | int | float):
                group[key] = type(value)(0)
            elif isinstance(value, tuple):
                group[key] = tuple(type(each)(0) for each in value)
    options.write(blank, options.read())
    assert blank == wanted
    for ours, theirs in zip(blank, wanted, strict=True):
        assert {key: type(value) for key, value in ours.items()} == {key: type(value) for key, value in theirs.items()}
    assert len(options) == len(options.read())


def test_options_follow_a_scheduler() -> None:
    optimizer = optim.SGD([parameter()], lr=0.1, momentum=0.5)
    options, groups = OptimizerOptions(optimizer), copy.deepcopy(optimizer.param_groups)
    optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.param_groups[0]["lr"] = 0.025
    optimizer.param_groups[0]["momentum"] = 0.75
    options.write(groups, options.read())
    assert (groups[0]["lr"], groups[0]["momentum"]) == (0.025, 0.75)


def test_a_learning_rate_that_is_a_tensor() -> None:
    optimizer = optim.Adam([parameter()], lr=torch.tensor(0.25))
    options, groups = OptimizerOptions(optimizer), copy.deepcopy(optimizer.param_groups)
    optimizer.param_groups[0]["lr"].fill_(0.125)
    options.write(groups, options.read())
    assert float(groups[0]["lr"]) == 0.125


def test_lbfgs_and_closures_are_refused() -> None:
    model = torch.nn.Linear(2, 2)
    (why,) = refusals(ParameterServer().support, model, optim.LBFGS(model.parameters()))
    assert "LBFGS" in why
    assert "Use SGD" in why
    with pytest.raises(ConfigError, match=r"closure.*Call backward yourself"):
        reject_closure(optim.SGD([parameter()]), (None,), {"closure": lambda: 0.0})
    with pytest.raises(ConfigError, match=r"closure.*Call backward yourself"):
        reject_closure(optim.SGD([parameter()]), (None, lambda: 0.0), {})
    reject_closure(optim.SGD([parameter()]), (None,), {})
    reject_closure(optim.SGD([parameter()]), (None, None), {"closure": None})


# Optimiser steps


class Custom(optim.SGD):
    """Nobody knows what it does to whole parameters."""


@pytest.mark.parametrize("kind", [*ELEMENTWISE, Custom], ids=lambda kind: kind.__name__)
def test_shards_step_as_the_whole_does(kind: type[optim.Optimizer]) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for shape in ((70, 40), (2000,), (3, 3), ())
    ]
    tensors.append(nn.Parameter(torch.randn(4, 5, 6, 7, generator=generator).double().permute(0, 2, 3, 1)))
    reference = [nn.Parameter(each.detach().clone()) for each in tensors]
    one = kind([{"params": reference[:2]}, {"params": reference[2:], "lr": 0.02}], lr=0.1)  # type: ignore[call-arg]
    optimizer = kind([{"params": tensors[:2]}, {"params": tensors[2:], "lr": 0.02}], lr=0.1)  # type: ignore[call-arg]
    assert needs_whole_parameters(optimizer) == (kind is Custom)
    (bucket,) = buckets_of(list(tensors))
    shards = cut_into_shards([bucket], 4, needs_whole_parameters(optimizer), False)
    assert len(shards) > 1
    optimizers = [
        ShardOptimizer(shard, bucket, optimizer, bucket.image()[shard.bucket_range].clone()) for shard in shards
    ]
    for _ in range(4):
        flat = torch.zeros(bucket.flat.numel(), dtype=torch.float64)
        for view, mine, copied in zip(bucket.views(flat), bucket.slots, reference, strict=True):
            copied.grad = torch.randn(mine.tensor.shape, generator=generator, dtype=torch.float64)
            view.copy_(copied.grad)
        one.step()
        for shard_optimizer in optimizers:
            own = Update(
                0,
                0,
                1.0,
                0.0,
                None,
                np.ones(len(shard_optimizer.shard.segments), bool),
                flat[shard_optimizer.shard.bucket_range],
            )
            shard_optimizer.step(shard_optimizer.combine([own], [1.0]), OptimizerOptions(optimizer).read())
    found = bucket.image()
    for shard_optimizer in optimizers:
        found[shard_optimizer.shard.bucket_range] = shard_optimizer.values
    for view, copied in zip(bucket.views(found), reference, strict=True):
        torch.testing.assert_close(view, copied.detach(), rtol=1e-12, atol=1e-14)
    states = merge_segment_states(
        [each for shard_optimizer in optimizers for each in shard_optimizer.copy_states()],
        {s.name: s for s in bucket.slots},
    )
    for slot, copied in zip(bucket.slots, reference, strict=True):
        assert states[slot.name].keys() == one.state[copied].keys()
        for key, value in one.state[copied].items():
            torch.testing.assert_close(states[slot.name][key], value, rtol=1e-12, atol=1e-14)
