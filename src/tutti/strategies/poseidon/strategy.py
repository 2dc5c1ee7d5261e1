"""`Poseidon`, the strategy: its options, and the text that makes it."""

from dataclasses import dataclass
from typing import Literal, get_args

from torch.optim import Optimizer

from tutti.cluster import Link
from tutti.codecs import Codec
from tutti.cost import CommunicationCost, Placement, Profile
from tutti.errors import ConfigError
from tutti.replica import Replica
from tutti.strategies.allreduce import AllReduce
from tutti.strategies.base import Exchange, Strategy
from tutti.strategies.compatibility import SPARSE_GRADIENTS, Support
from tutti.strategies.parameter_server import Consistency, ParameterServer
from tutti.strategies.parameter_server import read as read_servers
from tutti.strategies.poseidon.cost import communication_cost
from tutti.strategies.poseidon.exchange import PoseidonExchange
from tutti.strategies.poseidon.rule import bucket_bytes_on
from tutti.strategies.rates import LearningRateRule
from tutti.transports import Transport

Rule = Literal["priced", "sacp", "broadcast", "owners", "full"]
"""How methods are chosen: by predicted time, by the published rule (SACP), or one method for all layers."""

_RULES: tuple[Rule, ...] = get_args(Rule)


@dataclass(frozen=True)
class Poseidon(Strategy):
    """In every step, every rank gets the mean of all gradients, each layer's by the cheapest method for its shape.

    The gradient of a linear layer is a product of two matrices with one row per row of the batch. Where these
    sufficient factors are smaller, they are sent instead, and every rank multiplies (Zhang et al. 2015). The result
    equals that of `AllReduce`, except for the order of additions.

    Args:
        rule: "priced" takes the method that is fastest on the measured link; "sacp" is the published rule, which sends
            factors to all or to owners; "broadcast", "owners" and "full" use one method for all layers.
        overlap: exchange upper layers while backward computes lower ones (wait-free backpropagation). Without it the
            exchange starts when backward is over.
        bucket_bytes: bytes of a bucket of gradients that are sent in full. None, with the "priced" rule, is as small as
            the link's latency allows, so that more of a small model is sent before backward is over.
        consistency: such as `SSP(2)`: use parameter servers instead of all-reduce. Factors are pushed to them where
            they are smaller than gradients, and there is no rule.
    """

    preference = 1

    rule: Rule = "priced"
    overlap: bool = True
    bucket_bytes: int | None = None
    consistency: Consistency | None = None

    def __post_init__(self) -> None:
        mistakes = []
        if self.rule not in _RULES:
            mistakes.append(f"rule '{self.rule}' is not one of {', '.join(_RULES)}")
        if not isinstance(self.overlap, bool):
            mistakes.append(f"overlap must be True or False, got {self.overlap!r}")
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            mistakes.append(f"bucket_bytes must be 1 or more, got {self.bucket_bytes}")
        if self.consistency is not None and not isinstance(self.consistency, Consistency):
            mistakes.append(f"consistency must be an object such as SSP(2), got {self.consistency!r}")
        elif self.consistency is not None and self.rule != "priced":
            mistakes.append(f"with servers, factors are sent wherever they are smaller: leave out rule '{self.rule}'")
        elif self.consistency is not None and not self.overlap:
            mistakes.append("with servers, factors are pushed while backward runs: overlap cannot be turned off")
        if mistakes:
            raise ConfigError(f"Poseidon: {'; '.join(mistakes)}.")

    def in_full(self, link: Link | None = None) -> AllReduce:
        """Return the all-reduce for layers that are sent in full, with buckets that suit the link, if it is known."""
        return AllReduce(bucket_bytes=self.bucket_bytes or bucket_bytes_on(link))

    @property
    def servers(self) -> ParameterServer | None:
        """The parameter-server strategy that is used if `consistency` is given."""
        if self.consistency is None:
            return None
        return ParameterServer(self.consistency, bucket_bytes=self.bucket_bytes or bucket_bytes_on(None), factors=True)

    @property
    def exact(self) -> bool:
        return self.servers is None or self.servers.exact

    @property
    def averages_gradients(self) -> bool:
        return self.servers is None

    def cost(self, profile: Profile, placement: Placement) -> CommunicationCost:
        if self.servers is not None:
            return self.servers.cost(profile, placement)
        return communication_cost(self, profile, placement)

    def learning_rate(self, num_workers: int) -> LearningRateRule:
        return super().learning_rate(num_workers) if self.servers is None else self.servers.learning_rate(num_workers)

    @property
    def synchronous_start(self) -> Strategy | None:
        return None if self.servers is None else self.servers.synchronous_start

    def starts_in_place(self, transport: Transport) -> bool:
        return self.servers is not None and self.servers.starts_in_place(transport)

    @property
    def steps_by_mean_gradient(self) -> bool:
        return self.servers is None or self.servers.steps_by_mean_gradient

    @property
    def synchronous(self) -> bool:
        return self.servers is None

    @property
    def needs_all_ranks(self) -> bool:
        return self.servers is None or self.servers.needs_all_ranks

    def check_size(self, size: int) -> None:
        if self.servers is not None:
            self.servers.check_size(size)

    def mistakes(self, optimizer: Optimizer, size: int) -> list[str]:
        return super().mistakes(optimizer, size) if self.servers is None else self.servers.mistakes(optimizer, size)

    def support(self, technique: str) -> Support:
        if self.servers is not None:
            return self.servers.support(technique)
        return SPARSE_GRADIENTS if technique == "sparse gradients" else super().support(technique)

    def attach(self, replica: Replica, transport: Transport) -> Exchange:
        if self.servers is not None:
            return self.servers.attach(replica, transport)
        if transport.size == 1:
            return self.in_full().attach(replica, transport)
        return PoseidonExchange(replica, transport, self)

    def __str__(self) -> str:
        default = Poseidon()
        options = [
            f"{key}={int(value) if isinstance(value, bool) else value}"
            for key in ("rule", "overlap", "bucket_bytes")
            if (value := getattr(self, key)) != getattr(default, key)
        ]
        options += [] if self.consistency is None else [str(self.consistency)]
        return "poseidon" + (f":{','.join(options)}" if options else "")


def read(options: dict[str, str], codec: Codec | None) -> Poseidon:
    """Make the strategy from its options at the command line."""
    if codec is not None:
        raise ConfigError(
            "poseidon is exact and takes no codec. Write the codec alone, such as onebit, for an all-reduce with it."
        )
    # Options that are not Poseidon's own choose a consistency, and so parameter servers.
    arguments: dict[str, object] = {}
    server_options = {key: text for key, text in options.items() if key not in ("rule", "overlap", "bucket_bytes")}
    if server_options:
        if unknowns := server_options.keys() - {"bsp", "ssp", "eager", "softsync", "async", "locks", "aware"}:
            unknown = min(unknowns)
            raise ConfigError(
                f"poseidon: '{unknown}={server_options[unknown]}' is none of rule=NAME, overlap=0 or 1, "
                "bucket_bytes=NUMBER, nor a consistency such as ssp=2. For other options of servers, write "
                "ps:ssp=2,servers=1,factors=1."
            )
        arguments["consistency"] = read_servers(server_options, None).consistency
    for key in options.keys() - server_options.keys():
        text = options[key]
        if key == "rule":
            arguments[key] = text
        elif key == "overlap" and text in ("0", "1"):
            arguments[key] = text == "1"
        elif key == "bucket_bytes":
            arguments[key] = int(text)
        else:
            raise ConfigError(f"poseidon: '{key}={text}' is none of rule=NAME, overlap=0 or 1, bucket_bytes=NUMBER.")
    return Poseidon(**arguments)  # type: ignore[arg-type]
