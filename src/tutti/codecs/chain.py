"""`Chain`: one codec selects values, another compresses them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.codecs.base import CPU, Codec, CodecSpeed, Packet, State
from tutti.codecs.feedback import ErrorFeedback
from tutti.codecs.indices import index_bytes
from tutti.codecs.packet import HEADER
from tutti.codecs.scale_groups import ScaleGroups
from tutti.codecs.topk import TopK, pack, put, unpack
from tutti.errors import ConfigError


@dataclass(frozen=True)
class Chain(Codec):
    """Selects values with `first` and compresses them with `second`: `Chain(TopK(0.01), Quantize(8))`.

    The error of `second` on the selected values stays in the residual, beside the values that `first` left out.
    """

    first: TopK
    second: Codec
    name = "chain"
    sparse = True
    speed = CodecSpeed(2.7e9, 12e9)

    def __post_init__(self) -> None:
        dense = isinstance(self.second, Codec) and not (self.second.sparse or self.second.linear)
        if not isinstance(self.first, TopK) or not dense or isinstance(self.second, ErrorFeedback):
            raise ConfigError(
                "Chain joins one that selects values and one that compresses values, such as "
                f"Chain(TopK(), Quantize()); got Chain({self.first!r}, {self.second!r})."
            )

    @property
    def delay(self) -> int:
        return max(self.first.delay, self.second.delay)

    @property
    def needs_feedback(self) -> bool:
        return self.first.needs_feedback

    def start(self, numel: int, seed: int = 0, device: torch.device = CPU) -> State:
        # For 0 elements: the second codec gets other values in each call, so it has no state per element.
        second = self.second.start(0, seed, device)
        return {**self.first.start(numel, seed, device), **{f"second.{key}": value for key, value in second.items()}}

    def encode(
        self, tensor: Tensor, state: State, *, residual: Tensor | None = None, groups: ScaleGroups | None = None
    ) -> tuple[Packet, State]:
        indices, chosen, state = self.first.select(tensor, state, residual)
        error = torch.zeros_like(chosen) if residual is not None else None
        # States of both codecs share one dict; those of the second have a prefix.
        inner_state = {key.removeprefix("second."): value for key, value in state.items() if key.startswith("second.")}
        # `error` starts at zero and then holds what the second codec lost of the chosen values.
        inner, inner_state = self.second.encode(chosen, inner_state, residual=error)
        if residual is not None and error is not None:
            finite = chosen.isfinite()
            if not bool(finite.all()):  # The receiver can use none of it, so all of it stays owed.
                error = chosen
            # `select` has set the residual to zero where values were chosen: now it holds their error.
            residual.scatter_(0, indices[finite].long(), error[finite])
        return pack(indices, inner, tensor.numel()), {**state, **{f"second.{k}": v for k, v in inner_state.items()}}

    def decode(
        self, packet: Packet, out: Tensor, *, groups: ScaleGroups | None = None, add: bool = False, scale: float = 1.0
    ) -> None:
        indices, inner = unpack(packet, out.numel())
        values = torch.empty(len(indices), dtype=torch.float32, device=out.device)
        self.second.decode(inner, values, scale=scale)
        put(indices, values, out, add)

    def packet_bytes(self, numel: int, groups: ScaleGroups | None = None) -> int:
        count = round(self.first.density * numel)
        return HEADER.size + 8 + self.second.packet_bytes(count) + index_bytes(numel, self.first.density)

    def __str__(self) -> str:
        return f"{self.first}+{self.second}"
