"""Malformed packets: every codec refuses them, and leaves the output unchanged."""

import resource
import struct
import time
from functools import cache

import numpy as np
import pytest
import torch
from codec_suite import BARE, decoded, encoded, every_bare, gradient, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tutti.codecs import Cast, Chain, Codec, LowRank, OneBit, Packet, Quantize, RandomK, Threshold, TopK
from tutti.codecs.indices import encode_symbols
from tutti.codecs.packet import HEADER
from tutti.errors import PacketError

SHAPE = (40, 50)
NUMEL = 2000

FIELDS = {"magic": (0, 2), "version": (2, 1), "kind": (3, 1), "count": (4, 4), "numel": (8, 8), "length": (16, 8)}
"""Offset and length of each header field. The parameter's meaning depends on the codec."""
PARAMETER = (24, 8)


@cache
def valid(codec: Codec) -> bytes:
    """A packet; with a value that is no number in it, where one can be sent alone."""
    tensor = gradient(SHAPE)
    if isinstance(codec, Threshold):
        tensor[3, 4], tensor[30, 1] = float("nan"), float("inf")
    return encoded(codec, tensor)[0].numpy().tobytes()


def packet_of(data: bytes) -> Packet:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def accepts(codec: Codec, data: bytes) -> bool:
    """Return whether the codec decodes this. If it refuses, it does so quickly and leaves the output unchanged."""
    packet, taken = packet_of(data), False
    for add in (False, True):
        out = gradient(SHAPE, seed=9)
        out[0, 0], out[1, 1] = float("nan"), -0.0
        before = out.clone()
        began = time.process_time()  # What it costs, however busy the machine is.
        try:
            codec.decode(packet, out, add=add)
            taken = True
        except PacketError:
            assert same_bits(out, before)
            assert not taken
        assert time.process_time() - began < 1
    return taken


def assert_refused(codec: Codec, data: bytes) -> None:
    assert not accepts(codec, data)


def with_field(data: bytes, field: tuple[int, int], value: int) -> bytes:
    start, size = field
    return data[:start] + value.to_bytes(size, "little") + data[start + size :]


def with_length(data: bytes) -> bytes:
    """Return the packet with its true length in the header."""
    return with_field(data, FIELDS["length"], len(data))


def near_and_far(size: int, value: int) -> list[int]:
    """Return other values for a field: near its present one, and at the limits of its range."""
    top = 2 ** (8 * size)
    edges = [0, 1, 2, top - 1, top // 2, top // 2 - 1, *([2**32 - 1, 2**32, 2**40, 2**62] if size == 8 else [])]
    return sorted({it for it in [*edges, value - 1, value + 1, 2 * value] if 0 <= it < top and it != value})


@pytest.fixture(autouse=True)
def modest() -> object:
    """Fail a test that allocates much memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # In kilobytes.


@every_bare
def test_other_headers(codec: Codec) -> None:
    data = valid(codec)
    assert accepts(codec, data)
    for start, size in FIELDS.values():
        for value in near_and_far(size, int.from_bytes(data[start : start + size], "little")):
            assert_refused(codec, with_field(data, (start, size), value))


@every_bare
def test_other_parameters(codec: Codec) -> None:
    data = valid(codec)
    held = int.from_bytes(data[24:], "little") % 2**64
    for value in [*near_and_far(8, held), *range(33, 70), 2**63]:
        if isinstance(codec, RandomK):  # Its step: any will do.
            assert accepts(codec, with_field(data, PARAMETER, value))
        else:
            accepts(codec, with_field(data, PARAMETER, value))
            if value > 32:
                assert_refused(codec, with_field(data, PARAMETER, value))


@every_bare
@settings(max_examples=40)
@given(cut=st.floats(0, 1, exclude_max=True), honest=st.booleans())
def test_truncated(codec: Codec, cut: float, honest: bool) -> None:
    """Refused with either the old or the new length in the header."""
    data = valid(codec)[: int(cut * len(valid(codec)))]
    assert_refused(codec, with_length(data) if honest and len(data) >= HEADER.size else data)


@every_bare
@settings(max_examples=40)
@given(more=st.binary(min_size=1, max_size=40), honest=st.booleans())
def test_too_long(codec: Codec, more: bytes, honest: bool) -> None:
    data = valid(codec) + more
    assert_refused(codec, with_length(data) if honest else data)


@every_bare
@settings(max_examples=40)
@given(data=st.data())
def test_bits_flipped(codec: Codec, data: st.DataObject) -> None:
    """Mostly at the beginning of the payload, and at its end: that is where it has structure."""
    changed = bytearray(valid(codec))
    size = len(changed)
    near = st.integers(0, 63)
    anywhere, first, last = st.integers(0, size - 1), near.map(HEADER.size.__add__), near.map((size - 1).__sub__)
    for _ in range(data.draw(st.integers(1, 8))):
        changed[min(size - 1, data.draw(anywhere | first | last))] ^= data.draw(st.integers(1, 255))
    accepts(codec, bytes(changed))


@every_bare
@settings(max_examples=40)
@given(payload=st.binary(max_size=200), bare=st.booleans())
def test_random_bytes(codec: Codec, payload: bytes, bare: bool) -> None:
    accepts(codec, payload if bare else with_length(valid(codec)[: HEADER.size] + payload))


@every_bare
@settings(max_examples=40)
@given(count=st.integers(0, 3000), width=st.integers(0, 40), payload=st.binary(max_size=400))
def test_random_places(codec: Codec, count: int, width: int, payload: bytes) -> None:
    """A header that is consistent, before any payload."""
    data = with_field(valid(codec)[: HEADER.size] + payload, FIELDS["count"], count)
    accepts(codec, with_length(with_field(data, PARAMETER, width)))


@every_bare
def test_packets_of_others(codec: Codec) -> None:
    """A sparse packet does not say how many values there should have been; all else must be the same."""
    for other in BARE.values():
        same = codec == other or (type(codec) is type(other) and isinstance(codec, TopK | Threshold))
        assert accepts(codec, valid(other)) == same


@every_bare
def test_packets_for_other_shapes(codec: Codec) -> None:
    packet = packet_of(valid(codec))
    for shape in [(NUMEL - 1,), (NUMEL + 1,), (0,), (), (41, 50)]:
        out = torch.ones(shape)
        with pytest.raises(PacketError, match=f"{NUMEL} elements, wanted {out.numel()}"):
            codec.decode(packet, out)
        assert (out == 1).all()


@every_bare
def test_tiny_tensors(codec: Codec) -> None:
    for numel in (0, 1, 7):
        packet, _ = encoded(codec, gradient((numel,)))
        data = packet.numpy().tobytes()
        decoded(codec, packet, (numel,))
        for cut in range(len(data)):
            shorter = with_length(data[:cut]) if cut >= HEADER.size else data[:cut]
            with pytest.raises(PacketError):
                codec.decode(packet_of(shorter), torch.zeros(numel))
        with pytest.raises(PacketError):
            codec.decode(packet_of(with_field(data, FIELDS["count"], 2**32 - 1)), torch.zeros(numel))


@every_bare
def test_what_is_no_packet_at_all(codec: Codec) -> None:
    packet, out = packet_of(valid(codec)), torch.ones(SHAPE)
    for wrong in (packet.to(torch.int32), packet.to(torch.int8), packet[None], packet[0], packet[:0], packet.float()):
        with pytest.raises(PacketError):
            codec.decode(wrong, out)
    assert (out == 1).all()


# What only some of them have.


def header(like: bytes, count: int, width: int, payload: bytes) -> bytes:
    data = with_field(like[: HEADER.size] + payload, FIELDS["count"], count)
    return with_length(with_field(data, PARAMETER, width))


def places_bytes(symbols: list[int], width: int) -> bytes:
    return encode_symbols(np.array(symbols, np.int64), width).tobytes()


def topk_packet(symbols: list[int], width: int) -> bytes:
    values = struct.pack("<q", 4 * len(symbols)) + struct.pack(f"<{len(symbols)}f", *([1.0] * len(symbols)))
    padding = b"\0" * (-4 * len(symbols) % 8)
    return header(valid(TopK()), len(symbols), width, values + padding + places_bytes(symbols, width))


def threshold_packet(symbols: list[int], width: int, odd: list[tuple[int, float]] | None = None) -> bytes:
    odd = odd or []
    fixed = struct.pack("<fi", 0.5, len(odd)) + struct.pack(f"<{len(odd)}i", *(place for place, _ in odd))
    fixed += struct.pack(f"<{len(odd)}f", *(value for _, value in odd))
    return header(valid(Threshold()), len(symbols), width, fixed + places_bytes(symbols, width))


@pytest.mark.parametrize("width", [0, 3, 11, 31, 32])
def test_places_within(width: int) -> None:
    """The first and the last element are valid indices; the one after is not."""
    assert accepts(TopK(), topk_packet([0, 1998], width))
    assert accepts(TopK(), topk_packet([1999], width))
    assert accepts(Threshold(), threshold_packet([0, 2 * 1998 + 1], width))
    for symbols in ([2000], [0, 1999], [1999, 0], [1000, 1000], [0] * 2001):
        assert_refused(TopK(), topk_packet(symbols, width))
        assert_refused(Threshold(), threshold_packet([2 * it for it in symbols], width))


@pytest.mark.parametrize("place", [2**31, 2**32 - 1, 2**32])
def test_places_far_away(place: int) -> None:
    assert_refused(TopK(), topk_packet([place], 31))
    assert_refused(TopK(), topk_packet([0, place, 5], 32))
    assert_refused(Threshold(), threshold_packet([place], 31))


@pytest.mark.parametrize("num_bytes", [-1, -8, -(2**63), 2**63 - 1, 2**62, 0, 1, 79, 84, 10**6])
def test_lengths_of_values(num_bytes: int) -> None:
    for codec in (TopK(), Chain(TopK(0.1), Quantize(8)), Chain(TopK(0.2), Cast("fp16"))):
        data = valid(codec)
        assert_refused(codec, data[: HEADER.size] + struct.pack("<q", num_bytes) + data[HEADER.size + 8 :])


@pytest.mark.parametrize("odd", [[(2000, 1.0)], [(-1, 1.0)], [(5, 1.0), (2**31 - 1, 1.0)], [(-(2**31), 1.0)]])
def test_odd_places_within(odd: list[tuple[int, float]]) -> None:
    assert accepts(Threshold(), threshold_packet([0], 3, [(1999, float("nan"))]))
    assert_refused(Threshold(), threshold_packet([0], 3, odd))


def test_odd_places_are_in_order() -> None:
    assert_refused(Threshold(), threshold_packet([0], 3, [(7, float("inf")), (7, float("nan"))]))
    assert_refused(Threshold(), threshold_packet([0], 3, [(8, float("inf")), (7, float("nan"))]))


@pytest.mark.parametrize("num_odd", [-1, -(2**31), 2**31 - 1, 1000, 3])
def test_numbers_of_odd_values(num_odd: int) -> None:
    data = valid(Threshold())
    assert_refused(Threshold(), data[: HEADER.size + 4] + struct.pack("<i", num_odd) + data[HEADER.size + 8 :])


@pytest.mark.parametrize("codec", [it for it in BARE.values() if isinstance(it, Chain)], ids=str)
def test_packets_within_packets(codec: Chain) -> None:
    data, begin = valid(codec), HEADER.size + 8
    count = int.from_bytes(data[4:8], "little")
    for start, size in FIELDS.values():
        held = int.from_bytes(data[begin + start : begin + start + size], "little")
        for value in near_and_far(size, held):
            assert_refused(codec, data[:begin] + with_field(data[begin:], (start, size), value))
    indices = data[begin + -(-int.from_bytes(data[HEADER.size : begin], "little") // 8) * 8 :]
    for numel in (0, count - 1, count + 1, 10 * count):
        inner = encoded(codec.second, gradient((numel,)))[0].numpy().tobytes()
        payload = struct.pack("<q", len(inner)) + inner + b"\0" * (-len(inner) % 8) + indices
        assert_refused(codec, with_length(data[: HEADER.size] + payload))
        cut = inner[: len(inner) // 2]
        payload = struct.pack("<q", len(cut)) + cut + b"\0" * (-len(cut) % 8) + indices
        assert_refused(codec, with_length(data[: HEADER.size] + payload))


@pytest.mark.parametrize("codec", [Threshold(), TopK(), Chain(TopK(0.1), Quantize(8)), OneBit(), LowRank()], ids=str)
def test_counts_are_refused_before_there_is_room_for_them(codec: Codec) -> None:
    """The `modest` fixture sees what would be allocated."""
    for count in (2**32 - 1, 2**31, 10**8):
        assert_refused(codec, with_field(valid(codec), FIELDS["count"], count))


@settings(max_examples=100)
@given(symbols=st.lists(st.integers(0, 2**34), max_size=50), width=st.integers(0, 32))
def test_places_survive_their_code(symbols: list[int], width: int) -> None:
    from tutti.codecs.indices import decode_symbols

    kept = [it % (2 ** min(34, width + 10)) for it in symbols]
    data: Tensor = torch.from_numpy(encode_symbols(np.array(kept, np.int64), width))
    assert decode_symbols(data, len(kept), width, 2**34).tolist() == kept
