"""Copies of nested values: what is stored of a copy is what would have been stored of the values themselves."""

from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tutti.checkpoint.copies import Containers, TensorCopies, layout_of, put_together
from tutti.checkpoint.index import STATE
from tutti.checkpoint.snapshots import EncodedSnapshot, Snapshot, TakenApart
from tutti.errors import CheckpointError
from tutti.parallel.shards import Shard, TensorShard


def nest() -> dict[str, Any]:
    shared = torch.arange(4.0)
    return {
        "tensors": [shared, (shared, torch.arange(6).view(2, 3).t()), nn.Parameter(torch.ones(2))],
        "complex": torch.tensor([1 + 2j]),
        "scalar": torch.tensor(True),
        "numbers": {1: 2.5, "lr": float("nan"), None: 2**70, False: b"b"},
        "kinds": [OrderedDict(a=1), defaultdict(int, b=2), Counter("c"), torch.float16, torch.Size([2])],
        "array": np.arange(3),
        "shard": TensorShard(torch.ones(2, 3), Shard(0, (4, 3), ((1, 2),))),
        "empty": [{}, [], (), torch.empty(0)],
    }


def stored(snapshot: EncodedSnapshot) -> tuple[Any, dict[str, Tensor]]:
    return snapshot.trees[STATE], snapshot.tensors[STATE]


def change(value: Any) -> None:
    """Change all that can be changed in place."""
    if isinstance(value, Tensor):
        value.data.zero_()
    elif isinstance(value, TensorShard):
        change(value.tensor)
    elif isinstance(value, np.ndarray):
        value[:] = 0
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            change(item)
        if isinstance(value, list):
            value.append("more")
        elif isinstance(value, dict):
            value["more"] = 1


@pytest.mark.parametrize("known", [False, True])
def test_a_copy_holds_what_the_values_were(known: bool) -> None:
    wanted = stored(EncodedSnapshot.of(Snapshot(steps=1, model={}, state=nest())))
    before = TakenApart(Snapshot(steps=0, model={}, state=nest())).copied().copies if known else None
    state = nest()
    copy = TakenApart(Snapshot(steps=1, model={}, state=state), before and before.layout).copied(before)
    change(state)
    tree, tensors = stored(copy)
    assert tree == wanted[0]
    assert tensors.keys() == wanted[1].keys()
    for name, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (wanted[1][name].dtype, wanted[1][name].shape)
        assert torch.equal(tensor, wanted[1][name])
        assert not tensor.requires_grad


def test_memory_is_used_again_whether_or_not_all_of_it_fits() -> None:
    first = TakenApart(Snapshot(steps=1, model={"a": torch.ones(2), "b": torch.ones(3)})).copied().copies
    assert first is not None
    places = [tensor.data_ptr() for tensor in first.tensors]
    same = TakenApart(Snapshot(steps=2, model={"a": torch.zeros(2), "b": torch.zeros(3)})).copied(first).copies
    assert same is not None
    assert [tensor.data_ptr() for tensor in same.tensors] == places
    other = TakenApart(Snapshot(steps=3, model={"a": torch.zeros(2), "b": torch.zeros(4)})).copied(same).copies
    assert other is not None
    assert [tensor.data_ptr() == place for tensor, place in zip(other.tensors, places, strict=True)] == [True, False]
    assert [tensor.sum() for tensor in other.tensors] == [0, 0]


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def endless_dict() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["again"] = value
    return value


REFUSED = {
    "type": lambda: int,
    "key": lambda: {(1, 2): 3},
    "subclass": lambda: type("Mine", (dict,), {})(a=1),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "meta": lambda: torch.empty(2, device="meta"),
    "objects": lambda: np.array([None]),
    "endless": endless,
    "endless dict": endless_dict,
}


@pytest.mark.parametrize("refused", REFUSED)
def test_values_that_cannot_be_stored_are_refused_before_the_copy(refused: str) -> None:
    # The copy before had a tensor in this place, or none.
    for before in (torch.eye(2), 1):
        first = TakenApart(Snapshot(steps=1, model={}, state={"x": before})).copied()
        assert first.copies is not None
        with pytest.raises(CheckpointError, match=r"^x"):
            TakenApart(Snapshot(steps=2, model={}, state={"x": REFUSED[refused]()}), first.copies.layout)


def test_values_can_be_added() -> None:
    state = {"job": {"exchange": {"own": torch.ones(1)}}}
    added = {("job", "exchange", "all"): [torch.zeros(2)], ("random",): 3}
    tree, tensors = stored(TakenApart(Snapshot(steps=1, model={}, state=state)).copied(added=lambda: added))
    assert tree["random"] == 3
    assert set(tree["job"]["exchange"]) == {"own", "all"}
    assert set(tensors) == {"job.exchange.own", "job.exchange.all.0"}
    assert state == {"job": {"exchange": {"own": torch.ones(1)}}}


def test_in_inference_mode() -> None:
    """Memory of a copy that was made there can be overwritten elsewhere."""
    model = {"weight": torch.ones(2)}
    with torch.inference_mode():
        first = TakenApart(Snapshot(steps=1, model=model)).copied()
    second = TakenApart(Snapshot(steps=2, model=model)).copied(first.copies)
    with torch.inference_mode():
        third = TakenApart(Snapshot(steps=2, model={"weight": torch.zeros(2)})).copied(second.copies)
    assert third.copies is not None
    assert third.copies.tensors[0].tolist() == [0, 0]


def test_tensors_are_listed_in_the_order_in_which_they_are_put_back() -> None:
    containers = Containers()
    value = [torch.tensor(0), {"a": torch.tensor(1), "b": (torch.tensor(2), {"c": torch.tensor(3)})}, torch.tensor(4)]
    apart = containers.take_apart(value)
    assert [int(tensor) for tensor in containers.tensors] == [0, 1, 2, 3, 4]
    copies = TensorCopies(containers.tensors, layout_of(containers.tensors), None)
    assert put_together(apart, iter(copies.tensors)) == value
