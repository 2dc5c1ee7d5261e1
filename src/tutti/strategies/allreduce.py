"""`AllReduce`: the mean of all gradients in every step, exact or compressed, bucket by bucket while backward runs.

How it works:

- Gradients lie in buckets, in the order in which backward fills them. A full bucket is started at once, so that its
  all-reduce overlaps with the rest of backward.
- A rank's gradient counts in proportion to its samples. Ranks therefore share their weights first (`Mean.begin`).
  Buckets that fill before all weights are known wait in `_waiting`.
- `_under_way` holds the started buckets in order. `backward_done` starts what is left (`release`), then waits for all
  of them in that order (`complete`). All ranks start buckets in the same order, which the matching of messages relies
  on.
- A rank whose loss is not finite sends the weight NaN. Every rank then gets `WeightRefused` in the same step, and
  raises `NonFiniteLoss` with the ranks that had it. A lost rank ends waits by the transport's error, which names it.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from tutti.codecs import (
    CODECS,
    Cast,
    Codec,
    ErrorFeedback,
    LowRank,
    OneBit,
    Quantize,
    TopK,
    parse_codec,
    print_codec,
)
from tutti.collectives import ALGORITHMS, Collective, CollectiveChoice, measure_collectives, native_all_reduce
from tutti.cost import CommunicationCost, Placement, Profile
from tutti.errors import ConfigError, DifferentCalls, NonFiniteLoss, WeightRefused
from tutti.events import EXCHANGE, Event
from tutti.replica import Bucket, Replica
from tutti.strategies.allreduce_cost import communication_cost
from tutti.strategies.base import Exchange, Strategy
from tutti.strategies.calls import CONSENSUS, FINISH, different_calls_error
from tutti.strategies.compatibility import SPARSE_GRADIENTS, Support
from tutti.strategies.compressed_means import CompressedMean
from tutti.strategies.converged import ConvergenceMonitor
from tutti.strategies.means import CollectiveMean, Mean, NativeSumMean, TransportMean
from tutti.strategies.rates import SAME_RATE, LearningRateRule, compression_rule
from tutti.transports import Averages, HostsTransport, SharesMemory, Transport, Work
from tutti.transports.base import CompletedWork
from tutti.transports.hosts import hosts_are_shared

Algorithm = Literal[
    "native", "cheapest", "ring", "ring_blocking", "tree", "butterfly", "recursive_doubling", "hierarchical"
]

NAMES: tuple[Algorithm, ...] = get_args(Algorithm)
"""Names of all-reduce algorithms, as `AllReduce` takes them."""

_CANDIDATES: tuple[Algorithm, ...] = ("native", "ring", "butterfly", "tree", "recursive_doubling")
"""Algorithms that the planner compares.

"hierarchical" is what "native" does where ranks share hosts, and "cheapest" compares the others itself.
"""

_LARGE_BUCKET_BYTES = 64 * 2**20
"""Bucket size that the planner compares with the default: fewer buckets wait for fewer latencies."""

_CANDIDATE_CODECS: tuple[Codec, ...] = tuple(
    ErrorFeedback(codec)
    for codec in (Cast("bf16"), Cast("fp8"), Quantize(4), OneBit(), TopK(0.01), TopK(0.001), LowRank())
)
"""Built-in codecs that the planner compares, beside those of installed packages."""

OPTIONS = ("bucket_bytes", "exact_below", "skip_converged", "check_every")
"""Options of `AllReduce` that its text may have, beside an algorithm or a codec."""


@dataclass(frozen=True)
class AllReduce(Strategy):
    """In every step, every rank gets the mean of all gradients, weighted by samples (Li et al. 2020).

    Args:
        algorithm: the all-reduce algorithm for exact gradients. "native" is the transport's own, "cheapest" measures
            the link and takes the cheapest one for each bucket, and the others are those of `tutti.collectives`. It
            cannot be given with a codec, because compressed gradients are summed as the codec requires.
        bucket_bytes: bytes of gradients that travel together. Smaller buckets start sooner; larger ones wait for fewer
            latencies.
        codec: compresses gradients, such as `ErrorFeedback(OneBit())`. None sends them exactly.
        exact_below: with a codec, gradients of fewer elements (biases, norms) are sent exactly.
        skip_converged: skip parameters that moved by less than this share of their norm in a window of `check_every`
            steps: for one window, then for longer, with checks in between whether they move. Meanwhile they have no
            gradient, and the optimiser leaves them and its state for them alone. None skips nothing.
        check_every: steps in a window of `skip_converged`.
    """

    preference = 0

    algorithm: Algorithm | str = "native"
    bucket_bytes: int = 4 * 2**20
    codec: Codec | None = None
    exact_below: int = 1024
    skip_converged: float | None = None
    check_every: int = 50

    def __post_init__(self) -> None:
        mistakes = []
        if self.algorithm not in NAMES and self.algorithm not in ALGORITHMS:
            known = dict.fromkeys([*NAMES, *ALGORITHMS])
            mistakes.append(f"algorithm '{self.algorithm}' is not one of {', '.join(known)}")
        if self.bucket_bytes < 1:
            mistakes.append(f"bucket_bytes must be 1 or more, got {self.bucket_bytes}")
        if self.codec is not None and not isinstance(self.codec, Codec):
            mistakes.append(f"codec must be an object such as ErrorFeedback(OneBit()), got {self.codec!r}")
        elif self.codec is not None and self.codec.needs_feedback:
            mistakes.append(f"{self.codec!r} accumulates what it has not sent: wrap it in ErrorFeedback(...)")
        elif self.codec is not None and self.algorithm != "native":
            mistakes.append(
                f"algorithm '{self.algorithm}' would change nothing beside a codec, because compressed gradients are "
                f"not summed by an all-reduce algorithm: leave it out, as in AllReduce(codec={self.codec!r})"
            )
        if self.exact_below < 0:
            mistakes.append(f"exact_below must be 0 or more, got {self.exact_below}")
        if self.skip_converged is not None and not 0 < self.skip_converged < 1:
            mistakes.append(f"skip_converged must be above 0 and below 1, or None, got {self.skip_converged}")
        if self.skip_converged is not None and self.codec is not None:
            mistakes.append("skip_converged goes with exact gradients: a codec would still owe what it has not sent")
        if self.check_every < 1:
            mistakes.append(f"check_every must be 1 or more, got {self.check_every}")
        if mistakes:
            raise ConfigError(f"AllReduce: {'; '.join(mistakes)}.")

    @property
    def exact(self) -> bool:
        return self.codec is None and self.skip_converged is None

    @property
    def averages_gradients(self) -> bool:
        return True

    def learning_rate(self, num_workers: int) -> LearningRateRule:
        return SAME_RATE if num_workers == 1 else compression_rule(self.codec)

    @property
    def synchronous_start(self) -> "AllReduce | None":
        return None if self.codec is None else replace(self, codec=None)

    def cost(self, profile: Profile, placement: Placement) -> CommunicationCost:
        return communication_cost(self, profile, placement)

    def candidates(self, profile: Profile, placement: Placement) -> Iterator[Strategy]:
        # On one host sums are made in shared memory: algorithms of messages would go through sockets.
        algorithms = ["native"]
        if placement.num_hosts > 1:
            algorithms = [*_CANDIDATES, *(name for name in ALGORITHMS if name not in ALGORITHMS.built_in)]
        sizes = (AllReduce.bucket_bytes, _LARGE_BUCKET_BYTES)
        # A model that fits into one bucket of the default size gets the same bucket from a larger one.
        for bucket_bytes in sizes if profile.gradient_bytes > AllReduce.bucket_bytes else sizes[:1]:
            yield from (AllReduce(algorithm, bucket_bytes) for algorithm in algorithms)
        yield from (AllReduce(codec=codec) for codec in (*_CANDIDATE_CODECS, *_plugin_codecs()))

    def support(self, technique: str) -> Support:
        if technique == "sparse gradients":
            return SPARSE_GRADIENTS
        if technique == "LBFGS" and not self.exact:
            return Support(
                "refuses",
                f"LBFGS compares the gradients of several passes, which '{self}' changes by more than they differ. Use "
                "an exact strategy such as ring, or SGD, Adam or another that takes gradients as they are.",
            )
        return super().support(technique)

    def attach(self, replica: Replica, transport: Transport) -> Exchange:
        if self.algorithm == "hierarchical" and hosts_are_shared(transport):
            transport = transport if isinstance(transport, HostsTransport) else HostsTransport(transport)
        exchange = AllReduceExchange(replica, transport, self)
        # A single rank has nothing to exchange: hooks on its gradients would only cost time.
        replica.listen(exchange, to="steps" if transport.size == 1 else "gradients")
        return exchange

    def __str__(self) -> str:
        default = type(self)(self.algorithm)
        options = [f"{key}={getattr(self, key)}" for key in OPTIONS if getattr(self, key) != getattr(default, key)]
        if self.codec is not None:
            return print_codec(self.codec, options)
        return self.algorithm + (f":{','.join(options)}" if options else "")


class AllReduceExchange(Exchange):
    """Starts a bucket's all-reduce when the bucket is full, and waits for all of them at the end of backward."""

    equal_after_steps = True
    agreed_on_first = True

    def __init__(self, replica: Replica, transport: Transport, strategy: AllReduce) -> None:
        super().__init__(replica, transport)
        alone = transport.size == 1
        codec = None if alone else strategy.codec
        if codec is not None and isinstance(transport, SharesMemory) and not isinstance(transport, HostsTransport):
            transport = transport.inner  # Packets travel in messages.
        self._choice: CollectiveChoice | None = None
        """The measured algorithms, of which the cheapest one is taken for each bucket."""
        self._saved_algorithms: dict[str, str] = {}
        if codec is None and strategy.algorithm == "cheapest" and replica.device_types <= {"cpu", "meta"}:
            self._choice = measure_collectives(transport)
        self._mean = (
            _mean_over(replica, transport, strategy, codec)
            if self._choice is None
            else CollectiveMean(transport, self._algorithm)
        )
        # A single rank sends nothing. It keeps residuals from a checkpoint of several ranks for a later one.
        self._unused_state: dict[str, Any] = {}
        self._parts = (
            {"residuals"} if strategy.codec is not None else {"converged"} if strategy.skip_converged else set()
        )
        self._weights_known: Work = CompletedWork()
        self._waiting: deque[Bucket] = deque()
        self._under_way: list[tuple[Bucket, Work]] = []
        self._converged: ConvergenceMonitor | None = None
        self._num_elements = [0, 0]  # Gradient elements so far: skipped, and all.
        if not alone:
            replica.allocate(transport, strategy.bucket_bytes, strategy.exact_below if codec is not None else 0)
        if not alone and strategy.skip_converged is not None and not replica.sizes_only:
            self._converged = ConvergenceMonitor(replica.slots, strategy.skip_converged, strategy.check_every)

    def backward_started(self, weight: float) -> None:
        self._sent_before = self.transport.bytes_sent
        # There are none if all parameters are skipped. Where ranks may be lost, the step waits for all of them even so:
        # else some would take steps that others do not know of.
        if self.replica.buckets or self.replica.survives:
            self._weights_known = self._mean.begin(weight)

    def bucket_ready(self, bucket: Bucket) -> None:
        # Only polled: waiting for the weights here would hold up backward.
        self._waiting.append(bucket)
        if self._weights_known.done():
            self._start_waiting()

    def backward_done(self) -> None:
        start_s = self.transport.now()
        self.release()
        self.complete()
        num_bytes = self.transport.bytes_sent - self._sent_before
        self.events.record(Event(EXCHANGE, start_s, self.transport.now(), num_bytes))

    def release(self) -> None:
        """Start the buckets that have not been started, and let all of them run to their end."""
        self._weights_known.wait()
        self._start_waiting()
        # No more buckets come in this pass, so stages that gave way to later buckets can run now.
        self._mean.flush()

    def complete(self) -> None:
        """Wait for all buckets, and finish their means."""
        # In the order of their start: a later bucket may still be on its way while an earlier mean is finished.
        for bucket, work in self._under_way:
            try:
                work.wait()
            except (WeightRefused, DifferentCalls) as refusal:
                raise self.stopped(refusal) from None
            self._mean.finish(bucket)
        self._under_way.clear()

    def after_step(self) -> None:
        if self._converged is None:
            return
        for slot in self.replica.slots:
            self._num_elements[0] += slot.tensor.numel() * (slot.name in self.replica.left_out)
            self._num_elements[1] += slot.tensor.numel()
        if self._converged.stepped(self.transport):
            self.replica.leave_out(self._converged.left_out)

    def metrics(self) -> dict[str, Any]:
        """With `skip_converged`, `skipped` is the share of all gradient elements that was not exchanged."""
        if self._converged is None:
            return {}
        skipped, total = self._num_elements
        return {"skipped": skipped / total if total else 0.0}

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(self._unused_state)
        if self.transport.size > 1 and self.replica.arranged:
            # The order of parameters in buckets: a resumed run then cuts the same ones, and rounds the same sums alike.
            state["order"] = [slot.name for slot in self.replica.slots]
        if self._choice is not None:
            state["algorithms"] = {str(n): self._algorithm(n).name for n in self._bucket_sizes}
        if self._converged is not None:
            state["converged"] = self._converged.state_dict()
        if isinstance(self._mean, CompressedMean):
            state["residuals"] = self._mean.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> set[str]:
        used = {"order", "algorithms"}
        if self.transport.size > 1 and "order" in state:
            # First: what follows belongs to the buckets of this order.
            self.replica.arrange(state["order"])
        self._saved_algorithms = dict(state.get("algorithms", {}))
        if self._converged is not None and "converged" in state:
            used.add("converged")
            self._converged.load_state_dict(state["converged"])
            self.replica.leave_out(self._converged.left_out)
        if isinstance(self._mean, CompressedMean) and "residuals" in state:
            used.add("residuals")
            self.add_to_gradient(self._mean.load_state_dict(state["residuals"]))
        if self.transport.size == 1:
            # A single rank exchanges nothing, but its checkpoint may be resumed on several: the state is passed on
            # unchanged.
            self._unused_state = {name: state[name] for name in state.keys() & self._parts}
            used |= self._unused_state.keys()
        return set(state) - used

    @property
    def _bucket_sizes(self) -> set[int]:
        return {bucket.flat.nbytes for bucket in self.replica.buckets}

    def _algorithm(self, num_bytes: int) -> Collective:
        """Return the algorithm for so many bytes: the one of a run that this one continues, or the cheapest."""
        assert self._choice is not None
        saved = self._saved_algorithms.get(str(num_bytes))
        named = [each.collective for each in self._choice.candidates if each.collective.name == saved]
        return named[0] if named else self._choice.best(num_bytes)

    def _start_waiting(self) -> None:
        """Start the all-reduce of every bucket that waited for the weights."""
        while self._waiting:
            bucket = self._waiting.popleft()
            try:
                self._under_way.append((bucket, self._mean.start(bucket)))
            except (WeightRefused, DifferentCalls) as refusal:
                raise self.stopped(refusal) from None

    def consensus(self, optimizer: bool = False) -> None:
        self._agree(CONSENSUS)
        super().consensus(optimizer)

    def finish(self) -> None:
        self._agree(FINISH)
        super().consensus()

    def _agree(self, call: int) -> None:
        """Return when all ranks are in this call. Raises the same error on every rank if some are elsewhere."""
        if self.transport.size > 1 and self.transport.cluster is None:  # In a simulation it would take virtual time.
            try:
                self._mean.agree(call)
            except DifferentCalls as differ:
                raise self.stopped(differ) from None

    def stopped(self, refusal: WeightRefused | DifferentCalls) -> NonFiniteLoss | ConfigError:
        """Return the error that says which ranks are in which call, or on which the loss was not finite."""
        if isinstance(refusal, DifferentCalls):
            return different_calls_error(refusal.weights, self.transport, self.replica.steps)
        return NonFiniteLoss(self.transport.world_rank, refusal.ranks, self.replica.steps)


def _plugin_codecs() -> list[Codec]:
    """Return the codecs of installed packages, with default options and error feedback."""
    codecs = []
    for name in CODECS:
        # One broken package must not stop the planner (it reports `CODECS.load_failures`), nor must a codec with
        # required options: no default of ours would suit it, so it has to be named.
        if name not in CODECS.built_in:
            with suppress(ConfigError, TypeError):
                codecs.append(parse_codec(name))
    return codecs


def _mean_over(replica: Replica, transport: Transport, strategy: AllReduce, codec: Codec | None) -> Mean:
    """Return the means of gradients for this strategy, transport and device."""
    algorithm = strategy.algorithm
    if codec is not None:
        return CompressedMean(replica, transport, codec)
    # "cheapest" on GPUs, where there is nothing to measure: NCCL alone sums there without a copy to the host.
    algorithm = "native" if algorithm == "cheapest" else algorithm
    # The transport's own mean, then the backend's own sum, then the algorithms of `tutti.collectives`: the first that
    # there is.
    if algorithm == "native" and isinstance(transport, Averages):
        return TransportMean(transport)
    kind = "cpu" if replica.device_types <= {"cpu", "meta"} else "cuda"
    if algorithm == "native" and (all_reduce := native_all_reduce(transport, kind)) is not None:
        return NativeSumMean(transport, all_reduce)
    collective = ALGORITHMS[algorithm]
    return CollectiveMean(transport, lambda num_bytes: collective)
