"""Strategies of local steps: `Averaging`, `BlockMomentum` and `DiLoCo`, with the texts that make them."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal, get_args

from tutti.codecs import Codec, ErrorFeedback, OneBit, print_codec
from tutti.cost import CommunicationCost, Placement, Profile
from tutti.errors import ConfigError
from tutti.replica import Replica
from tutti.strategies.allreduce import AllReduce
from tutti.strategies.averaging.block_schedule import Every, check_every, check_share, duration_text, read_every
from tutti.strategies.averaging.cost import communication_cost
from tutti.strategies.averaging.exchange import BlockExchange
from tutti.strategies.averaging.outer_optimizer import PLAIN_AVERAGE, OuterStep
from tutti.strategies.base import Exchange, Strategy
from tutti.strategies.compatibility import Support
from tutti.strategies.rates import SAME_RATE, LearningRateRule, local_steps_rule
from tutti.transports import Transport

OptimizerState = Literal["keep", "average", "reset"]


@dataclass(frozen=True)
class LocalSteps(Strategy):
    """The base of strategies whose workers take local steps and combine their models at the end of every block.

    Args:
        every: Steps in a block. "2s" or a timedelta makes blocks of that duration, in which fast workers take more
            steps and count for more. "auto" keeps communication below `share` of the time. "end" combines the models
            once, when the job finishes.
        codec: Compresses the change of a block, such as `ErrorFeedback(OneBit())`; None sends it exactly.
        overlap: Whether the exchange of a block runs while the next block is computed, at whose end it takes effect.
        optimizer_state: What happens to each worker's optimiser state (momentum, second moments) at the end of a
            block: "keep" leaves it alone, "average" averages it, which sends as many bytes again for each state
            tensor, "reset" clears it.
        share: The largest share of the time that communication may take, for `every="auto"`.
        bucket_bytes: Bytes of parameters that are sent together.
    """

    preference = 3

    every: Every = 16
    codec: Codec | None = field(default=None, kw_only=True)
    overlap: bool = field(default=False, kw_only=True)
    optimizer_state: OptimizerState = field(default="keep", kw_only=True)
    share: float = field(default=0.1, kw_only=True)
    bucket_bytes: int = field(default=4 * 2**20, kw_only=True)

    exact_below = 1024
    """With a codec, parameters with fewer elements than this are sent exactly."""

    def __post_init__(self) -> None:
        if isinstance(self.every, timedelta):  # One text for one duration: strategies are equal by value.
            object.__setattr__(self, "every", duration_text(self.every))
        mistakes = [*check_every(self.every), *check_share(self.share), *self._option_mistakes()]
        if self.codec is not None and not isinstance(self.codec, Codec):
            mistakes.append(f"codec must be an object such as ErrorFeedback(OneBit()), got {self.codec!r}")
        elif self.codec is not None and self.codec.needs_feedback:
            mistakes.append(f"{self.codec!r} works only with error feedback: wrap it in ErrorFeedback(...)")
        if not isinstance(self.overlap, bool):
            mistakes.append(f"overlap must be True or False, got {self.overlap!r}")
        if self.optimizer_state not in get_args(OptimizerState):
            wanted = ", ".join(get_args(OptimizerState))
            mistakes.append(f"optimizer_state must be one of {wanted}, got {self.optimizer_state!r}")
        elif self.overlap and self.optimizer_state != "keep":
            mistakes.append("overlap continues to step while models are exchanged, so optimizer_state must be 'keep'")
        if self.bucket_bytes < 1:
            mistakes.append(f"bucket_bytes must be 1 or more, got {self.bucket_bytes}")
        if mistakes:
            raise ConfigError(f"{type(self).__name__}: {'; '.join(mistakes)}.")

    def _option_mistakes(self) -> list[str]:
        """Return what is wrong with the options that a subclass adds."""
        return []

    @abstractmethod
    def outer(self, num_workers: int) -> OuterStep:
        """Return the outer step that the mean change of `num_workers` workers takes."""

    @property
    def exact(self) -> bool:
        return False

    def learning_rate(self, num_workers: int) -> LearningRateRule:
        outer = self.outer(num_workers)
        # The sum of the geometric series lr × (1 + m + m² + …): how far one mean change moves the parameters in the
        # end.
        distance = outer.lr / (1 - outer.momentum)
        if num_workers == 1 or (self.every == 1 and distance <= 1):
            return SAME_RATE  # Workers never differ, or are brought together in every step.
        return local_steps_rule(distance)

    @property
    def synchronous_start(self) -> Strategy:
        return AllReduce()

    @property
    def steps_per_exchange(self) -> int | None:
        return self.every if isinstance(self.every, int) else None

    def cost(self, profile: Profile, placement: Placement) -> CommunicationCost:
        return communication_cost(self, profile, placement)

    def support(self, technique: str) -> Support:
        if technique == "LBFGS":
            return Support(
                "adapts",
                "each rank estimates the curvature from its own gradients, and does not know that the mean at the end "
                "of a block moved it.",
            )
        return super().support(technique)

    def attach(self, replica: Replica, transport: Transport) -> Exchange:
        return BlockExchange(replica, transport, self, self.outer(transport.size))

    def _text(self, name: str, default: "LocalSteps") -> str:
        """Return the strategy as text: `every`, the options that differ from `default`, and the codec."""
        # `every` always comes first and the codec after a plus sign; neither is among the comma-separated options.
        keys = [option.name for option in fields(self) if option.name not in ("every", "codec")]
        changed = [(key, getattr(self, key)) for key in keys if getattr(self, key) != getattr(default, key)]
        options = [f"every={self.every}", *(f"{key}={_printed(value)}" for key, value in changed)]
        return f"{name}:{','.join(options)}" + ("" if self.codec is None else f"+{print_codec(self.codec)}")


@dataclass(frozen=True)
class Averaging(LocalSteps):
    """Average the parameters of all workers at the end of every block, weighted by samples.

    `every="end"` is ParallelSGD (Zinkevich et al. 2010); `every=1` with plain SGD is `AllReduce`.
    """

    def outer(self, num_workers: int) -> OuterStep:
        return PLAIN_AVERAGE

    def candidates(self, profile: Profile, placement: Placement) -> Iterator[Strategy]:
        # The planner compares times only, and would always prefer longer blocks, which cost accuracy.
        yield from (Averaging(16, overlap=overlap) for overlap in (False, True))

    def __str__(self) -> str:
        return self._text("averaging", Averaging())


@dataclass(frozen=True)
class BlockMomentum(LocalSteps):
    """Blockwise model-update filtering (BMUF): the mean change of a block moves the parameters with momentum.

    With G the mean change of the workers in a block, Δ = momentum · Δ + lr · G and W = W + Δ (Chen & Huo 2016). With
    Nesterov momentum, the default here and in CNTK, and AdamW as the local optimiser, this is what is now called
    DiLoCo (Douillard et al. 2023).

    Args:
        momentum: From 0 to below 1. The default is 1 - 1/N for N workers, as in CNTK: in the long run, a block of N
            workers then moves the parameters as far as N blocks of one worker.
        lr: The learning rate of the outer step: how much of G counts.
        nesterov: Whether a block starts from where the momentum would lead. Without it, a coarse codec costs
            accuracy.
    """

    momentum: float | None = None
    lr: float = 1.0
    nesterov: bool = True

    def _option_mistakes(self) -> list[str]:
        mistakes = []
        if self.momentum is not None and not 0 <= self.momentum < 1:
            mistakes.append(f"momentum must be 0 or more and below 1, got {self.momentum}")
        if not isinstance(self.nesterov, bool):
            mistakes.append(f"nesterov must be True or False, got {self.nesterov!r}")
        if not 0 < self.lr < float("inf"):
            mistakes.append(f"lr must be above 0, got {self.lr}")
        return mistakes

    def outer(self, num_workers: int) -> OuterStep:
        # Momentum m moves the parameters 1 / (1 - m) = N times as far as one step, in the long run.
        momentum = 1 - 1 / num_workers if self.momentum is None else self.momentum
        return OuterStep(momentum, self.lr, self.nesterov)

    def candidates(self, profile: Profile, placement: Placement) -> Iterator[Strategy]:
        for overlap in (False, True):
            for codec in (None, ErrorFeedback(OneBit())):
                yield BlockMomentum(16, overlap=overlap, codec=codec)
                yield DiLoCo(100, overlap=overlap, codec=codec)

    def __str__(self) -> str:
        # There is no class DiLoCo, so the settings decide which name is printed.
        like_diloco = (self.momentum, self.lr, self.nesterov) == _DILOCO
        return self._text("diloco", DiLoCo()) if like_diloco else self._text("bmuf", BlockMomentum())


_DILOCO = (0.9, 0.7, True)
"""Momentum, learning rate and Nesterov of DiLoCo; a `BlockMomentum` with these prints as "diloco"."""


def DiLoCo(every: Every = 100, **options: Any) -> BlockMomentum:  # Named like a class, because it constructs one.
    """Return `BlockMomentum` with the settings of Douillard et al. (2023): Nesterov momentum 0.9, learning rate 0.7.

    Use AdamW as the local optimiser. `options` are those of `BlockMomentum`.
    """
    momentum, lr, nesterov = _DILOCO
    return BlockMomentum(every, **{"momentum": momentum, "lr": lr, "nesterov": nesterov, **options})


def _printed(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _switch(text: str) -> bool:
    """Return whether a text is "1". Raises `ValueError` if it is neither "0" nor "1"."""
    # `index` raises the `ValueError` for all other texts.
    return bool(("0", "1").index(text))


_KINDS: dict[str, Callable[[str], Any]] = {
    "every": read_every,
    "overlap": _switch,
    "optimizer_state": str,
    "share": float,
    "bucket_bytes": int,
}
_MOMENTUM: dict[str, Callable[[str], Any]] = {**_KINDS, "momentum": float, "lr": float, "nesterov": _switch}


def _reader(
    name: str, make: Callable[..., LocalSteps], kinds: dict[str, Callable[[str], Any]]
) -> Callable[[dict[str, str], Codec | None], LocalSteps]:
    """Return a function that makes a strategy from the options of a text."""

    def read(options: dict[str, str], codec: Codec | None) -> LocalSteps:
        if unknown := options.keys() - kinds.keys():
            raise ConfigError(
                f"{name}: '{min(unknown)}' is not an option; it takes {', '.join(f'{key}=' for key in kinds)}."
            )
        values = {}
        for key, text in options.items():
            try:
                values[key] = kinds[key](text)
            except ValueError:
                wanted = {int: "a whole number", float: "a number"}.get(kinds[key], "0 or 1")  # type: ignore[call-overload]
                raise ConfigError(f"{name}: {key}= takes {wanted}, got '{text}'.") from None
        return make(**values, codec=codec)

    return read


READERS = {
    "averaging": _reader("averaging", Averaging, _KINDS),
    "bmuf": _reader("bmuf", BlockMomentum, _MOMENTUM),
    "diloco": _reader("diloco", DiLoCo, _MOMENTUM),
}
"""By name in texts: functions from options and a codec to the strategy."""
