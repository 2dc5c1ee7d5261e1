"""The exchange of Poseidon: some layers' gradients as sufficient factors, the others in buckets, while backward runs.

How it works:

- In the first backward pass all gradients go in full, and hooks count the rows of each layer. At its end rank 0's
  counts and the measured link decide the method of each layer, the same on all ranks (`_decide`).
- From then on layers with a method other than "full" have no bucket. Their factors are exchanged on a channel of their
  own, so that they do not wait for buckets, or buckets for them (wait-free backpropagation).
- `backward_done` starts what is left, then multiplies factors while buckets are still on their way, and waits for
  buckets.
- A layer whose gradient turns out to hold more than its factors (used twice, or accumulated over passes) is summed in
  full in that step, and from then on.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tutti.cluster import Link
from tutti.collectives import broadcast_json, measure_collectives
from tutti.errors import WeightRefused
from tutti.events import EXCHANGE, Event
from tutti.replica import Bucket, FactoredLayer, Replica
from tutti.strategies.allreduce import AllReduceExchange
from tutti.strategies.base import Exchange
from tutti.strategies.poseidon.cost import communication_cost
from tutti.strategies.poseidon.rule import Decision, LayerShape, Method, decide
from tutti.strategies.poseidon.speed import product_speed
from tutti.strategies.poseidon.sums import FactorSums
from tutti.transports import Transport

if TYPE_CHECKING:
    from tutti.strategies.poseidon.strategy import Poseidon


class PoseidonExchange(Exchange):
    """Exchanges each layer's gradient by its own method, from the second backward pass on."""

    equal_after_steps = True
    agreed_on_first = True

    def __init__(self, replica: Replica, transport: Transport, strategy: "Poseidon") -> None:
        super().__init__(replica, transport)
        self._strategy = strategy
        self._choice = measure_collectives(transport) if strategy.rule == "priced" else None
        link = None if self._choice is None else self._choice.link
        self._buckets = AllReduceExchange(replica, transport, strategy.in_full(link))
        self._factors = FactorSums(transport.channel("factors"), replica.compute_clock)
        self._watched: list[FactoredLayer] | None = replica.watch_factors()
        self._held: list[Bucket | FactoredLayer] = []
        self.decisions: list[Decision] = []
        """The decision for every layer that has factors; empty before the first backward pass is over."""
        self.methods: dict[str, Method] = {}
        """The methods of layers that are not sent in full, by name."""
        replica.listen(self, to="gradients")

    @property
    def bytes_sent(self) -> int:
        return self.transport.bytes_sent + self._factors.bytes_sent

    def backward_started(self, weight: float) -> None:
        # Of this pass, for the event at its end: bytes of other passes are not its.
        self._sent_before = self.bytes_sent
        self._buckets.backward_started(weight)
        self._factors.begin(weight)

    def bucket_ready(self, bucket: Bucket) -> None:
        if self._strategy.overlap:
            self._buckets.bucket_ready(bucket)
        else:
            self._held.append(bucket)

    def factors_ready(self, layer: FactoredLayer) -> None:
        if self._strategy.overlap:
            self._factors.start(layer)
        else:
            # It counts as handed over, so that it is not reported again in this pass.
            layer.handed_over = True
            self._held.append(layer)

    def backward_done(self) -> None:
        start_s = self.transport.now()
        # Without overlap everything waited for the end of backward, and goes in the order in which it was ready.
        for ready in self._held:
            if isinstance(ready, Bucket):
                self._buckets.bucket_ready(ready)
            else:
                self._factors.start(ready)
        self._held.clear()
        # Buckets are started first, so that they are on the wire while factors are multiplied.
        self._buckets.release()
        if self.replica.factored and self._watched is None:
            self._finish_factors()  # Buckets are sent meanwhile.
        self._buckets.complete()
        # The end of the first backward pass, in which layers were only watched.
        if self._watched is not None:
            self._decide(self._watched)
            self._watched = None
        self.events.record(Event(EXCHANGE, start_s, self.transport.now(), self.bytes_sent - self._sent_before))

    def _finish_factors(self) -> None:
        """Complete gradients of factored layers. Those with more than their factors are sent in full from now on."""
        try:
            partial = self._factors.finish(self.replica.factored)
        except WeightRefused as refusal:
            raise self._buckets.stopped(refusal) from None
        if partial:
            self._follow({name: method for name, method in self.methods.items() if name not in partial})

    def _decide(self, layers: list[FactoredLayer]) -> None:
        """Choose the method of each layer from the rows that rank 0 has seen. Collective."""
        shapes = [
            LayerShape(
                layer.slot.name, layer.num_out, layer.num_in, layer.rows, layer.slot.tensor.itemsize,
                convolution=layer.slot.tensor.dim() > 2,
            )
            for layer in layers
        ]  # fmt: skip
        rows, flops = broadcast_json([[shape.rows for shape in shapes], self._speed(shapes)], self.transport)
        # Not measured under other rules, which use no times, nor in shared memory, where "full" costs 0.
        link = Link("100gbit") if self._choice is None or self._choice.link is None else self._choice.link
        # Ranks of one host send their factors over the same link.
        share = Link(link.bits_per_s / max(Counter(self.transport.hosts).values()), link.latency_s)
        self.decisions = [
            decide(replace(shape, rows=num_rows), self._strategy.rule, self.transport.size, share, self._extra_s, flops)
            for shape, num_rows in zip(shapes, rows, strict=True)
        ]
        # A layer without rows was not used in the first pass: it stays in a bucket.
        self._follow({decision.shape.name: decision.method for decision in self.decisions if decision.shape.rows})

    def _follow(self, methods: dict[str, Method]) -> None:
        """Use these methods from now on. Buckets are cut anew without the layers that are sent as factors."""
        self.methods = {name: method for name, method in methods.items() if method != "full"}
        self._factors.follow(self.methods)
        # The methods were chosen in the first step, by the batch of then: the strategy would choose by today's.
        self.cost = partial(communication_cost, self._strategy, methods=self.methods)
        self.replica.exchange_as_factors(frozenset(self.methods))

    def _extra_s(self, num_bytes: int) -> float:
        """Return by how many seconds `num_bytes` more prolong the all-reduce of everything that has no factors.

        It is 0 in shared memory, where nothing is sent.
        """
        if self._choice is None or self._choice.link is None:
            return 0.0
        factored = {layer.slot.name for layer in self._watched or ()}
        # These bytes are summed whatever is decided.
        always = sum(slot.tensor.nbytes for slot in self.replica.slots if slot.name not in factored)
        costs = [min(self._choice.costs(total).values()) for total in (always, always + num_bytes)]
        return costs[1] - costs[0]

    def _speed(self, shapes: list[LayerShape]) -> float:
        """Return the operations per second of a matrix product. Rank 0's are used by all; others need not measure."""
        if self.replica.compute_clock is not None:
            return self.replica.compute_clock.speed
        if self._strategy.rule != "priced" or self.transport.rank != 0:
            # No other rule uses it, and other ranks get rank 0's.
            return 1e11
        return product_speed(shapes, self.replica.slots[0].tensor.device, self.transport)

    def before_step(self) -> None:
        return None

    def after_step(self) -> None:
        return None

    def consensus(self, optimizer: bool = False) -> None:
        self._buckets.consensus(optimizer)

    def restore_local(self) -> None:
        return None

    def finish(self) -> None:
        self._buckets.finish()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the choice of the first pass, so that a resumed run need not choose again, by other times."""
        state = self._buckets.state_dict()
        if self._watched is None:
            state["methods"] = {"of": self._described, "methods": self.methods}
            state["methods"]["bucket_bytes"] = self.replica.bucket_bytes
        return state

    def load_state_dict(self, state: dict[str, Any]) -> set[str]:
        saved = state.get("methods")
        if saved is not None and saved["of"] == self._described:
            self.replica.bucket_bytes = saved["bucket_bytes"]
            self._watched = None
            self._follow(saved["methods"])
        return self._buckets.load_state_dict(state) - {"methods"}

    @property
    def _described(self) -> str:
        """The rule and the number of ranks that methods were chosen for."""
        return f"{self._strategy.rule} on {self.transport.size} ranks"
