"""`Codec`, the interface of all codecs: a tensor to a packet and back, with explicit state.

What every codec promises, on every device:

- A packet decodes to the same bits everywhere, so ranks that decode the same packets agree.
- With a residual, what is decoded and the new residual add up to the tensor and the old residual, to rounding.
- NaN and infinity are sent, so that a `GradScaler` sees them on every rank. The residual stays as it was where they
  are.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from tutti.codecs.scale_groups import ScaleGroups
from tutti.errors import ConfigError

CPU = torch.device("cpu")

Packet = Tensor
"""A tensor of bytes in the layout of `tutti.codecs.packet`, on the device of the tensor that it encodes."""

State = dict[str, Any]
"""State that a codec keeps from one call to the next, by name. A call may change the state that it is given."""


class CodecSpeed(NamedTuple):
    """How fast a codec works on one CPU core, as `tutti bench codecs` measures it (docs/benchmarks.md)."""

    encode_bytes_per_s: float
    """Bytes of float32 input that are encoded per second, error feedback included."""
    decode_bytes_per_s: float
    """Bytes of float32 output that are filled per second when a packet is decoded."""


class Codec(ABC):
    """Compresses tensors to packets. Codecs are frozen, equal by value, and printed as at the command line."""

    name: ClassVar[str]
    """The codec's name, as at the command line."""
    linear: ClassVar[bool] = False
    """Whether packets of several ranks may be summed before they are decoded. The codec is then a `LinearCodec`."""
    sparse: ClassVar[bool] = False
    """Whether packets hold some values with their indices, so that their length depends on the values."""

    speed: ClassVar[CodecSpeed] = CodecSpeed(1e9, 5e9)
    """Speed with error feedback, from which the planner predicts the time of encoding and decoding.

    The default is a cautious guess for a codec that has not been measured.
    """

    @property
    def delay(self) -> int:
        """How many steps late what it leaves out is sent, about, with error feedback: learning rates depend on it."""
        return 0

    @property
    def needs_feedback(self) -> bool:
        """Whether the codec works only inside `ErrorFeedback`."""
        return False

    def start(self, numel: int, seed: int = 0, device: torch.device = CPU) -> State:
        """Return the state before the first call, for tensors of `numel` elements.

        Every tensor in it is flat, in float32, with `numel` elements.

        Args:
            seed: seed of the codec's random numbers, if it draws any.
            device: device of the tensors that will be encoded.
        """
        return {}

    @abstractmethod
    def encode(
        self, tensor: Tensor, state: State, *, residual: Tensor | None = None, groups: ScaleGroups | None = None
    ) -> tuple[Packet, State]:
        """Return a packet that encodes `tensor`, and the state for the next call. `tensor` stays as it is.

        Args:
            state: from `start`, or from the previous call.
            residual: what earlier calls lost, flat, in float32. It is added to `tensor` first, and holds what this call
                loses afterwards. Where NaN or infinity is sent, it stays as it was.
            groups: which values share a scale, for codecs that have scales; the rows of `tensor` by default.
        """

    @abstractmethod
    def decode(
        self, packet: Packet, out: Tensor, *, groups: ScaleGroups | None = None, add: bool = False, scale: float = 1.0
    ) -> None:
        """Overwrite `out` with the decoded packet times `scale`, or add that to it.

        Args:
            groups: those that the packet was encoded with.

        Raises:
            PacketError: the packet is not one that this codec makes for such a tensor. `out` is unchanged.
        """

    @abstractmethod
    def packet_bytes(self, numel: int, groups: ScaleGroups | None = None) -> int:
        """Return the length of a packet for `numel` elements with these groups; an estimate for sparse codecs."""

    @abstractmethod
    def __str__(self) -> str: ...


def flat_float32(tensor: Tensor, what: str) -> Tensor:
    """Return the elements of `tensor` as a flat float32 tensor, without a copy if that is possible."""
    if not tensor.is_floating_point():
        raise ConfigError(f"{what} encodes floating-point tensors, got {tensor.dtype}. Convert it first.")
    # Each of these returns the tensor itself where there is nothing to do.
    return tensor.detach().reshape(-1).to(torch.float32).contiguous()


def flat_view(out: Tensor) -> Tensor:
    """Return a flat float32 tensor to decode into: the memory of `out` if possible, otherwise a copy of it."""
    flat = out.detach()
    if flat.dtype == torch.float32 and flat.is_contiguous():
        return flat.view(-1)
    # With its values, not empty: a decoder may add to them.
    return flat.reshape(-1).to(torch.float32).clone()


def copy_back(flat: Tensor, out: Tensor) -> None:
    """Copy what was decoded into `flat_view(out)` to `out`, if it is not the same memory."""
    if flat.data_ptr() != out.data_ptr():
        out.detach().copy_(flat.view(out.shape))


def groups_or_rows(tensor: Tensor, groups: ScaleGroups | None) -> ScaleGroups:
    """Return `groups`, or by default the rows of `tensor`."""
    if groups is None:
        return ScaleGroups.from_shape(tuple(tensor.shape))
    if groups.numel != tensor.numel():
        raise ConfigError(f"scale groups for {groups.numel} elements were given with a tensor of {tensor.numel()}.")
    return groups


TensorLayout = tuple[tuple[int, tuple[int, ...]], ...]
"""Where tensors lie in a flat one: the first element and the shape of each."""

SumRounds = Generator[Tensor, None, State]
"""A generator of tensors that its user sums over ranks, in place, before it asks for the next. It returns the new
state.

The user may divide every one of them by the same number. The result is then divided by that number, once.
"""


@runtime_checkable
class LinearCodec(Protocol):
    """A codec whose packets are summed over ranks without decoding: by all-reduces of short tensors."""

    def rounds(self, values: Tensor, layout: TensorLayout, state: State, residual: Tensor | None = None) -> SumRounds:
        """Replace flat float32 `values` by their approximate sum over ranks, in rounds of short float32 sums."""
        ...

    def round_sizes(self, layout: TensorLayout) -> list[int]:
        """Return how many float32 numbers each round sums."""
        ...
