"""The `ParameterServer` strategy, and its text at the command line (`ps:ssp=3,servers=1+onebit`)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tutti.codecs import Codec, ErrorFeedback, OneBit, print_codec
from tutti.cost import CommunicationCost, Placement, Profile
from tutti.errors import ConfigError
from tutti.replica import Replica
from tutti.strategies.base import Exchange, Strategy
from tutti.strategies.compatibility import Support
from tutti.strategies.parameter_server.consistency import (
    BSP,
    SSP,
    Async,
    Consistency,
    SoftSync,
    StalenessAware,
)
from tutti.strategies.parameter_server.cost import communication_cost
from tutti.strategies.parameter_server.messages.group import join_group
from tutti.strategies.parameter_server.messages.server import Server
from tutti.strategies.parameter_server.messages.worker import MessageWorker
from tutti.strategies.parameter_server.support import SUPPORT
from tutti.strategies.rates import SAME_RATE, LearningRateRule, compression_rule
from tutti.transports import SharesAll, Transport
from tutti.transports.base import Operation


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Workers push gradients to servers, which run the optimiser, and pull parameters (Li et al. 2014).

    Args:
        consistency: how far workers may drift apart: `BSP()`, `SSP(staleness)`, `SoftSync(count)`, `Async()`, or
            `StalenessAware` around one of them.
        servers: "colocated" lets every rank serve some shards; a number makes that many ranks, the last ones,
            dedicated servers.
        codec: compresses pushed gradients, such as `ErrorFeedback(OneBit())`; pulls are exact.
        overlap: push while backward runs, and let each module wait for its own parameters only, in its forward pass.
            Without it `optimizer.step()` pushes the gradients, which the user may change before, and returns when all
            parameters are pulled.
        clip: the largest norm of the gradient that the optimiser gets. Under `BSP` and `SSP` it limits the mean over
            workers; under `SoftSync` and `Async` each update.
        bucket_bytes: size of a bucket: the gradients that are pushed together, each server getting a shard of them.
        factors: push the gradients of linear layers as sufficient factors, where those are smaller; servers multiply.
        copies: 2 keeps a copy of each shard on another server, from which training goes on if one is lost. By default
            that is done under `BSP` where workers may come and go, and not elsewhere.
    """

    preference = 2

    consistency: Consistency = field(default_factory=BSP)
    servers: int | Literal["colocated"] = "colocated"
    codec: Codec | None = None
    overlap: bool = True
    clip: float | None = None
    bucket_bytes: int = 4 * 2**20
    factors: bool = False
    copies: int | None = None

    exact_below = 1024
    """With a codec, gradients of parameters with fewer elements are still sent exactly."""

    def __post_init__(self) -> None:
        mistakes = []
        if not isinstance(self.consistency, Consistency):
            mistakes.append(f"consistency must be an object such as SSP(3), got {self.consistency!r}")
        if self.servers != "colocated" and (isinstance(self.servers, str) or self.servers < 1):
            mistakes.append(
                f"servers must be 'colocated' or a number of dedicated servers, 1 or more, got {self.servers!r}"
            )
        if self.codec is not None and not isinstance(self.codec, Codec):
            mistakes.append(f"codec must be an object such as ErrorFeedback(OneBit()), got {self.codec!r}")
        elif self.codec is not None and self.codec.needs_feedback:
            mistakes.append(f"{self.codec!r} loses what it leaves out: wrap it in ErrorFeedback(...)")
        elif self.codec is not None and self.codec.linear:
            mistakes.append(
                f"{self.codec!r} compresses sums over workers, but servers get single gradients; use AllReduce with it"
            )
        if self.clip is not None and not 0 < self.clip < float("inf"):
            mistakes.append(f"clip must be a norm above 0, got {self.clip}")
        if self.bucket_bytes < 1:
            mistakes.append(f"bucket_bytes must be 1 or more, got {self.bucket_bytes}")
        if not isinstance(self.factors, bool):
            mistakes.append(f"factors must be True or False, got {self.factors!r}")
        elif self.factors and self.codec is not None:
            mistakes.append("factors are exact and take no codec")
        elif self.factors and not self.overlap:
            mistakes.append("factors are pushed while backward runs: they need overlap=True")
        mistakes += _copies_mistakes(self.copies, self.servers)
        if mistakes:
            raise ConfigError(f"ParameterServer: {'; '.join(mistakes)}.")

    def roles(self, size: int) -> tuple[list[int], list[int]]:
        """Return the ranks that train and the ranks that serve, in a world of that size."""
        num_servers = size if self.servers == "colocated" else self.servers
        assert isinstance(num_servers, int)
        if self.servers != "colocated" and num_servers >= size:
            raise ConfigError(
                f"ParameterServer: {num_servers} dedicated servers in a world of {size} ranks leave nobody to train. "
                f"Use {size - 1} or fewer, 'colocated', or more ranks."
                if size > 1
                else "ParameterServer: a dedicated server needs a second rank to train. Start more, or use 'colocated'."
            )
        num_workers = size if self.servers == "colocated" else size - num_servers
        # Servers are the last ranks, so that workers have the ranks 0 to N - 1.
        return list(range(num_workers)), list(range(size - num_servers, size))

    @property
    def clips_updates(self) -> bool:
        """Whether each update is clipped by its own norm, which must be known before it is pushed."""
        return self.clip is not None and self.consistency.bound is None

    @property
    def clips_means(self) -> bool:
        """Whether the mean over workers is clipped, so that all shards are stepped together."""
        return self.clip is not None and self.consistency.bound is not None

    @property
    def mistake_in_fixed_world(self) -> str:
        if self.copies != 2:
            return ""
        return (
            f"'{self}' keeps copies of what servers hold, from which training goes on with other workers, but this run "
            "ends with its first loss of a server. Let workers come and go (tutti run --workers MIN:MAX), or leave "
            "copies out."
        )

    def check_size(self, size: int) -> None:
        if self.copies == 2 and len(self.roles(size)[1]) < 2:
            raise ConfigError(
                "ParameterServer: copies=2 needs 2 servers or more, and a world of 1 rank has one. Use more ranks, or "
                "leave copies out."
            )
        num_workers, quorum = len(self.roles(size)[0]), self.consistency.quorum
        # Only at the start: where workers are lost later, one update of each that is left makes a version.
        if self.consistency.bound is None and quorum > num_workers:
            raise ConfigError(
                f"SoftSync({quorum}) needs {quorum} workers, and there are {num_workers}. "
                f"Use SoftSync({num_workers}) or less, or more ranks."
            )

    @property
    def exact(self) -> bool:
        return self.codec is None and self.consistency == BSP()

    def cost(self, profile: Profile, placement: Placement) -> CommunicationCost:
        return communication_cost(self, profile, placement)

    def candidates(self, profile: Profile, placement: Placement) -> Iterator[Strategy]:
        yield ParameterServer(BSP())
        yield ParameterServer(BSP(), servers=1)
        for rule in (SSP(3), Async()):
            yield from (ParameterServer(rule, codec=codec) for codec in (None, ErrorFeedback(OneBit())))

    def learning_rate(self, num_workers: int) -> LearningRateRule:
        rule = self.consistency.learning_rate(num_workers)
        # With a start, which is exact, the rates behind it are low enough for what a codec sends late.
        return compression_rule(self.codec) if rule == SAME_RATE and num_workers > 1 else rule

    @property
    def synchronous_start(self) -> "ParameterServer | None":
        is_exact = self.consistency.bound == 0 and self.codec is None
        return None if is_exact else replace(self, consistency=BSP(), codec=None)

    def starts_in_place(self, transport: Transport) -> bool:
        # Without a bound, workers in shared memory apply their own updates: nothing there makes one step of them all.
        return self.consistency.bound is not None or not _shares_memory(self, transport)

    @property
    def steps_by_mean_gradient(self) -> bool:
        return self.consistency.bound is not None

    @property
    def synchronous(self) -> bool:
        return False  # A worker may be lost between steps, and the others go on.

    @property
    def needs_all_ranks(self) -> bool:
        return self.consistency.bound == 0

    @property
    def num_dedicated_servers(self) -> int:
        return 0 if self.servers == "colocated" else self.servers

    def support(self, technique: str) -> Support:
        return SUPPORT.get(technique) or super().support(technique)

    def attach(self, replica: Replica, transport: Transport) -> Exchange:
        if _shares_memory(self, transport):
            # Imported here, because these modules import a compiler (numba), which takes seconds.
            from tutti.strategies.parameter_server.shared_memory.hogwild import HogwildWorker
            from tutti.strategies.parameter_server.shared_memory.worker import SharedMemoryWorker

            # Without locks every worker steps the shared parameters with its own optimiser, and nothing is pushed.
            return (SharedMemoryWorker if self.consistency.locks else HogwildWorker)(replica, transport, self)  # type: ignore[arg-type]
        return MessageWorker(replica, transport, self)

    def serve(self, replica: Replica, transport: Transport) -> None:
        group = join_group(replica, transport, self)
        # Without a deadline: workers may train for as long as they like.
        group.transport.spawn(_until_over(group.start_server(replica)), deadline=False).wait()

    def __str__(self) -> str:
        options = [str(self.consistency)]
        if self.servers != "colocated":
            options.append(f"servers={self.servers}")
        if not self.overlap:
            options.append("overlap=0")
        if self.clip is not None:
            options.append(f"clip={self.clip}")
        if self.bucket_bytes != type(self).bucket_bytes:
            options.append(f"bucket_bytes={self.bucket_bytes}")
        if self.factors:
            options.append("factors=1")
        if self.copies is not None:
            options.append(f"copies={self.copies}")
        codec = "" if self.codec is None else f"+{print_codec(self.codec)}"
        return f"ps:{','.join(options)}{codec}"


def _shares_memory(strategy: ParameterServer, transport: Transport) -> bool:
    """Whether workers step the parameters themselves, in memory that they share."""
    # Only where all ranks share memory. Dedicated servers, codecs and copies need messages, also on one host.
    in_memory = strategy.servers == "colocated" and strategy.codec is None and strategy.copies != 2
    return in_memory and isinstance(transport, SharesAll)


def _copies_mistakes(copies: Any, servers: Any) -> list[str]:
    """Return what is wrong with a number of copies."""
    if copies not in (None, 1, 2) or isinstance(copies, bool):
        return [f"copies must be 1, or 2 to keep each shard on two servers, got {copies!r}; more are not supported"]
    if copies == 2 and servers == 1:
        return ["copies=2 needs 2 servers or more, got servers=1"]
    return []


_CONSISTENCIES = (
    "bsp, ssp=3 (or ssp=3,eager), softsync=4 or async (or async,locks), with aware after it to scale stale updates down"
)


def read(options: dict[str, str], codec: Codec | None) -> ParameterServer:
    """Return the strategy that options at the command line describe."""
    rest = dict(options)
    # 1. The consistency: names that stand alone, then those that have a number.
    named: list[Consistency] = []
    for name in ("bsp", "async"):
        if name in rest:
            if rest.pop(name):
                raise ConfigError(f"ps: {name} takes no number. It is {_CONSISTENCIES}.")
            # An option without a number has an empty text: "async,locks" gives {"async": "", "locks": ""}.
            named.append(BSP() if name == "bsp" else Async(locks=rest.pop("locks", None) == ""))
    if "ssp" in rest:
        named.append(SSP(_number("ssp", rest.pop("ssp"), int), eager=rest.pop("eager", None) == ""))
    if "softsync" in rest:
        named.append(SoftSync(_number("softsync", rest.pop("softsync"), int)))
    if len(named) > 1:
        raise ConfigError(f"ps: more than one rule, {', '.join(map(str, named))}. It is one of {_CONSISTENCIES}.")
    consistency = named[0] if named else BSP()
    if "aware" in rest:
        if rest.pop("aware"):
            raise ConfigError(
                "ps: aware takes nothing at the command line; in Python, StalenessAware takes a function."
            )
        consistency = StalenessAware(consistency)
    # 2. All other options, each with a value.
    kinds: dict[str, Callable[[str], Any]] = {
        "servers": int,
        "overlap": _switch,
        "clip": float,
        "bucket_bytes": int,
        "factors": _switch,
        "copies": int,
    }
    if unknown := rest.keys() - kinds.keys():
        others = ", ".join(f"{key}=NUMBER" for key in kinds)
        raise ConfigError(f"ps: '{min(unknown)}' is none of its options: {_CONSISTENCIES}; {others}.")
    numbers = {key: _number(key, value, kinds[key]) for key, value in rest.items()}
    return ParameterServer(consistency, codec=codec, **numbers)


def _number(key: str, text: str, kind: Callable[[str], Any]) -> Any:
    """Convert the text of an option. Raises `ConfigError` that names the option and what it takes."""
    try:
        return kind(text)
    except ValueError:
        wanted = {int: "a whole number", float: "a number"}.get(kind, "0 or 1")  # type: ignore[call-overload]
        raise ConfigError(f"ps: {key}= takes {wanted}, got '{text}'.") from None


def _switch(text: str) -> bool:
    """Return whether a text is "1". Raises `ValueError` if it is neither "0" nor "1"."""
    return bool(("0", "1").index(text))


def _until_over(server: Server) -> Operation:
    """Wait until a server has served its last worker; raise its error if it has failed."""
    yield server.over
    if server.failure is not None:
        raise server.failure
