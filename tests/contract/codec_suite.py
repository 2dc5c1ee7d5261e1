"""The codecs that the suites run over: every registered one, with several options."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tutti.codecs import (
    CODECS,
    Chain,
    Codec,
    ErrorFeedback,
    LowRank,
    OneBit,
    Packet,
    Quantize,
    State,
    Threshold,
    TopK,
    print_codec,
)

_MORE = [
    Quantize(8), Quantize(4), Quantize(2), Chain(TopK(0.1), Quantize(8)),
    Chain(TopK(0.3), OneBit()), Threshold(0.5), TopK(0.05, warmup_steps=5), LowRank(2),
]  # fmt: skip

BARE: dict[str, Codec] = {print_codec(codec): codec for codec in [*(make() for make in CODECS.values()), *_MORE]}
WITH_FEEDBACK = {print_codec(ErrorFeedback(codec)): ErrorFeedback(codec) for codec in BARE.values()}
EVERY: dict[str, Codec] = {**BARE, **WITH_FEEDBACK}

every_codec = pytest.mark.parametrize("codec", EVERY.values(), ids=EVERY)
every_bare = pytest.mark.parametrize("codec", BARE.values(), ids=BARE)
every_with_feedback = pytest.mark.parametrize("codec", WITH_FEEDBACK.values(), ids=WITH_FEEDBACK)

SHAPES = [(), (1,), (7,), (1000,), (3, 5), (64, 3, 3, 3), (17, 300), (2, 5000), (0,), (0, 4)]


def gradient(shape: tuple[int, ...], seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encoded(codec: Codec, tensor: Tensor, state: State | None = None) -> tuple[Packet, State]:
    """Return the packet and the next state, without changing the state that is passed in."""
    return codec.encode(tensor, copy.deepcopy(state) if state is not None else codec.start(tensor.numel()))


def decoded(codec: Codec, packet: Packet, shape: tuple[int, ...]) -> Tensor:
    out = torch.full(shape, math.nan)  # Whatever is not written shows.
    codec.decode(packet, out)
    return out


def said(codec: Codec, tensor: Tensor, state: State | None = None) -> tuple[Tensor, State]:
    """Return `tensor` encoded and decoded, and the next state."""
    packet, state = encoded(codec, tensor, state)
    return decoded(codec, packet, tuple(tensor.shape)), state


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors are equal to the last bit, NaN and the sign of zero included."""
    alike: Any = (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()
