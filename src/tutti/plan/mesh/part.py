"""What one rank of a mesh does of a step: each layer as it is split, and what that takes to say."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tutti.parallel.tensor.plan import TensorPlan
from tutti.parallel.tensor.ways import Way
from tutti.plan.place import Place
from tutti.plan.profile import LayerProfile, Profile
from tutti.plan.sums import exact_sum


@dataclass(frozen=True)
class LayerPart:
    """One layer, as a rank that splits it with others has it; seconds and bytes of all samples of a replica."""

    name: str
    forward_s: float
    backward_s: float
    talking_s: float
    """Sums and gathers between those who split it."""
    gradient_bytes: float
    activation_bytes: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s + self.talking_s


def parts_of(profile: Profile, plan: TensorPlan, place: Place) -> list[LayerPart]:
    """The layers of a profile as one of `plan.num_ranks` ranks has them, who are placed like this."""
    made = []
    ways = [plan.way_of(layer.name) for layer in profile.layers]
    shapes = {layer.name: layer.shape for layer in plan.layers}
    for number, (layer, way) in enumerate(zip(profile.layers, ways, strict=True)):
        later = next((each for each in ways[number + 1 :] if each != "whole"), None)
        share = 1 / plan.num_ranks if way != "whole" else 1.0
        # What is computed between two layers of a pair is computed on parts.
        within = way == "whole" and not layer.gradient_bytes and _inside_a_pair(ways, number)
        share = 1 / plan.num_ranks if within else share
        kept = share if way in ("outputs", "heads") or within else 1.0
        made.append(
            LayerPart(
                layer.name,
                share * layer.forward_s,
                share * layer.backward_s,
                _talking_s(layer, way, later, shapes.get(layer.name, ()), place),
                share * layer.gradient_bytes,
                kept * layer.activation_bytes,
            )
        )
    return made


def _inside_a_pair(ways: Sequence[Way], number: int) -> bool:
    before = next((each for each in reversed(ways[:number]) if each != "whole"), None)
    after = next((each for each in ways[number + 1 :] if each != "whole"), None)
    return before in ("outputs", "heads") and after == "inputs"


def _talking_s(layer: LayerProfile, way: Way, later: Way | None, shape: tuple[int, ...], place: Place) -> float:
    """Between ranks that split a layer, forward and back.

    What is split by inputs or words sums its outputs; what is split by outputs sums the gradient of its inputs, and
    where nobody takes its outputs as they are, those are gathered, and their gradient is not.
    """
    if way == "whole" or place.num_ranks == 1:
        return 0.0
    if way in ("inputs", "vocabulary"):
        return exact_sum("native", layer.activation_bytes, place).wire_s
    inputs = layer.activation_bytes * prod(shape[1:]) / max(1, shape[0]) if len(shape) == 2 else layer.activation_bytes
    gathered_s = 0.0 if later == "inputs" else exact_sum("native", layer.activation_bytes, place).wire_s / 2
    return exact_sum("native", inputs, place).wire_s + gathered_s
