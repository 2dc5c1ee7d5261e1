"""The cost of Poseidon: each layer by its own method, all on one link, while backward still runs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from tutti.cost import CommunicationCost, Placement, Profile, all_reduce_cost, bucket_loads
from tutti.strategies.allreduce_cost import weights_exchanged_s
from tutti.strategies.poseidon.rule import Decision, LayerShape, Method, decide

if TYPE_CHECKING:
    from tutti.strategies.poseidon.strategy import Poseidon


class _Transfer(NamedTuple):
    """A bucket, or the factors of a layer, sent over the link."""

    ready_s: float
    wire_s: float
    product_s: float = 0.0
    """Seconds to multiply the factors that have arrived."""


def communication_cost(
    strategy: "Poseidon", profile: Profile, placement: Placement, methods: Mapping[str, Method] | None = None
) -> CommunicationCost:
    """Return the cost per step: buckets and factors share the link; factors are multiplied after backward.

    `methods` are those of layers that are not sent in full, where a running job decided them from other batch sizes.
    """
    decisions = {decision.shape.name: decision for decision in layer_decisions(strategy, profile, placement)}
    if methods is not None:
        decisions = {name: replace(decision, method=methods.get(name, "full")) for name, decision in decisions.items()}
    apart = {name: decision for name, decision in decisions.items() if decision.method != "full"}
    rest = replace(profile, gradients=tuple(gradient for gradient in profile.gradients if gradient.name not in apart))
    flops, link = achieved_flops(profile), placement.shared_link
    # Only the "priced" rule measures the link, from which bucket sizes follow.
    known = placement.link if strategy.rule == "priced" and placement.num_hosts > 1 else None
    loads = bucket_loads(rest, strategy.in_full(known).bucket_bytes)
    sums = [all_reduce_cost("native", load.num_bytes, placement) for load in loads]
    transfers = [_Transfer(load.ready_s, cost.wire_s) for load, cost in zip(loads, sums, strict=True)]
    num_bytes = sum(cost.num_bytes for cost in sums)
    memory_bytes = 0.0
    for gradient in profile.gradients:
        if (chosen := apart.get(gradient.name)) is None:
            continue
        shape, sent = chosen.shape, chosen.sent_bytes[chosen.method]
        # Owners share the products among all ranks; with "broadcast" every rank makes all of them.
        split = placement.num_ranks if chosen.method == "owners" else 1
        peer_rows = (placement.num_ranks - 1) * shape.rows
        # Backward has made the product of this rank's rows; those of its peers are extra work.
        product_s = 2.0 * peer_rows * shape.num_out * shape.num_in / split / flops
        transfers.append(_Transfer(gradient.ready_s, link.seconds(sent), product_s))
        num_bytes += sent
        # The matrix that is made, and the factors of all ranks.
        memory_bytes += shape.num_bytes + (peer_rows + shape.rows) * (shape.num_out + shape.num_in) * shape.itemsize
    exposed_s = _exposed(transfers, strategy.overlap, profile, placement)
    wire_s = sum(transfer.wire_s for transfer in transfers)
    return CommunicationCost(exposed_s, num_bytes, memory_bytes, num_buckets=len(transfers), wire_s=wire_s)


def _exposed(transfers: list[_Transfer], overlap: bool, profile: Profile, placement: Placement) -> float:
    """Return the seconds from the end of backward until the last transfer has arrived and is multiplied."""
    backward_s = profile.backward_s
    arrived_s = weights_exchanged_s(profile, placement) if overlap else backward_s
    done_s = backward_s
    # By the time they are ready: transfers share one link, and products wait for their factors.
    for transfer in sorted(transfers):
        arrived_s = max(arrived_s, transfer.ready_s if overlap else backward_s) + transfer.wire_s
        done_s = max(done_s, arrived_s) + transfer.product_s
    return done_s - backward_s


def layer_decisions(strategy: "Poseidon", profile: Profile, placement: Placement) -> list[Decision]:
    """Return the method for each layer that has factors, in the order of forward."""
    shapes = factored_layers(profile)
    named = {shape.name for shape in shapes}
    full_bytes = sum(gradient.num_bytes for gradient in profile.gradients if gradient.name not in named)
    flops = achieved_flops(profile)

    def extra_seconds(num_bytes: int) -> float:
        """Return how much longer the sums take if these bytes are added to them."""
        if placement.num_hosts == 1:
            return 0.0  # In shared memory nothing is faster than the sum.
        # The other gradients are summed anyway, so a layer only adds bytes, not latencies of its own.
        costs = [all_reduce_cost("cheapest", total, placement).wire_s for total in (full_bytes, full_bytes + num_bytes)]
        return costs[1] - costs[0]

    return [
        decide(shape, strategy.rule, placement.num_ranks, placement.shared_link, extra_seconds, flops)
        for shape in shapes
    ]


def factored_layers(profile: Profile) -> list[LayerShape]:
    """Return the layers whose gradients have factors."""
    gradients = {gradient.name: gradient for gradient in profile.gradients}
    layers = []
    for layer in profile.layers:
        gradient = gradients.get(f"{layer.name}.weight".lstrip("."))
        if layer.rows and gradient is not None and len(gradient.shape) > 1:
            num_out, num_in = gradient.shape[:2]
            itemsize = gradient.num_bytes // (num_out * num_in)
            convolution = len(gradient.shape) > 2
            layers.append(LayerShape(gradient.name, num_out, num_in, layer.rows, itemsize, convolution))
    return layers


def achieved_flops(profile: Profile) -> float:
    """Return the average floating-point operations per second of the worker.

    `Profile.work` counts a multiplication with its addition as one operation; here they are two.
    """
    seconds = profile.forward_s + profile.backward_s
    # Without a count, the default of `Compute`.
    return 2 * profile.work / seconds if profile.work and seconds else 1e11
