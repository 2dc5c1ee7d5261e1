"""Promises of elastic runs: what each strategy keeps over each transport, whatever happens to workers.

The matrix is `cells()`. A cell that is not in it cannot happen: only hosts of a lab have links.
"""

from dataclasses import dataclass

EXACT = "exact"
"""All that come to the end have the parameters of the undisturbed run, within 1e-10 of the largest. Every sample of
every epoch is used once. A worker has at most one void step for each loss, and none without."""
ONCE = "once"
"""All that come to the end have the same parameters. Every sample of every epoch is used once."""
COUNTED = "counted"
"""As `ONCE`, but samples of a lost worker may be missing, and no more of them than `job.metrics.changes` counts."""
EXACT_OR_CHECKPOINT = "exact or checkpoint"
"""As `EXACT`; or, if the two servers of a part of the model are lost at the same time, all workers end with
`StateLost`, and those that take their places continue from the last checkpoint."""
ENDS = "ends"
"""All processes of the run end within seconds."""

MEMORY, SOCKETS, LAB = "shared_memory", "sockets", "lab"
TRANSPORTS = (MEMORY, SOCKETS, LAB)
"""Shared memory and sockets on one host; two hosts of a lab, with shared memory on each and sockets between them."""

LAB_SPEC = "hosts=2,ranks=2,rate=1gbit"
WORKERS = 4
"""Number of workers at the start."""

STRATEGIES: dict[str, str] = {
    "native": EXACT,
    "ring": EXACT,
    "hierarchical": EXACT,
    "poseidon": EXACT,
    "onebit:exact_below=0": ONCE,
    "topk:0.1": ONCE,
    "averaging:every=4": ONCE,
    "bmuf:every=4": ONCE,
    "diloco:every=4": ONCE,
    "ps:bsp": ONCE,
    "ps:ssp=2": ONCE,
    "ps:async": ONCE,
    "peers": ONCE,
    "gossip": ONCE,
}
"""The promise of each strategy under all faults and transports, except for those in `_WITH_SHARDS`."""

_WITH_SHARDS = ("ps:ssp", "ps:async")
"""Strategies whose ranks hold parameters that others do not have, where memory is not shared by all of them. What was
in these when a rank was lost, nobody knows."""
_WITH_COPIES = ("ps:bsp",)
"""Those of which another rank has copies there."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to workers."""

    event: str = ""
    """What the victims do: a name in `events.EVENTS`; nothing if empty."""
    victims: tuple[int, ...] = ()
    lost: int | None = None
    """Number of workers that are lost by it; None if all victims are."""
    newcomers: int = 0
    """Number of workers that come."""
    chaos: str = ""
    """Clauses of `tutti run --chaos`."""
    only_lab: bool = False
    """Whether it needs several hosts."""

    @property
    def num_lost(self) -> int:
        """Number of workers that are lost by it."""
        return len(self.victims) if self.lost is None else self.lost


NOTHING, KILL_LAUNCHER = "nothing", "kill launcher"
"""The fault that is none; and the end of the launcher, which serves the coordinator: its workers end as well."""

FAULTS: dict[str, Fault] = {
    NOTHING: Fault(),
    "kill rank 0": Fault("kill", (0,)),
    "kill rank 1": Fault("kill", (1,)),
    "kill two": Fault("kill", (1, 2)),
    "kill host 0": Fault("kill", (0, 1), only_lab=True),
    "kill host 1": Fault("kill", (2, 3), only_lab=True),
    "stop": Fault("stop", (1,)),
    "exception": Fault("fail", (2,)),
    "leave": Fault("leave", (1,), lost=0),
    "join": Fault(newcomers=1, chaos="join at 1ms"),
    "replace": Fault("kill", (3,), newcomers=1),
    "cut": Fault("cut", (2,), lost=2, only_lab=True),
    "cut for a moment": Fault(chaos="cut host 1 for 400ms at 100ms", only_lab=True),
    KILL_LAUNCHER: Fault(),
}
"""Faults by name. A worker is stopped, and a link is cut, for longer than the patience."""


@dataclass(frozen=True)
class Cell:
    """A place in the matrix."""

    strategy: str
    transport: str
    fault: str

    @property
    def promise(self) -> str:
        """What is promised: one of the texts above."""
        if self.fault == KILL_LAUNCHER:
            return ENDS
        promise = promise_of(self.strategy, self.transport)
        is_copied = self.strategy.startswith(_WITH_COPIES) and promise == EXACT
        # In the lab these are on different hosts, and so are what one has and its copy.
        at_once = FAULTS[self.fault].num_lost > 1 and self.transport == SOCKETS
        return EXACT_OR_CHECKPOINT if is_copied and at_once else promise

    def __str__(self) -> str:
        return f"{self.strategy}, {self.transport}, {self.fault}"


def promise_of(strategy: str, transport: str) -> str:
    """Return what a strategy promises over a transport, whatever happens to its workers."""
    if transport != MEMORY and strategy.startswith(_WITH_COPIES):
        return EXACT
    with_shards = transport != MEMORY and strategy.startswith(_WITH_SHARDS)
    return COUNTED if with_shards else STRATEGIES[strategy]


def cells() -> list[Cell]:
    """The whole matrix."""
    return [
        Cell(strategy, transport, fault)
        for transport in TRANSPORTS
        for strategy in STRATEGIES
        for fault, about in FAULTS.items()
        if transport == LAB or not about.only_lab
    ]
