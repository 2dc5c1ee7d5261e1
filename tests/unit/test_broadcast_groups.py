"""Broadcast of many tensors: small ones travel together, and nothing large is copied to join them."""

import sys

import pytest
import torch
from torch import Tensor

from support import run_ok
from tutti.collectives import broadcast_all
from tutti.collectives.broadcast import groups
from tutti.world import World


def test_what_is_large_is_joined_with_nothing() -> None:
    sizes = [1, 40 * 2**20, 2, 20 * 2**20, 20 * 2**20, 3]
    tensors = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    found = [[tensor.numel() for tensor in group] for group in groups(tensors)]
    assert found == [[40 * 2**20], [1, 2, 20 * 2**20, 20 * 2**20], [3]]


def test_all_tensors_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    # By its name: in the package it is that of a function too.
    monkeypatch.setattr(sys.modules["tutti.collectives.broadcast"], "_CHUNK_BYTES", 64)

    def received(world: World) -> list[Tensor]:
        tensors = [torch.full((size,), float(world.rank + size)) for size in (3, 100, 1, 20, 0, 5)]
        broadcast_all(tensors, world.transport)
        return tensors

    for tensors in run_ok(received, size=3, transport="sockets"):
        assert [set(tensor.tolist()) for tensor in tensors] == [{3.0}, {100.0}, {1.0}, {20.0}, set(), {5.0}]
