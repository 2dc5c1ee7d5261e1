"""`ErrorFeedback`: what a codec loses in one call is added to the next (Seide et al. 2014)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.codecs.base import CPU, Codec, CodecSpeed, LinearCodec, Packet, State, SumRounds, TensorLayout
from tutti.codecs.scale_groups import ScaleGroups
from tutti.errors import ConfigError


@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """Adds what `inner` lost in earlier calls to the tensor of this one (Seide et al. 2014).

    Nothing is lost for good: over any number of calls, decoded packets and the residual add up to the tensors, to
    rounding. The residual is in the state, under "residual". Codecs subtract what they send in the same pass that
    encodes it.
    """

    inner: Codec
    name = "feedback"

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Codec) or isinstance(self.inner, ErrorFeedback):
            raise ConfigError(f"ErrorFeedback wraps a codec such as OneBit(), got {self.inner!r}.")

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return self.inner.linear

    @property
    def sparse(self) -> bool:  # type: ignore[override]
        return self.inner.sparse

    @property
    def delay(self) -> int:
        return self.inner.delay

    @property
    def speed(self) -> CodecSpeed:  # type: ignore[override]
        return self.inner.speed  # Speeds are measured with error feedback.

    def start(self, numel: int, seed: int = 0, device: torch.device = CPU) -> State:
        return {
            **self.inner.start(numel, seed, device),
            "residual": torch.zeros(numel, dtype=torch.float32, device=device),
        }

    def encode(
        self, tensor: Tensor, state: State, *, residual: Tensor | None = None, groups: ScaleGroups | None = None
    ) -> tuple[Packet, State]:
        if residual is not None:
            raise ConfigError("ErrorFeedback keeps its own residual, in its state.")
        memory = state.get("residual")
        if memory is None or memory.numel() != tensor.numel():
            got = "none" if memory is None else f"one for {memory.numel()}"
            raise ConfigError(
                f"a tensor of {tensor.numel()} elements needs a state for as many, got {got}: make it by "
                f"start({tensor.numel()}), and pass in what the previous call returned."
            )
        # The inner codec updates `memory` in place.
        packet, inner = self.inner.encode(tensor, state, residual=memory, groups=groups)
        return packet, {**inner, "residual": memory}

    def decode(
        self, packet: Packet, out: Tensor, *, groups: ScaleGroups | None = None, add: bool = False, scale: float = 1.0
    ) -> None:
        self.inner.decode(packet, out, groups=groups, add=add, scale=scale)

    def packet_bytes(self, numel: int, groups: ScaleGroups | None = None) -> int:
        return self.inner.packet_bytes(numel, groups)

    def rounds(self, values: Tensor, layout: TensorLayout, state: State, residual: Tensor | None = None) -> SumRounds:
        assert isinstance(self.inner, LinearCodec)
        assert residual is None
        memory = state["residual"]
        inner = yield from self.inner.rounds(values, layout, state, memory)
        return {**inner, "residual": memory}

    def round_sizes(self, layout: TensorLayout) -> list[int]:
        assert isinstance(self.inner, LinearCodec)
        return self.inner.round_sizes(layout)

    def __str__(self) -> str:
        return str(self.inner)
