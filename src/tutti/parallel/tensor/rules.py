"""Rules that choose a parallel style for each layer of a model.

Communication is least where a column-parallel layer feeds a row-parallel one: the values between them stay sharded, and
one all-reduce after the second serves both (Shoeybi et al. 2019). So pairs are looked for first, in attention and in
sequences; other layers are split alone.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import nn

from tutti.parallel.tensor.styles import PARALLEL_STYLES, ParallelStyle

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Convolutions that are split by channels."""

_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead")
"""Names under which attention modules keep the number of their heads."""

StyleChoice = tuple[ParallelStyle, str]
"""A style, and the reason for it."""


def styles(model: nn.Module, num_ranks: int) -> dict[str, StyleChoice]:
    """Return the style of each layer for which there is a rule, by name."""
    choices: dict[str, StyleChoice] = {}
    for prefix, parent in model.named_modules():
        # Before its children are visited: `setdefault` below keeps the first choice for a name.
        if isinstance(parent, nn.MultiheadAttention):
            choices.update(_replicated_attention(prefix, parent))
        children = [(f"{prefix}.{key}".lstrip("."), child) for key, child in parent.named_children()]
        for name, choice in [*_attention(parent, children, num_ranks), *_pairs(parent, children, num_ranks)]:
            choices.setdefault(name, choice)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding, *CONVOLUTIONS)) and name not in choices:
            choices[name] = _single(module, num_ranks)
    return choices


def refusal(module: nn.Module, style: ParallelStyle, num_ranks: int) -> str | None:
    """Return why a layer cannot have a style; None if it can."""
    if style not in PARALLEL_STYLES:
        return "there is no such style"
    if style == "replicate":
        return None
    sizes = _sizes(module)
    if style not in sizes:
        kind = type(module).__name__
        return f"a {kind} can be {', '.join(sizes)} or replicate" if sizes else f"a {kind} can only be replicate"
    return _other_refusal(module, style, num_ranks) or (
        f"its size there is {sizes[style]}, less than {num_ranks} ranks" if sizes[style] < num_ranks else None
    )


def _sizes(module: nn.Module) -> dict[str, int]:
    """Return the size of the dimension that each possible style shards."""
    if isinstance(module, nn.Embedding):
        return {"vocabulary": module.num_embeddings}
    if isinstance(module, CONVOLUTIONS):
        return {"colwise": module.out_channels, "rowwise": module.in_channels}
    if isinstance(module, nn.Linear):
        return {"colwise": module.out_features, "rowwise": module.in_features, "heads": module.out_features // 3}
    return {}


def _other_refusal(module: nn.Module, style: ParallelStyle, num_ranks: int) -> str | None:
    """Return a reason against a style other than its size."""
    if isinstance(module, nn.Embedding) and (
        module.max_norm is not None or module.padding_idx is not None or module.sparse
    ):
        return "max_norm, padding_idx and sparse gradients need the whole table"
    if isinstance(module, CONVOLUTIONS) and module.groups != 1:
        return f"it has {module.groups} groups"
    # One matrix of queries, keys and values, one below the other: each of the three is cut among the ranks by itself.
    if isinstance(module, nn.Linear) and style == "heads" and module.out_features % (3 * num_ranks):
        return f"its {module.out_features} outputs are not queries, keys and values of {num_ranks} equal parts"
    return None


def _replicated_attention(prefix: str, module: nn.MultiheadAttention) -> Iterator[tuple[str, StyleChoice]]:
    reason = "nn.MultiheadAttention puts heads and samples in one dimension"
    yield from ((f"{prefix}.{name}".strip("."), ("replicate", reason)) for name, _ in module.named_modules())


def _single(module: nn.Module, num_ranks: int) -> StyleChoice:
    """Return the style of a layer that is not part of a pair."""
    style: ParallelStyle = "vocabulary" if isinstance(module, nn.Embedding) else "colwise"
    reason = "words over ranks, summed" if style == "vocabulary" else "outputs over ranks, gathered where needed"
    if isinstance(module, nn.Linear) and module.out_features == 3 * module.in_features:
        reason += "; if they are queries, keys and values, use 'heads'"
    wrong = refusal(module, style, num_ranks)
    return ("replicate", wrong) if wrong else (style, reason)


def _pairs(
    parent: nn.Module, children: list[tuple[str, nn.Module]], num_ranks: int
) -> Iterator[tuple[str, StyleChoice]]:
    """Yield column- and row-parallel styles for layers that follow each other without parameters between them.

    In a sequence the second layer surely takes the output of the first. Elsewhere their widths show it, unless all
    widths are equal: then they could as well be parallel layers, such as queries and keys.
    """
    with_parameters = [(name, child) for name, child in children if next(child.parameters(), None) is not None]
    taken = ""
    for (first_name, first), (second_name, second) in pairwise(with_parameters):
        # The second layer of one pair cannot be the first of the next: its output is replicated already.
        if first_name == taken or not _fits(first, second):
            continue
        if not isinstance(parent, nn.Sequential) and _all_widths_equal(first, second):
            continue
        if refusal(first, "colwise", num_ranks) or refusal(second, "rowwise", num_ranks):
            continue
        yield first_name, ("colwise", f"'{second_name}' takes its outputs as shards")
        yield second_name, ("rowwise", f"takes the outputs of '{first_name}' as shards; one all-reduce for both")
        taken = second_name


def _fits(first: nn.Module, second: nn.Module) -> bool:
    """Whether the second layer can take the output of the first."""
    if isinstance(first, nn.Linear) and isinstance(second, nn.Linear):
        return first.out_features == second.in_features
    if isinstance(first, CONVOLUTIONS) and isinstance(second, CONVOLUTIONS):
        return first.out_channels == second.in_channels
    return False


def _all_widths_equal(first: nn.Module, second: nn.Module) -> bool:
    return len({_sizes(layer)[style] for layer in (first, second) for style in ("colwise", "rowwise")}) == 1


def _attention(
    parent: nn.Module, children: list[tuple[str, nn.Module]], num_ranks: int
) -> Iterator[tuple[str, StyleChoice]]:
    """Yield styles for queries, keys and values, in one Linear layer or three, and for the output projection."""
    num_heads = next((value for key in _HEADS if isinstance(value := getattr(parent, key, None), int)), None)
    linear: list[tuple[str, Any]] = [(name, child) for name, child in children if isinstance(child, nn.Linear)]
    for index, (name, layer) in enumerate(linear[:-1]):
        width = layer.in_features
        # Fused: one layer computes queries, keys and values, and the output projection follows. Otherwise these are
        # four square layers in a row.
        fused = layer.out_features == 3 * width
        run = linear[index : index + (2 if fused else 4)]
        square = all((part.in_features, part.out_features) == (width, width) for _, part in run[int(fused) :])
        if num_heads is None or len(run) != (2 if fused else 4) or not square:
            continue
        if num_heads % num_ranks:
            yield from ((part, ("replicate", f"{num_heads} heads over {num_ranks} ranks")) for part, _ in run)
            return
        style: ParallelStyle = "heads" if fused else "colwise"
        yield from ((part, (style, f"{num_heads // num_ranks} of {num_heads} heads each")) for part, _ in run[:-1])
        yield run[-1][0], ("rowwise", f"takes the heads as shards; one all-reduce for it and {name}")
        return
