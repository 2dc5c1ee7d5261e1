"""`tutti bench codecs`: the speed and the error of every codec, on one core or one GPU, beside a copy."""

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
"""Elements per row of the tensor that is encoded."""
CALLS = {"cpu": 1, "cuda": 10}
"""Calls that are timed together: several on a GPU, so that launching a kernel does not dominate."""


def measure(
    device: str, num_bytes: int, rounds: int, show: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Time every codec, with and without `ErrorFeedback`, interleaved with a copy of the same tensor.

    Args:
        num_bytes: size of the float32 tensor, rounded down to whole rows.
        show: called with a description of the current activity.

    Returns: `rows`, one per codec with and without feedback, and `copy_s`, the median seconds of a copy.
    """
    _check(device, num_bytes)
    # `Codec.speed`, which the planner uses, is that of one core.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(device, num_bytes // (4 * ROW), rounds, show)
    finally:
        torch.set_num_threads(threads)


def _check(device: str, num_bytes: int) -> None:
    """Refuse devices and sizes that cannot be measured."""
    if device not in CALLS:
        raise ConfigError(f"--device takes {' or '.join(CALLS)}, got '{device}'.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here; use --device cpu.")
    if num_bytes < 4 * ROW:
        raise ConfigError(f"--size takes a row of {4 * ROW} bytes or more, got {num_bytes}.")


def _measure(device: str, num_rows: int, rounds: int, show: Callable[[str], None]) -> dict[str, Any]:
    """Time all codecs in turn, round by round; return their rows and the time of a copy."""
    # Normal values, as gradients roughly are: the error and the length of sparse packets depend on the distribution.
    values = torch.randn(num_rows, ROW, generator=torch.Generator().manual_seed(0)).to(device)
    out = torch.empty_like(values)
    from_plugins = [REGISTERED[name]() for name in REGISTERED if name not in REGISTERED.built_in]
    variants = [variant for codec in (*CODECS, *from_plugins) for variant in (codec, ErrorFeedback(codec))]
    trials = []
    for variant in variants:
        show(f"compiling and warming up {_label(variant)}")
        trials.append(_Trial(variant, values, out))
    copies = []
    for number in range(rounds):
        show(f"round {number + 1} of {rounds}")
        for trial in trials:
            # A copy before every codec: it shows the memory's speed at that moment.
            copies.append(_seconds(lambda: out.copy_(values), values.device))
            trial.round()
    copy_s = statistics.median(copies)
    rows = [trial.row(copy_s) for trial in trials]
    return {"device": device, "threads": 1, "num_bytes": 4 * values.numel(), "copy_s": copy_s, "rows": rows}


class _Trial:
    """One codec on one tensor: its state and its measured times."""

    def __init__(self, codec: Codec, values: Tensor, out: Tensor) -> None:
        self.codec, self.values, self.out = codec, values, out
        self.state = codec.start(values.numel(), 0, values.device)
        self.samples: dict[str, list[float]] = {"encode": [], "decode": []}
        # The error is that of the first call: with error feedback, later packets also contain earlier residuals.
        self._encode()
        self._decode()
        self.error = float((values - out).double().square().sum() / values.double().square().sum())
        # The second call has no compilation left, and is not timed either.
        self._encode()
        self._decode()

    def round(self) -> None:
        """Time one encoding and one decoding."""
        self.samples["encode"].append(_seconds(self._encode, self.values.device))
        self.samples["decode"].append(_seconds(self._decode, self.values.device))

    def row(self, copy_s: float) -> dict[str, Any]:
        """Return the medians of all rounds, for a table and for JSON."""
        seconds = {name: statistics.median(samples) for name, samples in self.samples.items()}
        # Not the sum of the two medians: they may come from different rounds.
        seconds["both"] = statistics.median(map(sum, zip(*self.samples.values(), strict=True)))
        # Of the values as float32, which is what would be sent without a codec.
        num_bytes = 4 * self.values.numel()
        return {
            "codec": str(self.codec),
            "feedback": isinstance(self.codec, ErrorFeedback),
            "num_bytes": num_bytes,
            "packet_bytes": self.packet.numel(),
            "ratio": num_bytes / self.packet.numel(),
            "error": self.error,
            "seconds": seconds,
            "gb_per_s": {name: num_bytes / value / 1e9 for name, value in seconds.items()},
            "of_copy": copy_s / seconds["both"],
        }

    def _encode(self) -> None:
        self.packet, self.state = self.codec.encode(self.values, self.state)

    def _decode(self) -> None:
        self.codec.decode(self.packet, self.out)


def _label(codec: Codec) -> str:
    return f"{codec} with feedback" if isinstance(codec, ErrorFeedback) else str(codec)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call: on a GPU, the mean of several that are waited for together."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()  # What was submitted before must not count.
    start = time.perf_counter()
    for _ in range(CALLS[device.type]):
        call()
    wait()
    return (time.perf_counter() - start) / CALLS[device.type]
