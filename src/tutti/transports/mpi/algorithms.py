"""Open MPI's all-reduce algorithms by name, and the table by which it picks one itself."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tutti.errors import UnknownName

ALLREDUCE_ALGORITHMS = {
    "basic_linear": 1,
    "nonoverlapping": 2,
    "recursive_doubling": 3,
    "ring": 4,
    "segmented_ring": 5,
    "rabenseifner": 6,
}
"""Open MPI 5.0's names and numbers, as in `ompi_info --param coll tuned --level 9`."""

_RD, _RING, _SEGMENTED, _RABENSEIFNER, _REDUCE_BCAST = (
    "recursive_doubling",
    "ring",
    "segmented_ring",
    "rabenseifner",
    "nonoverlapping",
)

_FIXED: list[tuple[int, list[tuple[int, str]]]] = [
    (
        2,
        [
            (0, _RING),
            (8, _RD),
            (4096, _RING),
            (8192, _RD),
            (16384, _RING),
            (65536, _SEGMENTED),
            (262144, _RABENSEIFNER),
        ],
    ),
    (4, [(0, _RING), (16, _RD), (8192, _RABENSEIFNER)]),
    (8, [(0, _RD), (8192, _RABENSEIFNER)]),
    (16, [(0, _SEGMENTED), (64, _RD), (4096, _RABENSEIFNER)]),
    (32, [(0, _SEGMENTED), (128, _RABENSEIFNER)]),
    (64, [(0, _RD), (262144, _RABENSEIFNER)]),
    (128, [(0, _REDUCE_BCAST), (131072, _RD), (262144, _RABENSEIFNER)]),
    (256, [(0, _REDUCE_BCAST), (4096, _RABENSEIFNER)]),
    (512, [(0, _REDUCE_BCAST), (2048, _RD), (16384, _RABENSEIFNER)]),
    (2048, [(0, _REDUCE_BCAST), (2048, _SEGMENTED), (4096, _RD), (16384, _RABENSEIFNER)]),
    (4096, [(0, _REDUCE_BCAST), (2048, _SEGMENTED), (16384, _RD), (32768, _RABENSEIFNER)]),
]
"""For each smallest number of ranks: pairs of the smallest number of bytes and the algorithm used from there on.

It is `ompi_coll_tuned_allreduce_intra_dec_fixed` of Open MPI 5.0 (ompi/mca/coll/tuned/coll_tuned_decision_fixed.c),
for operations that commute.
"""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The settings that decide how Open MPI reduces: an algorithm chosen by name, or its own table."""

    algorithm: str | None = None
    """The algorithm that the component `tuned` must use; None: it chooses by its own table."""
    han: bool = True
    """Whether the component `han` is enabled. It comes before `tuned` if there are several hosts with several ranks."""

    def __post_init__(self) -> None:
        if self.algorithm is not None and self.algorithm not in ALLREDUCE_ALGORITHMS:
            raise UnknownName("all-reduce algorithm of Open MPI", self.algorithm, ALLREDUCE_ALGORITHMS)

    def name(self, hosts: Sequence[str], num_bytes: int) -> str:
        """The algorithm or component that reduces `num_bytes` between ranks on these hosts.

        With fewer elements than ranks, Open MPI's rings become recursive doubling and Rabenseifner basic linear.
        """
        if len(hosts) == 1:
            return "self"
        # `han` works on two levels: it needs several hosts, of which one has several ranks.
        if self.han and 1 < len(set(hosts)) < len(hosts):
            return "han"
        return self.algorithm or fixed_choice(len(hosts), num_bytes)


def fixed_choice(num_ranks: int, num_bytes: int) -> str:
    """The algorithm that the component `tuned` picks by its own table."""
    # The last row whose number of ranks is not above `num_ranks`; below it, the same for bytes.
    sizes = _FIXED[max(0, bisect_right([ranks for ranks, _ in _FIXED], num_ranks) - 1)][1]
    return sizes[bisect_right([first for first, _ in sizes], num_bytes) - 1][1]
