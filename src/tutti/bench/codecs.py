"""Codecs alone: how fast they encode and decode on one core or one GPU, beside a copy, and what they lose."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tutti.codecs import CODECS as REGISTERED
from tutti.codecs import Cast, Chain, Codec, ErrorFeedback, LowRank, OneBit, Quantize, RandomK, Threshold, TopK
from tutti.errors import ConfigError

CODECS: tuple[Codec, ...] = (
    OneBit(),
    Cast("fp16"),
    Cast("bf16"),
    Cast("fp8"),
    Quantize(8),
    Quantize(4),
    Quantize(2),
    Threshold(),
    TopK(0.01),
    TopK(0.001),
    RandomK(),
    LowRank(),
    Chain(TopK(0.01), Quantize(8)),
)

ROW = 1024
"""Elements of a row of the tensor that is encoded."""
CALLS = {"cpu": 1, "cuda": 10}
"""Calls timed as one; on a GPU several, so that it is not their start that takes the time."""


def measure(device: str, num_bytes: int, rounds: int, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Time every codec, bare and under `ErrorFeedback`, in turns with a copy of the same tensor.

    Args:
        num_bytes: of the tensor in float32; what is not a whole row of it is left out.
        say: told what is done now.

    Returns: `rows`, one for every codec and way, and `copy_s`, the median seconds of a copy of the same `num_bytes`.
    """
    _check(device, num_bytes)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(device, num_bytes // (4 * ROW), rounds, say)
    finally:
        torch.set_num_threads(threads)


def _check(device: str, num_bytes: int) -> None:
    if device not in CALLS:
        raise ConfigError(f"--device takes {' or '.join(CALLS)}, got '{device}'.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here; use --device cpu.")
    if num_bytes < 4 * ROW:
        raise ConfigError(f"--size takes a row of {4 * ROW} bytes or more, got {num_bytes}.")


def _measure(device: str, num_rows: int, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    values = torch.randn(num_rows, ROW, generator=torch.Generator().manual_seed(0)).to(device)
    out = torch.empty_like(values)
    of_packages = [REGISTERED[name]() for name in REGISTERED if name not in REGISTERED.built_in]
    ways = [way for codec in (*CODECS, *of_packages) for way in (codec, ErrorFeedback(codec))]
    trials = []
    for way in ways:
        say(f"compiling and warming up {_label(way)}")
        trials.append(_Trial(way, values, out))
    copies = []
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for trial in trials:
            copies.append(_seconds(lambda: out.copy_(values), values.device))
            trial.round()
    copy_s = statistics.median(copies)
    rows = [trial.row(copy_s) for trial in trials]
    return {"device": device, "threads": 1, "num_bytes": 4 * values.numel(), "copy_s": copy_s, "rows": rows}


class _Trial:
    """One codec on one tensor: its state, and what was measured."""

    def __init__(self, codec: Codec, values: Tensor, out: Tensor) -> None:
        self.codec, self.values, self.out = codec, values, out
        self.state = codec.start(values.numel(), 0, values.device)
        self.samples: dict[str, list[float]] = {"encode": [], "decode": []}
        # The first packet tells what one call loses: later ones say what was left out before, too.
        self._encode()
        self._decode()
        self.error = float((values - out).double().square().sum() / values.double().square().sum())
        self._encode()
        self._decode()

    def round(self) -> None:
        self.samples["encode"].append(_seconds(self._encode, self.values.device))
        self.samples["decode"].append(_seconds(self._decode, self.values.device))

    def row(self, copy_s: float) -> dict[str, Any]:
        seconds = {name: statistics.median(samples) for name, samples in self.samples.items()}
        seconds["both"] = statistics.median(map(sum, zip(*self.samples.values(), strict=True)))
        num_bytes = 4 * self.values.numel()
        return {
            "codec": str(self.codec),
            "feedback": isinstance(self.codec, ErrorFeedback),
            "num_bytes": num_bytes,
            "packet_bytes": self.packet.numel(),
            "ratio": num_bytes / self.packet.numel(),
            "error": self.error,
            "seconds": seconds,
            "gb_per_s": {name: num_bytes / each / 1e9 for name, each in seconds.items()},
            "of_copy": copy_s / seconds["both"],
        }

    def _encode(self) -> None:
        self.packet, self.state = self.codec.encode(self.values, self.state)

    def _decode(self) -> None:
        self.codec.decode(self.packet, self.out)


def _label(codec: Codec) -> str:
    return f"{codec} with feedback" if isinstance(codec, ErrorFeedback) else str(codec)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(CALLS[device.type]):
        call()
    wait()
    return (time.perf_counter() - start) / CALLS[device.type]
