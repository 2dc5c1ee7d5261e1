"""What a codec is: a tensor to a packet and back, with what it remembers handed in and out."""

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from tutti.codecs.scale_groups import ScaleGroups
from tutti.errors import ConfigError

CPU = torch.device("cpu")

Packet = Tensor
"""Bytes, in the layout of `tutti.codecs.packet`, on the device of what they encode."""

State = dict[str, Any]
"""What a codec remembers from one call to the next, by name. The call that takes it uses it up and hands one back."""


class CodecSpeed(NamedTuple):
    """How fast a codec works on one CPU core, as `tutti bench codecs` measures it (docs/benchmarks.md)."""

    encode_bytes_per_s: float
    """Bytes of float32 input that are encoded per second, error feedback included."""
    decode_bytes_per_s: float
    """Bytes of float32 output that are filled per second when a packet is decoded."""


class Codec(ABC):
    """A way to say a tensor in fewer bytes: frozen, comparable, printed as at the command line (`print_codec`)."""

    name: ClassVar[str]
    """At the command line."""
    linear: ClassVar[bool] = False
    """Whether what several ranks send may be summed before it is decoded; then it has `rounds` (`LinearCodec`)."""
    sparse: ClassVar[bool] = False
    """Whether it sends some values and says nothing of the others, in as many bytes as that takes."""

    speed: ClassVar[CodecSpeed] = CodecSpeed(1e9, 5e9)
    """With error feedback, as `tutti bench codecs` measures it (docs/benchmarks.md). The planner predicts encoding and
    decoding times from it. The default is a cautious guess for a codec that has not been measured."""

    @property
    def needs_feedback(self) -> bool:
        """Whether it works inside `ErrorFeedback` only."""
        return False

    def start(self, numel: int, seed: int = 0, device: torch.device = CPU) -> State:
        """The state before the first call, for tensors of `numel` elements; what is drawn depends on the seed.

        Tensors in it have an element for each of those, flat, in float32.
        """
        return {}

    @abstractmethod
    def encode(
        self, tensor: Tensor, state: State, *, residual: Tensor | None = None, groups: ScaleGroups | None = None
    ) -> tuple[Packet, State]:
        """Say `tensor`, which stays as it is.

        Args:
            state: from `start`, or from the call before.
            residual: what earlier calls left out, flat, in float32. It is added to `tensor` first, and what this call
                leaves out is in it afterwards. Where NaN or infinity is sent, it stays as it was.
            groups: which values share a scale, where a codec has scales; the rows of `tensor` by default.
        """

    @abstractmethod
    def decode(
        self, packet: Packet, out: Tensor, *, groups: ScaleGroups | None = None, add: bool = False, scale: float = 1.0
    ) -> None:
        """Overwrite `out` with what `packet` says, times `scale`, or add that.

        Raises `PacketError`, and leaves `out` alone, if the packet is not one that this codec makes for such a tensor.
        """

    @abstractmethod
    def packet_bytes(self, numel: int, groups: ScaleGroups | None = None) -> int:
        """Bytes of a packet for so many elements with these groups; an estimate where it depends on the elements."""

    @abstractmethod
    def __str__(self) -> str: ...


def flat_float32(tensor: Tensor, what: str) -> Tensor:
    """The elements of `tensor` as codecs work on them; its own memory if that is possible."""
    if not tensor.is_floating_point():
        raise ConfigError(f"{what} encodes floating-point tensors, got {tensor.dtype}. Convert it first.")
    return tensor.detach().reshape(-1).to(torch.float32).contiguous()


def flat_view(out: Tensor) -> Tensor:
    """`out` as one dimension of float32, to decode into: its own memory, or new memory if that is impossible."""
    flat = out.detach()
    if flat.dtype == torch.float32 and flat.is_contiguous():
        return flat.view(-1)
    return flat.reshape(-1).to(torch.float32).clone()


def copy_back(flat: Tensor, out: Tensor) -> None:
    """Let `out` hold what was decoded into `flat_view` of it."""
    if flat.data_ptr() != out.data_ptr():
        out.detach().copy_(flat.view(out.shape))


def groups_or_rows(tensor: Tensor, groups: ScaleGroups | None) -> ScaleGroups:
    """`groups`, or the rows of `tensor`."""
    if groups is None:
        return ScaleGroups.from_shape(tuple(tensor.shape))
    if groups.numel != tensor.numel():
        raise ConfigError(f"groups of a tensor of {groups.numel} elements were given with one of {tensor.numel()}.")
    return groups


TensorLayout = tuple[tuple[int, tuple[int, ...]], ...]
"""Tensors that lie in a flat one: where each begins, and its shape."""

SumRounds = Generator[Tensor, None, State]
"""Tensors to be summed over ranks, in place, each before the next is asked for; then the state to go on with.

All of them may be divided by a number before they are handed back, and the result is then divided by it, once.
"""


@runtime_checkable
class LinearCodec(Protocol):
    """A codec whose sums over ranks need no decoding between."""

    def rounds(self, values: Tensor, layout: TensorLayout, state: State, residual: Tensor | None = None) -> SumRounds:
        """Replace flat `values` by about their sum over ranks, in rounds of small sums; float32, as the rounds are."""
        ...

    def round_sizes(self, layout: TensorLayout) -> list[int]:
        """How many numbers each round sums."""
        ...
