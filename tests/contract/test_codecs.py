"""The contract of codecs: one suite for every codec of the registry."""

import copy
import math
from collections.abc import Callable
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
from codec_suite import (
    BARE,
    EVERY,
    SHAPES,
    decoded,
    encoded,
    every_bare,
    every_codec,
    every_with_feedback,
    gradient,
    said,
    same_bits,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tutti.codecs import (
    Cast,
    Chain,
    Codec,
    ErrorFeedback,
    LinearCodec,
    LowRank,
    OneBit,
    Quantize,
    RandomK,
    ScaleGroups,
    State,
    Threshold,
    TopK,
    kernels,
    parse_codec,
    print_codec,
)
from tutti.codecs.kernels import reference
from tutti.errors import ConfigError, UnknownName

shapes = st.sampled_from(SHAPES)
seeds = st.integers(0, 2**20)
scales = st.floats(-6, 4).map(lambda power: 10.0**power)


# What every codec does.


@every_codec
def test_encodes_and_decodes(codec: Codec) -> None:
    for shape in SHAPES:
        tensor = gradient(shape)
        before = tensor.clone()
        state = codec.start(tensor.numel())
        for _ in range(3):
            packet, following = encoded(codec, tensor, state)
            again, _ = encoded(codec, tensor, state)
            assert same_bits(tensor, before)
            assert torch.equal(packet, again)
            one, two = decoded(codec, packet, shape), decoded(codec, packet, shape)
            assert same_bits(one, two)
            assert one.isfinite().all()
            state = following


@every_bare
def test_adding_adds_what_is_written(codec: Codec) -> None:
    for shape in SHAPES:
        packet, _ = encoded(codec, gradient(shape))
        out = gradient(shape, seed=1)
        expected = out + decoded(codec, packet, shape)
        codec.decode(packet, out, add=True)
        assert torch.equal(out, expected)


@every_bare
def test_dtypes(codec: Codec) -> None:
    """Other dtypes are encoded and decoded as if they were float32."""
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        tensor = gradient((17, 300)).to(dtype)
        packet, _ = encoded(codec, tensor)
        assert torch.equal(packet, encoded(codec, tensor.float())[0])
        out, expected = torch.ones(17, 300, dtype=dtype), decoded(codec, packet, (17, 300))
        codec.decode(packet, out)
        assert torch.equal(out, expected.to(dtype))
        codec.decode(packet, out, add=True)
        torch.testing.assert_close(out, (expected.to(dtype).float() + expected).to(dtype), rtol=1e-2, atol=1e-3)


@every_bare
def test_layouts(codec: Codec) -> None:
    """Tensors may be transposed, views of a larger one, or require gradients."""
    plain = gradient((17, 300))
    packet, _ = encoded(codec, plain)
    expected = decoded(codec, packet, (17, 300))
    transposed = plain.T.contiguous().T
    watched = plain.clone().requires_grad_()
    frame = torch.full((34, 900), 100.0)
    strided = frame[::2, ::3].copy_(plain)
    for tensor in (transposed, watched, strided):
        assert torch.equal(packet, encoded(codec, tensor)[0])
        with torch.no_grad():
            tensor.zero_()
        codec.decode(packet, tensor)
        assert torch.equal(tensor, expected)
    around = torch.ones_like(frame, dtype=torch.bool)
    around[::2, ::3] = False
    assert (frame[around] == 100).all()


def test_only_floating_point() -> None:
    for codec, dtype in product(EVERY.values(), [torch.int64, torch.uint8, torch.bool, torch.complex64]):
        with pytest.raises(ConfigError, match=f"got {dtype}"):
            codec.encode(torch.ones(8, dtype=dtype), codec.start(8))


@every_bare
def test_packets_lie_anywhere(codec: Codec) -> None:
    """A packet may lie at an unaligned address of a longer message, or be strided."""
    packet, _ = encoded(codec, gradient((40, 50)))
    expected = decoded(codec, packet, (40, 50))
    received = torch.zeros(packet.numel() + 16, dtype=torch.uint8)
    for offset in range(8):
        moved = received[offset : offset + packet.numel()].copy_(packet)
        assert same_bits(decoded(codec, moved, (40, 50)), expected)
    spread = torch.zeros(2 * packet.numel(), dtype=torch.uint8)[::2].copy_(packet)
    assert same_bits(decoded(codec, spread, (40, 50)), expected)


@every_with_feedback
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_whatever_the_default_dtype_is(codec: Codec, dtype: torch.dtype) -> None:
    tensor = gradient((17, 300))
    expected, _ = encoded(codec, tensor)
    torch.set_default_dtype(dtype)
    try:
        packet, _ = encoded(codec, tensor)
        out = torch.empty((17, 300), dtype=torch.float32)
        codec.decode(packet, out)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(packet, expected)


@every_bare
def test_decoding_scales(codec: Codec) -> None:
    packet, _ = encoded(codec, gradient((17, 300)))
    whole = decoded(codec, packet, (17, 300))
    out = torch.full((17, 300), 100.0)
    codec.decode(packet, out, scale=0.25)
    assert torch.equal(out, 0.25 * whole)
    out.zero_()
    codec.decode(packet, out, add=True, scale=0.25)
    assert torch.equal(out, 0.25 * whole)


def test_linear_ones_have_rounds() -> None:
    assert all(codec.linear == isinstance(codec, LinearCodec) for codec in BARE.values())


# Error feedback.


def assert_conserved(codec: Codec, gradients: list[Tensor]) -> None:
    """Over several steps, decoded packets and the residual add up to the tensors, to rounding."""
    shape = tuple(gradients[0].shape)
    state = codec.start(gradients[0].numel())
    balance, largest = torch.zeros(shape, dtype=torch.float64), 0.0
    for tensor in gradients:
        out, state = said(codec, tensor, state)
        balance += tensor.double() - out.double()
        involved = (tensor, out, state["residual"])
        largest = max([largest, *(float(each.abs().max()) for each in involved if each.numel())])
    left = state["residual"].double().view(shape)
    assert left.isfinite().all()
    torch.testing.assert_close(balance, left, rtol=0, atol=1e-6 * len(gradients) * largest)


@every_with_feedback
@settings(max_examples=15)
@given(shape=shapes, seed=seeds, num_steps=st.integers(1, 6), scale=scales)
@example(shape=(64, 3, 3, 3), seed=0, num_steps=20, scale=1e-6)
@example(shape=(17, 300), seed=0, num_steps=12, scale=1e4)
@example(shape=(2, 5000), seed=0, num_steps=12, scale=1.0)
def test_feedback_loses_nothing(codec: Codec, shape: tuple[int, ...], seed: int, num_steps: int, scale: float) -> None:
    assert_conserved(codec, [gradient(shape, 1000 * seed + step, scale) for step in range(num_steps)])


@pytest.mark.parametrize("scale", [1e-25, 1e20])
def test_low_rank_at_any_scale(scale: float) -> None:
    """One step's factors are multiplied by the next step's gradient: neither may overflow, nor vanish."""
    codec = ErrorFeedback(LowRank(2))
    gradients = [gradient((40, 50), step, scale) for step in range(6)]
    assert_conserved(codec, gradients)
    state = codec.start(2000)
    for tensor in gradients:
        out, state = said(codec, tensor, state)
        assert 0.1 < float((out.double() / scale).norm() / (tensor.double() / scale).norm()) < 2


@every_with_feedback
def test_constant_gradients(codec: Codec) -> None:
    for value in (0.0, -0.0, 1.0, -3.7, 1e-30, 1e18):
        for shape in [(7,), (1000,), (3, 700), (2, 5000)]:
            assert_conserved(codec, [torch.full(shape, value)] * 3)


@every_with_feedback
def test_what_is_hardly_there_does_no_harm(codec: Codec) -> None:
    """Residuals of dead units fade through all magnitudes of float32, subnormals included."""
    state = codec.start(17 * 300)
    for power in range(30, 46):
        for factor in (1.0, 1.3, 3.0, 7.0):
            out, state = said(codec, factor * 10.0**-power * gradient((17, 300)), state)
            assert out.isfinite().all()
            assert state["residual"].isfinite().all()


@every_with_feedback
def test_a_few_values_among_zeros_get_through(codec: Codec) -> None:
    """Gradients of embeddings have fewer non-zero values than a sparse codec would send."""
    for numel in (1000, 20_000):
        tensor = torch.zeros(numel)
        tensor[[3, numel // 2, numel - 1]] = torch.tensor([1.0, -2.0, 0.5])
        state, arrived = codec.start(numel), torch.zeros(numel)
        for _ in range(100):
            out, state = said(codec, tensor, state)
            arrived += out
        assert (arrived[[3, numel // 2, numel - 1]] * tensor[[3, numel // 2, numel - 1]] > 0).all()


@every_with_feedback
def test_what_is_left_out_comes_later(codec: Codec) -> None:
    """After one gradient and then zeros, the sum of decoded packets approaches the gradient."""
    tensor = gradient((40, 50))
    arrived, state = said(codec, tensor)
    first = (arrived - tensor).norm()
    for _ in range(300):
        out, state = said(codec, torch.zeros_like(tensor), state)
        arrived += out
    assert (arrived - tensor).norm() <= 0.3 * tensor.norm()
    assert (arrived - tensor).norm() <= first


@pytest.mark.parametrize("density", [0.01, 0.25])
def test_momentum_as_in_deep_gradient_compression(density: float) -> None:
    codec, momentum = ErrorFeedback(TopK(density, momentum=0.9)), 0.9
    state = codec.start(2000)
    u, v = torch.zeros(2000), torch.zeros(2000)
    for step in range(20):
        tensor = gradient((40, 50), step)
        out, state = said(codec, tensor, state)
        u = momentum * u + tensor.view(-1)
        v = v + u
        chosen = v.abs().topk(math.ceil(density * 2000)).indices
        expected = torch.zeros(2000)
        expected[chosen] = v[chosen]
        u[chosen], v[chosen] = 0.0, 0.0
        torch.testing.assert_close(out.view(-1), expected)
        torch.testing.assert_close(state["residual"], v)


def test_the_largest_are_the_largest() -> None:
    """The selection is exact even where the sample is not representative, and where there are ties."""
    odd_ones = torch.full((100_000,), 1e-3)
    odd_ones[1::2] = 1.0
    late = torch.cat([torch.ones(90_000), 5 + torch.rand(10_000)])
    for tensor in (gradient((100_000,)), odd_ones, late, torch.ones(100_000), gradient((33_000,)).round()):
        for codec in (TopK(0.01), ErrorFeedback(TopK(0.01))):
            out, _ = said(codec, tensor)
            count = math.ceil(0.01 * tensor.numel())
            assert int((out != 0).sum()) == count
            assert torch.equal(out[out != 0], tensor[out != 0])
            assert torch.equal(out.abs().topk(count).values, tensor.abs().topk(count).values)


def test_warm_up_sends_less_and_less() -> None:
    codec = TopK(0.05, warmup_steps=5)
    state, counts = codec.start(10_000), []
    for step in range(8):
        out, state = said(codec, gradient((10_000,), step), state)
        counts.append(int((out != 0).sum()))
    assert counts[0] == 2500
    assert counts == sorted(counts, reverse=True)
    assert counts[5:] == [500, 500, 500]


# Numbers that are no numbers, and numbers that are too large.

BAD = [math.nan, math.inf, -math.inf]


def stays_near(codec: Codec, place: int) -> slice:
    """Return the elements of a (40, 512) tensor that a single value which is not finite may affect."""
    codec = codec.inner if isinstance(codec, ErrorFeedback) else codec
    if isinstance(codec, TopK | Threshold) or codec in (Cast("fp16"), Cast("bf16")):
        return slice(place, place + 1)
    if isinstance(codec, RandomK):
        return slice(place - 10, place + 11)
    if isinstance(codec, OneBit | Quantize | Cast):
        return slice(place // 512 * 512, (place // 512 + 1) * 512)
    return slice(0, 40 * 512)


@every_codec
def test_one_bad_value(codec: Codec) -> None:
    for bad, place in zip(BAD, [5007, 0, 40 * 512 - 1], strict=True):
        tensor = gradient((40, 512))
        _, state = said(codec, tensor)
        tensor.view(-1)[place] = bad
        out, state = said(codec, tensor, state)
        near = stays_near(codec, place)
        shown = (~out.view(-1).isfinite()).nonzero().flatten()
        assert len(shown) > 0
        assert near.start <= int(shown.min())
        assert int(shown.max()) < near.stop
        if near.stop - near.start == 1:
            torch.testing.assert_close(float(out.view(-1)[place]), bad, equal_nan=True)
        assert_nothing_stays(codec, state, (40, 512))


def assert_nothing_stays(codec: Codec, state: State, shape: tuple[int, ...]) -> None:
    """After values that were not finite, finite gradients decode to finite values again."""
    for step in range(3):
        assert all(value.isfinite().all() for value in state.values() if isinstance(value, Tensor))
        out, state = said(codec, gradient(shape, step), state)
        assert out.isfinite().all()


@pytest.mark.parametrize(
    "codec",
    [*EVERY.values(), ErrorFeedback(TopK(0.05, momentum=0.9)), ErrorFeedback(Chain(TopK(momentum=0.9), OneBit()))],
    ids=str,
)
def test_bad_values_only(codec: Codec) -> None:
    for bad in BAD:
        for shape in [(40, 512), (7,), ()]:
            out, state = said(codec, torch.full(shape, bad))
            assert not out.isfinite().all()
            assert_nothing_stays(codec, state, shape)


@every_with_feedback
def test_sums_that_overflow_leave_nothing_behind(codec: Codec) -> None:
    state = codec.start(40 * 512)
    for _ in range(3):
        _, state = said(codec, torch.full((40, 512), 3e38), state)
        assert state["residual"].isfinite().all()


@pytest.mark.parametrize("codec", [Cast("fp16"), Cast("bf16"), Cast("fp8"), Quantize(8), Quantize(2), TopK()], ids=str)
def test_huge_values_stay_finite(codec: Codec) -> None:
    """Sums of the largest float32 values overflow, and the infinity is sent."""
    for value in (1e36, 3e38, -3e38):
        out, _ = said(codec, torch.full((40, 512), value))
        assert out.isfinite().all()


@every_with_feedback
@pytest.mark.parametrize("magnitude", [1e-36, 1e-40])
def test_tiny_values_are_decoded_or_kept(codec: Codec, magnitude: float) -> None:
    """Groups whose largest value is so small that one cannot divide by it still add up."""
    tensor = gradient((40, 512)) * magnitude
    decoded, state = torch.zeros_like(tensor), codec.start(tensor.numel())
    for _ in range(3):
        out, state = said(codec, tensor, state)
        decoded += out
    missing = decoded + state["residual"].view_as(tensor) - 3 * tensor
    assert float(missing.abs().max()) < 1e-5 * magnitude


def test_fp16_stops_at_its_largest() -> None:
    tensor = torch.tensor([3e38, -3e38, 65504.0, 65519.0, 65520.0, 1e5, 1.0, 0.0])
    out, _ = said(Cast("fp16"), tensor)
    assert out.tolist() == [65504, -65504, 65504, 65504, 65504, 65504, 1, 0]
    out, state = said(ErrorFeedback(Cast("fp16")), tensor)
    assert torch.equal(state["residual"], tensor - out)


@every_codec
def test_zeros(codec: Codec) -> None:
    for shape in SHAPES:
        out, state = said(codec, torch.zeros(shape))
        assert (out == 0).all()
        if "residual" in state:
            assert (state["residual"] == 0).all()


# How long packets are.


def test_lengths_that_are_exact() -> None:
    for codec, rows in product(
        [Cast("fp16"), Cast("fp8"), OneBit(), Quantize(8), Quantize(2), RandomK()], (0, 1, 3, 40)
    ):
        packet, _ = encoded(codec, gradient((rows, 512)))
        assert packet.numel() == codec.packet_bytes(rows * 512, ScaleGroups.from_shape((rows, 512)))


@pytest.mark.parametrize(
    "codec", [Threshold(), TopK(), TopK(0.1), Chain(TopK(), Quantize(8)), Chain(TopK(0.1), OneBit())], ids=str
)
def test_lengths_of_sparse_packets(codec: Codec) -> None:
    packet, _ = encoded(codec, gradient((400, 500)))
    assert packet.numel() == pytest.approx(codec.packet_bytes(200_000), rel=0.25)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_lengths_of_low_rank(rank: int) -> None:
    packet, _ = encoded(LowRank(rank), gradient((300, 300)))
    assert packet.numel() == pytest.approx(LowRank(rank).packet_bytes(90_000), rel=0.25)


# Kernels.

numbers = st.one_of(
    st.floats(-10, 10, width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, -1e-38, 1e30, 65504.0, 7e4]),
)


def outcome(codec: Codec, tensor: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    rest = residual.clone() if residual is not None else None
    packet, _ = codec.encode(tensor, codec.start(tensor.numel()), residual=rest)
    return packet, decoded(codec, packet, tuple(tensor.shape)), rest


@every_bare
@settings(max_examples=15)
@given(
    shape=st.sampled_from([(), (1,), (7,), (300,), (3, 5), (5, 290), (2, 600), (0, 4)]),
    seed=seeds,
    scale=scales,
    some=st.lists(numbers, max_size=8),
    feedback=st.booleans(),
)
def test_kernels_agree(
    codec: Codec, shape: tuple[int, ...], seed: int, scale: float, some: list[float], feedback: bool
) -> None:
    tensor = gradient(shape, seed, scale)
    tensor.view(-1)[: len(some)] = torch.tensor(some[: tensor.numel()])
    residual = gradient(shape, seed + 1, scale).view(-1) if feedback else None
    packet, out, rest = outcome(codec, tensor, residual)
    with mock.patch.object(kernels, "for_device", return_value=reference):
        wanted_packet, wanted, wanted_rest = outcome(codec, tensor, residual)
    assert packet.numel() == wanted_packet.numel()
    # Where a value lies between two levels, a fused product and sum may round it to the other.
    bound = 1e-5 * (float(wanted.abs().max()) if wanted.numel() else 0.0)
    differ = ~torch.isclose(out, wanted, rtol=1e-5, atol=bound).view(-1)
    assert int(differ.sum()) <= tensor.numel() // 200 + (len(some) if isinstance(codec, Quantize | Chain) else 0)
    if rest is not None and wanted_rest is not None:
        torch.testing.assert_close(
            rest + out.view(-1), wanted_rest + wanted.view(-1), rtol=1e-5, atol=max(bound, 1e-36)
        )


@every_bare
def test_kernels_agree_on_bad_values(codec: Codec) -> None:
    tensor = gradient((3, 512))
    for bad, residual in product(BAD, [None, gradient((3 * 512,), 1)]):
        tensor[1, 3] = bad
        packet, out, rest = outcome(codec, tensor, residual)
        with mock.patch.object(kernels, "for_device", return_value=reference):
            wanted_packet, wanted, wanted_rest = outcome(codec, tensor, residual)
        assert packet.numel() == wanted_packet.numel()
        assert torch.equal(out.isfinite(), wanted.isfinite())
        if rest is not None and wanted_rest is not None:
            torch.testing.assert_close(rest, wanted_rest, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_quantize_is_right_on_average(bits: int) -> None:
    codec = Quantize(bits)  # type: ignore[arg-type]
    tensor = gradient((3, 512))
    level = tensor.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    state, total, num_steps = codec.start(tensor.numel()), torch.zeros_like(tensor), 400
    for _ in range(num_steps):
        out, state = said(codec, tensor, state)
        assert ((out - tensor).abs() <= 1.001 * level).all()
        total += out
    wrong = (total / num_steps - tensor) / level  # A step is off by half a level at most, in deviation.
    assert wrong.abs().max() < 5 * 0.5 / math.sqrt(num_steps)
    assert wrong.mean().abs() < 4 * 0.5 / math.sqrt(num_steps * tensor.numel())


def test_quantize_draws_anew_with_every_seed_and_step() -> None:
    codec, tensor = Quantize(2), gradient((1000,))
    packets = [codec.encode(tensor, {"seed": seed, "step": step})[0] for seed in range(3) for step in range(3)]
    assert len({packet.numpy().tobytes() for packet in packets}) == 9


def test_ranks_choose_the_same_places() -> None:
    codec, one, two = RandomK(0.1), gradient((1000,), 1), gradient((1000,), 2)
    first, second = said(codec, one, codec.start(1000, seed=1))[0], said(codec, two, codec.start(1000, seed=2))[0]
    assert torch.equal(first != 0, second != 0)


# What is refused.

_MISTAKES: list[tuple[Callable[[], object], list[str]]] = [
    (lambda: Threshold(0.0), ["tau", "above 0", "got 0.0"]),
    (lambda: Threshold(-1.0), ["tau", "above 0", "got -1.0"]),
    (lambda: Threshold(math.nan), ["tau", "got nan"]),
    (lambda: Threshold(math.inf), ["tau", "got inf"]),
    (lambda: Threshold(1e300), ["tau", "got 1e+300"]),
    (lambda: Threshold(-1.0, density=2), ["tau", "density", "got 2"]),
    *[
        (lambda make=make, share=share: make(density=share), ["density", "above 0 and at most 1", f"got {share}"])
        for make in (Threshold, TopK, RandomK)
        for share in (0, -0.1, 1.01, math.nan, math.inf)
    ],
    (lambda: TopK(warmup_steps=-1), ["warmup_steps", "0 or more", "got -1"]),
    (lambda: TopK(warmup_steps=1.5), ["warmup_steps", "got 1.5"]),
    (lambda: TopK(momentum=1.0), ["momentum", "below 1", "got 1.0"]),
    (lambda: TopK(momentum=math.nan), ["momentum", "got nan"]),
    *[(lambda rank=rank: LowRank(rank), ["rank", "1 or more", f"got {rank}"]) for rank in (0, -1, 1.5)],
    *[(lambda bits=bits: Quantize(bits), ["bits", "8, 4, 2", f"got {bits!r}"]) for bits in (3, 0, "8", 8.0)],
    *[(lambda size=size: Quantize(block=size), ["16 and 4096", f"got {size}"]) for size in (8, 5000, 64.5)],
    (lambda: Cast("fp32"), ["fp16, bf16, fp8", "got 'fp32'"]),
    (lambda: ErrorFeedback(ErrorFeedback(OneBit())), ["OneBit()", "got ErrorFeedback"]),
    (lambda: ErrorFeedback("onebit"), ["OneBit()", "got 'onebit'"]),
    (lambda: ErrorFeedback(OneBit), ["OneBit()", "got <class"]),
    (lambda: Chain(OneBit(), TopK()), ["Chain(TopK(), Quantize())", "got Chain(OneBit()"]),
    (lambda: Chain(TopK(), TopK()), ["Chain(TopK(), Quantize())", "got Chain(TopK("]),
    (lambda: Chain(TopK(), LowRank()), ["got Chain(TopK(", "LowRank(rank=2)"]),
    (lambda: Chain(TopK(), ErrorFeedback(OneBit())), ["got Chain(TopK(", "ErrorFeedback"]),
    (lambda: Chain(TopK(), Chain(TopK(), OneBit())), ["got Chain(TopK("]),
    (lambda: TopK(momentum=0.9).encode(torch.ones(8), TopK(momentum=0.9).start(8)), ["momentum", "ErrorFeedback("]),
    (
        lambda: ErrorFeedback(OneBit()).encode(
            torch.ones(8), ErrorFeedback(OneBit()).start(8), residual=torch.zeros(8)
        ),
        ["its own residual"],
    ),
]


def test_mistakes_are_explained() -> None:
    for make, parts in _MISTAKES:
        with pytest.raises(ConfigError) as caught:
            make()
        for part in parts:
            assert part in str(caught.value)


# Text.

_MORE = [
    Chain(TopK(0.25, warmup_steps=3, momentum=0.5), Quantize(4, block=100)),
    Threshold(0.5, density=0.1),
    Threshold(1e20),
    Threshold(density=1e-5),
    RandomK(1e-7),
]


def test_text_makes_the_same_codec() -> None:
    for codec in [*EVERY.values(), *_MORE]:
        text = print_codec(codec)
        assert parse_codec(text) == codec
        assert print_codec(parse_codec(text)) == text
        assert copy.deepcopy(codec) == codec
        assert hash(parse_codec(text)) == hash(codec)


@settings(max_examples=60)
@given(
    density=st.floats(1e-12, 1),
    tau=st.none() | st.floats(1e-30, 1e30),
    steps=st.integers(0, 10**9),
    feedback=st.booleans(),
)
def test_text_keeps_every_digit(density: float, tau: float | None, steps: int, feedback: bool) -> None:
    for codec in (TopK(density, steps), Threshold(tau, density), RandomK(density), Chain(TopK(density), OneBit())):
        whole = ErrorFeedback(codec) if feedback else codec
        assert parse_codec(print_codec(whole)) == whole


@pytest.mark.parametrize(
    ("text", "meant"), [("topkk", "topk"), ("quantise:8", "quantize"), ("one-bit", "onebit"), ("fp61", "fp16")]
)
def test_unknown_names_get_a_suggestion(text: str, meant: str) -> None:
    with pytest.raises(UnknownName) as caught:
        parse_codec(text)
    assert meant in str(caught.value)


def test_names_that_are_none() -> None:
    for text in ["", "+", "topk+", "+topk", ":", "TopK", "topk 0.1", "topk,"]:
        with pytest.raises(UnknownName):
            parse_codec(text)


_MALFORMED = [
    "topk:x", "topk:0.1,x", "topk:0.1,,", "topk:", "topk:,", "topk:=3", "topk:0.1,step=3", "topk:0.1,density=0.2",
    "topk:--1", "topk:²", "topk:0.1:0.2", "topk:0.1feedback=0", "topk:feedback=2", "onebit:1",
    "feedback=0", "topkfeedback=0", "topk:feedback=0,momentum=0.5",
    "fp16:8", "fp16:to=8", "lowrank:1.5", "lowrank:0", "quantize:3", "quantize:8.0", "quantize:8,block=1e2",
    "threshold:-1", "threshold:nan", "threshold:1" + 400 * "0", "topk:" + 5000 * "1", "topk:2", "randomk:inf",
    "topk+topk", "quantize+topk", "topk+quantize+onebit", "topk+lowrank", "topk:0.1,warmup_steps=1e3",
]  # fmt: skip


def test_malformed_text() -> None:
    for text in _MALFORMED:
        with pytest.raises(ConfigError) as caught:
            parse_codec(text)
        assert not isinstance(caught.value, UnknownName)


@settings(max_examples=200)
@given(text=st.text(alphabet="topkquantize:+,=.0123456789-e feedback", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        codec = parse_codec(text)
    except ConfigError:
        return
    assert parse_codec(print_codec(codec)) == codec


def test_state_is_what_checkpoints_hold() -> None:
    """States hold integers, arrays and tensors by name."""
    for codec in EVERY.values():
        _, state = said(codec, gradient((17, 300)))
        assert all(isinstance(key, str) for key in state)
        assert all(isinstance(value, int | Tensor | np.ndarray) for value in state.values())


def test_every_codec_states_its_speed() -> None:
    for codec in BARE.values():
        assert 0 < codec.speed.encode_bytes_per_s < codec.speed.decode_bytes_per_s
        assert ErrorFeedback(codec).speed == codec.speed
