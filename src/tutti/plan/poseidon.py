"""What Poseidon costs: each layer in its own way, all on one link, while backward still runs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from tutti.plan.gradients import weights_known
from tutti.plan.loads import loads_of
from tutti.plan.place import Place
from tutti.plan.profile.record import Profile
from tutti.plan.sums import exact_sum
from tutti.plan.toll import Toll
from tutti.strategies import Poseidon
from tutti.strategies.poseidon import Decision, LayerShape
from tutti.strategies.poseidon.rule import Method, decide


class _Travel(NamedTuple):
    """A bucket or a layer on its way."""

    ready_s: float
    wire_s: float
    product_s: float = 0.0
    """To multiply what has arrived."""


def poseidon(strategy: Poseidon, profile: Profile, place: Place, methods: Mapping[str, Method] | None = None) -> Toll:
    """Buckets and factors share the link as they become ready; what has arrived is multiplied when backward is over.

    `methods` are those of layers that do not go in full, where all that was decided before, by batches of another size.
    """
    decisions = {each.shape.name: each for each in per_layer(strategy, profile, place)}
    if methods is not None:
        decisions = {name: replace(each, method=methods.get(name, "full")) for name, each in decisions.items()}
    apart = {name: each for name, each in decisions.items() if each.method != "full"}
    rest = replace(profile, gradients=tuple(each for each in profile.gradients if each.name not in apart))
    flops, link = speed_of(profile), place.crowded
    known = place.link if strategy.rule == "priced" and place.num_hosts > 1 else None
    loads = loads_of(rest, strategy.in_full(known).bucket_bytes)
    sums = [exact_sum("native", load.num_bytes, place) for load in loads]
    travels = [_Travel(load.ready_s, each.wire_s) for load, each in zip(loads, sums, strict=True)]
    num_bytes = sum(each.num_bytes for each in sums)
    memory_bytes = 0.0
    for gradient in profile.gradients:
        if (chosen := apart.get(gradient.name)) is None:
            continue
        shape, sent = chosen.shape, chosen.sent_bytes[chosen.method]
        split = place.num_ranks if chosen.method == "owners" else 1
        others_rows = (place.num_ranks - 1) * shape.rows
        product_s = 2.0 * others_rows * shape.num_out * shape.num_in / split / flops
        travels.append(_Travel(gradient.ready_s, link.seconds(sent), product_s))
        num_bytes += sent
        memory_bytes += shape.num_bytes + (others_rows + shape.rows) * (shape.num_out + shape.num_in) * shape.itemsize
    exposed_s = _exposed(travels, strategy.overlap, profile, place)
    wire_s = sum(travel.wire_s for travel in travels)
    return Toll(exposed_s, num_bytes, memory_bytes, num_buckets=len(travels), wire_s=wire_s)


def _exposed(travels: list[_Travel], overlap: bool, profile: Profile, place: Place) -> float:
    backward_s = profile.backward_s
    arrived_s = weights_known(profile, place) if overlap else backward_s
    done_s = backward_s
    for travel in sorted(travels):
        arrived_s = max(arrived_s, travel.ready_s if overlap else backward_s) + travel.wire_s
        done_s = max(done_s, arrived_s) + travel.product_s
    return done_s - backward_s


def per_layer(strategy: Poseidon, profile: Profile, place: Place) -> list[Decision]:
    """How each layer that has factors would go, in the order of forward."""
    shapes = shapes_of(profile)
    named = {shape.name for shape in shapes}
    always = sum(gradient.num_bytes for gradient in profile.gradients if gradient.name not in named)
    flops = speed_of(profile)

    def more_s(num_bytes: int) -> float:
        if place.num_hosts == 1:
            return 0.0  # In memory nothing is faster than the sum.
        costs = [exact_sum("cheapest", total, place).wire_s for total in (always, always + num_bytes)]
        return costs[1] - costs[0]

    return [decide(shape, strategy.rule, place.num_ranks, place.crowded, more_s, flops) for shape in shapes]


def shapes_of(profile: Profile) -> list[LayerShape]:
    """Layers that have factors."""
    gradients = {gradient.name: gradient for gradient in profile.gradients}
    found = []
    for layer in profile.layers:
        gradient = gradients.get(f"{layer.name}.weight".lstrip("."))
        if layer.rows and gradient is not None and len(gradient.shape) > 1:
            num_out, num_in = gradient.shape[:2]
            itemsize = gradient.num_bytes // (num_out * num_in)
            convolution = len(gradient.shape) > 2
            found.append(LayerShape(gradient.name, num_out, num_in, layer.rows, itemsize, convolution))
    return found


def speed_of(profile: Profile) -> float:
    """Operations a second that the worker reaches, on average: a multiplication and its addition, one in W, are two."""
    seconds = profile.forward_s + profile.backward_s
    return 2 * profile.work / seconds if profile.work and seconds else 1e11
