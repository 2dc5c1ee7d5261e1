"""The kernels for CUDA against those in plain torch, on fresh inputs every time."""

import pytest
import torch
from torch import Tensor

from tutti.codecs import Cast, Codec, OneBit, Quantize, kernels
from tutti.codecs.kernels import reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

CODECS = [OneBit(), *(Quantize(bits) for bits in (8, 4, 2)), *(Cast(to) for to in ("fp16", "bf16", "fp8"))]
SHAPES = [(1,), (5,), (13, 27), (40, 27), (9, 1024), (16, 1024), (3, 4096), (3, 5000)]


@pytest.fixture
def seed() -> int:
    return torch.seed() % 2**31  # Another every time; a failure says it.


@pytest.fixture(params=[False, True], ids=["finite", "odd"])
def odd(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[False, True], ids=["bare", "feedback"])
def feedback(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def inputs(shape: tuple[int, ...], feedback: bool, odd: bool, seed: int) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(shape, device="cuda", generator=generator)
    if odd:
        values.view(-1)[0] = torch.nan
        values.view(-1)[-1] = -torch.inf
    if not feedback:
        return values, None
    return values, 0.3 * torch.randn(values.numel(), device="cuda", generator=generator)


def said(codec: Codec, values: Tensor, residual: Tensor | None, add_to: Tensor) -> tuple[Tensor, Tensor]:
    """What the packet says, and `add_to` with that added."""
    packet, _ = codec.encode(values, codec.start(values.numel(), 3), residual=residual)
    out, added = torch.full_like(values, 7.0), add_to.clone()
    codec.decode(packet, out)
    codec.decode(packet, added, add=True)
    return out, added


def as_reference(codec: Codec, values: Tensor, residual: Tensor | None, add_to: Tensor) -> tuple[Tensor, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "for_device", lambda device: reference)
        return said(codec, values, residual, add_to)


def nearly_all_close(got: Tensor, wanted: Tensor) -> bool:
    """All but the few that lie on the edge between two codes, which may be rounded the other way."""
    apart = ~torch.isclose(got, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
    return int(apart.sum()) <= 1 + got.numel() // 1000


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_like_the_reference(codec: Codec, shape: tuple[int, ...], feedback: bool, odd: bool, seed: int) -> None:
    values, residual = inputs(shape, feedback, odd, seed)
    add_to = torch.randn_like(values)
    other = residual.clone() if residual is not None else None
    got, got_added = said(codec, values, residual, add_to)
    wanted, wanted_added = as_reference(codec, values, other, add_to)
    assert nearly_all_close(got, wanted), seed
    assert nearly_all_close(got_added, wanted_added), seed
    if residual is not None and other is not None:
        assert nearly_all_close(residual, other), seed


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_not_said_is_left(codec: Codec, shape: tuple[int, ...], seed: int) -> None:
    values, residual = inputs(shape, True, False, seed)
    assert residual is not None
    before = values.view(-1) + residual
    out, _ = said(codec, values, residual, values)
    torch.testing.assert_close(out.view(-1) + residual, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_tiny_values_are_decoded_or_kept(codec: Codec, seed: int) -> None:
    values, residual = inputs((4, 1024), True, False, seed)
    assert residual is not None
    values, residual = 1e-36 * values, 1e-36 * residual
    before = values.view(-1) + residual
    out, _ = said(codec, values, residual, values)
    torch.testing.assert_close(out.view(-1) + residual, before, rtol=1e-4, atol=1e-40)


@pytest.mark.parametrize("codec", [OneBit(), Quantize(8), Quantize(4), Quantize(2), Cast("fp8")], ids=str)
def test_odd_runs_leave_their_residual_and_no_other(codec: Codec, seed: int) -> None:
    values, residual = inputs((4, 1024), True, False, seed)
    assert residual is not None
    values[1, 5], values[3, 7] = torch.nan, torch.inf
    before = residual.clone().view(4, -1, 512)
    codec.encode(values, codec.start(values.numel()), residual=residual)
    same = (residual.view(4, -1, 512) == before).all(2)
    block = 1 if isinstance(codec, Quantize) else 2
    assert same.view(-1).tolist() == [False, False, True, block == 2, False, False, True, block == 2]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_packets_are_those_of_the_cpu(codec: Codec, seed: int) -> None:
    values, _ = inputs((40, 1024), False, False, seed)
    packet, _ = codec.encode(values, codec.start(values.numel(), 3))
    there, _ = codec.encode(values.cpu(), codec.start(values.numel(), 3))
    out, wanted = torch.empty(40, 1024), torch.empty(40, 1024)
    codec.decode(packet.cpu(), out)
    codec.decode(there, wanted)
    assert nearly_all_close(out, wanted), seed


def test_nothing_at_all() -> None:
    for codec in CODECS:
        packet, _ = codec.encode(torch.empty(0, device="cuda"), codec.start(0))
        codec.decode(packet, torch.empty(0, device="cuda"))
