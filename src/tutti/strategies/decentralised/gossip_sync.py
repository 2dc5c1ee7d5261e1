"""Synchronous gossip: neighbours mix their values in every step (D-PSGD, Lian et al. 2017).

How it works
------------
At clock t rank i computes x_i(t+1) = Σ_j W_ij x_j(t) + u_i(t), where W is the mixing matrix of the topology and u_i
what its optimiser's step has changed (D-PSGD). Each rank sends x_i(t) to its neighbours as soon as it has it, so that
the message travels while the gradient of step t is computed. Where the graph is directed, a weight is mixed like the
values and the model is the values divided by the weight (push-sum, Assran et al. 2019).

Clocks are counted since the last averaging round. A message is stored under (round, clock, rank) until it is mixed.

The wait in a step is for the values of this clock of all neighbours (`_mix`). It is ended by each neighbour's message,
or when the neighbour is lost, on leave, or in an averaging round: then its share of the mix is taken from this rank's
own values.

When a rank is lost, all ranks enter a round to regroup, and the topology is made anew over those that are left. All
then continue at the highest clock of them, so neighbours agree on clocks again.
"""

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tutti.errors import PacketError
from tutti.strategies.decentralised.algorithm import PeerAlgorithm, PeerContext
from tutti.strategies.decentralised.averaging_rounds import RoundPurpose, RoundResult
from tutti.strategies.decentralised.graphs import Graph, ring, topology_for
from tutti.strategies.decentralised.wire import PeerMessageHeader, PeerMessageKind
from tutti.strategies.resumable import KnownSteps
from tutti.transports.base import Operation

if TYPE_CHECKING:
    from tutti.strategies.decentralised.strategies import Gossip

_log = logging.getLogger("tutti")


class SyncGossip(PeerAlgorithm):
    """Mixes values with all neighbours in every step."""

    def __init__(self, context: PeerContext, strategy: "Gossip") -> None:
        super().__init__(context)
        size = context.group.transport.size
        self._full_topology = self.topology = topology_for(strategy.graph, size)
        self._members = tuple(range(size))
        """Ranks of the topology, in the order of its numbering."""
        self._round = 0
        """The averaging round since which clocks are counted."""
        self._step = 0
        """The clock: steps since training began, made equal on all ranks by each round."""
        self._values = self._model.copy(context.base)
        self._weight = 1.0
        """Push-sum weight; stays 1 for undirected graphs."""
        self._received: dict[tuple[int, int, int], tuple[Tensor | None, float, int]] = {}
        """Values and weights of neighbours, and the number of steps in them, by round, clock and rank."""
        self._num_steps = 0

    def start(self) -> None:
        # The first mix needs the initial values of all neighbours.
        self._context.wait(self._send_values())

    @property
    def clock(self) -> int:
        return self._step

    def metrics(self) -> dict[str, Any]:
        return {"spectral_gap": self.topology.spectral_gap}

    def exchange_step(self) -> None:
        self._context.wait(self._mix(self._model.change_since(self._context.base)))
        if self._needs_regroup():
            self._context.run_round(RoundPurpose.REGROUP)
        self._model.write_model(self._context.base)

    def shift(self, change: Tensor) -> Operation:
        self._model.add(self._values, change, self._weight)
        yield from super().shift(change)

    @property
    def own_values(self) -> tuple[Tensor, float]:
        return self._values, self._weight

    def restart(self, values: Tensor, weight: float, clock: int) -> Operation:
        self._weight, self._step = weight, clock
        if not self._model.sizes_only:
            self._values.copy_(values)
            self._load_base()
        yield from ()

    def _needs_regroup(self) -> bool:
        """Whether a rank of the topology is gone, or a peer waits in a round to regroup."""
        return self._rounds.regroup_requested or not self._group.alive.issuperset(self._members)

    def _mix(self, change: Tensor) -> Operation:
        """Wait for the neighbours' values, mix, add this rank's change, and send the result."""
        rank = self._context.rank
        # The row of the mixing matrix of this clock; the topology numbers ranks by their position in `_members`.
        sources = self.topology.sources(self._members.index(rank), self._step)
        factors = {self._members[index]: factor for index, factor in sources.items()}
        local_factor = factors.pop(rank, 0.0)
        # A neighbour's values have arrived, or it is not waited for.
        yield from self._group.wait_until(
            lambda: all(self._is_absent(peer) or (self._round, self._step, peer) in self._received for peer in factors)
        )
        received = {peer: self._received.get((self._round, self._step, peer)) for peer in factors}
        # The share of a neighbour that did not send is taken from this rank's values: factors still add up to 1.
        local_factor += sum(factor for peer, factor in factors.items() if received[peer] is None)
        mixed = [(factors[peer], *message[:2]) for peer, message in received.items() if message is not None]
        self._combine(local_factor, mixed, change)
        self.known_steps |= {
            peer: KnownSteps(message[2], message[2]) for peer, message in received.items() if message is not None
        }
        self._step, self._num_steps = self._step + 1, self._num_steps + 1
        self._forget_old()  # Values of this clock are mixed; late ones of absent neighbours are of no use any more.
        self._rounds.send_keep_alives()
        if not self._needs_regroup():  # Otherwise the round that follows sends, over the new topology.
            yield from self._send_values()

    def _is_absent(self, peer: int) -> bool:
        """Whether a neighbour will send no values for this clock."""
        # A peer that has entered a round waits for this rank to enter, too: to wait for its values would be a deadlock.
        return peer not in self._group.alive or peer in self._group.away or self._rounds.has_entered(peer)

    def _forget_old(self) -> None:
        """Drop values of earlier rounds and clocks."""
        now = (self._round, self._step)
        self._received = {key: message for key, message in self._received.items() if key[:2] >= now}

    @torch.no_grad()
    def _combine(self, local_factor: float, mixed: list[tuple[float, Tensor | None, float]], change: Tensor) -> None:
        """Mix values and push-sum weights, and add `change`; `mixed` has the factor, values and weight of each peer."""
        model = self._model
        others = [(factor, model.bucket_views(values)) for factor, values, _ in mixed if values is not None]
        local_values = model.bucket_views(self._values)
        # Push-sum: the weight is mixed by the same factors as the values, so their quotient is unbiased.
        self._weight = local_factor * self._weight + sum(factor * weight for factor, _, weight in mixed)
        for index, (values, changes) in enumerate(zip(local_values, model.bucket_views(change), strict=True)):
            # x_i <- W_ii x_i + sum of W_ij x_j + u_i, for one bucket, flat: [numel].
            values.mul_(local_factor)
            for factor, peer_values in others:
                values.add_(peer_values[index], alpha=factor)
            values.add_(changes)
        self._load_base()

    def _load_base(self) -> None:
        """Make `base` the values divided by the weight, which is 1, but for rounding, if the graph is undirected."""
        views = self._model.bucket_views(self._values), self._model.bucket_views(self._context.base)
        for values, base in zip(*views, strict=True):
            base.copy_(values / self._weight if self.topology.directed else values)

    def _send_values(self) -> Operation:
        """Send this rank's values to the neighbours that mix them at this clock."""
        rank = self._context.rank
        targets = self.topology.targets(self._members.index(rank), self._step)
        if targets:
            # Messages are sent while the next step changes the values.
            values = self._model.copy(self._values)
            header = PeerMessageHeader(
                PeerMessageKind.VALUES, self._round, rank, self._step, values.nbytes, self._weight, self._num_steps
            )
            for index in targets:
                if not self._is_absent(self._members[index]):
                    self._group.send(self._members[index], header, values)
        yield from ()

    def receive(self, peer: int, header: PeerMessageHeader, payload: Tensor | None) -> None:
        if header.kind != PeerMessageKind.VALUES:
            self._rounds.receive(peer, header, payload)
            return
        if payload is None or payload.nbytes != self._model.num_bytes:
            raise PacketError(f"values of {header.num_bytes} bytes, wanted {self._model.num_bytes}")
        self._group.clocks[peer] = header.clock
        if header.number == self._round and (self._context.is_away or self._rounds.in_round):
            # Not stored: others may get far ahead before this rank takes part again, and then they send anew.
            return
        # Values of a later round too: the peer has learnt its result before this rank. Older ones come too late.
        if (header.number, header.clock) >= (self._round, self._step):
            self._received[header.number, header.clock, peer] = payload, header.weight, header.steps

    def round_finished(self, result: RoundResult) -> None:
        rank = self._context.rank
        # `AveragingRounds` has made this rank fail already.
        if rank not in result.members:
            return
        if result.members != self._members:
            # Lost ranks took a part of the push-sum weight with them: start again with a weight of 1 everywhere.
            for values in self._model.bucket_views(self._values):
                values.div_(self._weight)
            self._weight = 1.0
        self._round, self._step, self._members = result.number, result.clock, result.members
        self.topology = self._full_topology.over(result.members)
        if isinstance(self.topology, Graph) and len(self.topology.components) > 1:
            if rank == self._group.leader:
                _log.warning(
                    "rank %d: without the ranks that are lost the graph is not connected; the others form a ring", rank
                )
            self.topology = ring(len(result.members))
        self._forget_old()
        for _ in self._send_values():
            pass  # It queues messages and waits for nothing.

    def leave(self) -> None:
        self._context.wait(self._send_to_all(PeerMessageKind.LEAVE))

    def join(self) -> None:
        self._context.wait(self._send_to_all(PeerMessageKind.JOIN))
        self._context.run_round(RoundPurpose.REGROUP)  # Clocks of the others have moved on.

    def _send_to_all(self, kind: PeerMessageKind) -> Operation:
        self._group.send_to_all(PeerMessageHeader(kind))
        yield from ()
