"""Error feedback: what was left out now is said later."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.codecs.base import CPU, Codec, Linear, Packet, Places, Rounds, State
from tutti.codecs.runs import Runs
from tutti.errors import ConfigError


@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """Add what `inner` left out last time to what it is given now (Seide et al. 2014)."""

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

    def start(self, numel: int, seed: int = 0, device: torch.device = CPU) -> State:
        return {
            **self.inner.start(numel, seed, device),
            "residual": torch.zeros(numel, dtype=torch.float32, device=device),
        }

    def encode(
        self, tensor: Tensor, state: State, *, residual: Tensor | None = None, runs: Runs | None = None
    ) -> tuple[Packet, State]:
        if residual is not None:
            raise ConfigError("ErrorFeedback keeps its own residual, in its state.")
        kept = state.get("residual")
        if kept is None or kept.numel() != tensor.numel():
            of = "none" if kept is None else f"one for {kept.numel()}"
            raise ConfigError(
                f"a tensor of {tensor.numel()} elements needs a state for as many, got {of}: make it by "
                f"start({tensor.numel()}), and hand in what the call before handed back."
            )
        packet, inner = self.inner.encode(tensor, state, residual=kept, runs=runs)
        return packet, {**inner, "residual": kept}

    def decode(
        self, packet: Packet, out: Tensor, *, runs: Runs | None = None, add: bool = False, scale: float = 1.0
    ) -> None:
        self.inner.decode(packet, out, runs=runs, add=add, scale=scale)

    def packet_bytes(self, numel: int, runs: Runs | None = None) -> int:
        return self.inner.packet_bytes(numel, runs)

    def rounds(self, values: Tensor, places: Places, state: State, residual: Tensor | None = None) -> Rounds:
        assert isinstance(self.inner, Linear)
        assert residual is None
        kept = state["residual"]
        inner = yield from self.inner.rounds(values, places, state, kept)
        return {**inner, "residual": kept}

    def round_sizes(self, places: Places) -> list[int]:
        assert isinstance(self.inner, Linear)
        return self.inner.round_sizes(places)

    def __str__(self) -> str:
        return str(self.inner)
