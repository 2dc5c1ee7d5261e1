"""Which way of splitting suits which layer."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import nn

from tutti.parallel.tensor.styles import PARALLEL_STYLES, ParallelStyle

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead")
"""What models call the number of their attention's heads."""

StyleChoice = tuple[ParallelStyle, str]


def styles(model: nn.Module, num_ranks: int) -> dict[str, StyleChoice]:
    """By name, how each layer for which there is a rule should be split, and why."""
    found: dict[str, StyleChoice] = {}
    for prefix, parent in model.named_modules():
        if isinstance(parent, nn.MultiheadAttention):
            found.update(_whole_attention(prefix, parent))
        children = [(f"{prefix}.{key}".lstrip("."), child) for key, child in parent.named_children()]
        for name, verdict in [*_attention(parent, children, num_ranks), *_pairs(parent, children, num_ranks)]:
            found.setdefault(name, verdict)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding, *CONVOLUTIONS)) and name not in found:
            found[name] = _alone(module, num_ranks)
    return found


def refusal(module: nn.Module, style: ParallelStyle, num_ranks: int) -> str | None:
    """Why a layer cannot be split so; None if it can."""
    if style not in PARALLEL_STYLES:
        return "there is no such way"
    if style == "replicate":
        return None
    sizes = _sizes(module)
    if style not in sizes:
        ways = " or ".join(sizes)
        return f"it is split by {ways}" if sizes else f"of a {type(module).__name__} there are whole copies only"
    return _peculiarity(module, style, num_ranks) or (
        f"it has {sizes[style]} of them for {num_ranks} ranks" if sizes[style] < num_ranks else None
    )


def _sizes(module: nn.Module) -> dict[str, int]:
    """How many things there are to split, by way."""
    if isinstance(module, nn.Embedding):
        return {"vocabulary": module.num_embeddings}
    if isinstance(module, CONVOLUTIONS):
        return {"colwise": module.out_channels, "rowwise": module.in_channels}
    if isinstance(module, nn.Linear):
        return {"colwise": module.out_features, "rowwise": module.in_features, "heads": module.out_features // 3}
    return {}


def _peculiarity(module: nn.Module, style: ParallelStyle, num_ranks: int) -> str | None:
    """What else about a layer is in the way."""
    if isinstance(module, nn.Embedding) and (
        module.max_norm is not None or module.padding_idx is not None or module.sparse
    ):
        return "max_norm, padding_idx and sparse gradients need the whole table"
    if isinstance(module, CONVOLUTIONS) and module.groups != 1:
        return f"it has {module.groups} groups"
    if isinstance(module, nn.Linear) and style == "heads" and module.out_features % (3 * num_ranks):
        return f"its {module.out_features} outputs are not queries, keys and values of {num_ranks} equal parts"
    return None


def _whole_attention(prefix: str, module: nn.MultiheadAttention) -> Iterator[tuple[str, StyleChoice]]:
    why = "nn.MultiheadAttention puts heads and samples in one dimension"
    yield from ((f"{prefix}.{name}".strip("."), ("replicate", why)) for name, _ in module.named_modules())


def _alone(module: nn.Module, num_ranks: int) -> StyleChoice:
    style: ParallelStyle = "vocabulary" if isinstance(module, nn.Embedding) else "colwise"
    why = "words over ranks, summed" if style == "vocabulary" else "outputs over ranks, gathered where needed"
    if isinstance(module, nn.Linear) and module.out_features == 3 * module.in_features:
        why += "; if they are queries, keys and values, split it by 'heads'"
    return _unless_refused(module, (style, why), num_ranks)


def _unless_refused(module: nn.Module, verdict: StyleChoice, num_ranks: int) -> StyleChoice:
    wrong = refusal(module, verdict[0], num_ranks)
    return ("replicate", wrong) if wrong else verdict


def _pairs(
    parent: nn.Module, children: list[tuple[str, nn.Module]], num_ranks: int
) -> Iterator[tuple[str, StyleChoice]]:
    """Layers of one kind that follow each other, with nothing that has parameters between.

    That one takes what the other gives is sure in a sequence; elsewhere it shows in their widths, unless all are alike.
    """
    weighty = [(name, child) for name, child in children if next(child.parameters(), None) is not None]
    taken = ""
    for (first_name, first), (second_name, second) in pairwise(weighty):
        if first_name == taken or not _fits(first, second):
            continue
        if not isinstance(parent, nn.Sequential) and _alike(first, second):
            continue
        if refusal(first, "colwise", num_ranks) or refusal(second, "rowwise", num_ranks):
            continue
        yield first_name, ("colwise", f"'{second_name}' takes its outputs as they are")
        yield second_name, ("rowwise", f"takes the outputs of '{first_name}' as they are; one sum for both")
        taken = second_name


def _fits(first: nn.Module, second: nn.Module) -> bool:
    if isinstance(first, nn.Linear) and isinstance(second, nn.Linear):
        return first.out_features == second.in_features
    if isinstance(first, CONVOLUTIONS) and isinstance(second, CONVOLUTIONS):
        return first.out_channels == second.in_channels
    return False


def _alike(first: nn.Module, second: nn.Module) -> bool:
    """Whether both take and give as much: queries and keys, say."""
    return (
        len({size for style in ("colwise", "rowwise") for it in (first, second) for size in [_sizes(it)[style]]}) == 1
    )


def _attention(
    parent: nn.Module, children: list[tuple[str, nn.Module]], num_ranks: int
) -> Iterator[tuple[str, StyleChoice]]:
    """Queries, keys and values, by one Linear layer or three, and the one that mixes heads again."""
    num_heads = next((value for key in _HEADS if isinstance(value := getattr(parent, key, None), int)), None)
    linear: list[tuple[str, Any]] = [(name, child) for name, child in children if isinstance(child, nn.Linear)]
    for index, (name, layer) in enumerate(linear[:-1]):
        width = layer.in_features
        fused = layer.out_features == 3 * width
        run = linear[index : index + (2 if fused else 4)]
        square = all((it.in_features, it.out_features) == (width, width) for _, it in run[int(fused) :])
        if num_heads is None or len(run) != (2 if fused else 4) or not square:
            continue
        if num_heads % num_ranks:
            yield from ((each, ("replicate", f"{num_heads} heads over {num_ranks} ranks")) for each, _ in run)
            return
        why = f"{num_heads // num_ranks} of {num_heads} heads each"
        style: ParallelStyle = "heads" if fused else "colwise"
        yield from ((each, (style, why)) for each, _ in run[:-1])
        yield run[-1][0], ("rowwise", f"takes the heads as they are; one sum after {name}")
        return
