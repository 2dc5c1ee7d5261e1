"""Which operators DTensor computes in pieces as one process would. All others are computed on the whole.

These were tried, forward and backward, on even and uneven pieces: that DTensor takes an operator on does not mean that.
"""

from typing import Any

from torch.distributed.tensor import DTensor, Partial
from torch.utils._pytree import tree_leaves

VALUE_READS = frozenset({
    "item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "__bool__", "__int__", "__float__", "__complex__",
    "__index__", "__array__", "__format__", "__contains__",
})  # fmt: skip
"""What gives the model numbers, which must be of all ranks together."""

_RANDOM = frozenset({
    "alpha_dropout", "bernoulli", "binomial", "cauchy", "dropout1d", "dropout2d", "dropout3d", "exponential",
    "feature_alpha_dropout", "feature_dropout", "fractional_max_pool2d", "fractional_max_pool2d_with_indices",
    "fractional_max_pool3d", "fractional_max_pool3d_with_indices", "geometric", "gumbel_softmax", "log_normal",
    "multi_head_attention_forward", "multinomial", "native_dropout", "normal", "poisson", "rand_like", "randint_like",
    "randn_like", "random", "rrelu", "uniform",
})  # fmt: skip
"""Random operators, which draw by the whole also where all have the whole: so ranks stay in step."""

METADATA = frozenset({
    "__get__", "__set__", "__len__", "__hash__", "__repr__", "_has_compatible_shallow_copy_type", "_is_view", "dim",
    "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "ndimension", "nelement", "numel",
    "register_hook", "requires_grad_", "retain_grad", "size", "stride",
})  # fmt: skip
"""About a tensor, not its numbers."""

_ELEMENTWISE = frozenset({
    "abs", "absolute", "add", "addcdiv", "addcmul", "bfloat16", "bitwise_and", "bitwise_not", "bitwise_or", "bool",
    "ceil", "clamp", "clamp_max", "clamp_min", "clone", "contiguous", "copy", "cos", "cosh", "cpu", "cuda", "detach",
    "div", "divide", "double", "elu", "celu", "selu", "empty_like", "eq", "erf", "erfc", "exp", "exp2", "expm1",
    "fill", "float", "floor", "full_like", "ge", "gelu", "greater", "gt", "half", "int", "isfinite", "isinf", "isnan",
    "le", "leaky_relu", "lerp", "log", "log10", "log1p", "log2", "logical_and", "logical_not", "logical_or", "long",
    "lt", "masked_fill", "maximum", "minimum", "mish", "mul", "multiply", "ne", "neg", "negative", "ones_like", "pow",
    "reciprocal", "relu", "round", "rsqrt", "rsub", "sigmoid", "sign", "silu", "sin", "sinh", "softplus", "softsign",
    "sqrt", "square", "sub", "subtract", "tan", "tanh", "tanhshrink", "to", "true_divide", "trunc", "type_as", "where",
    "zero", "zeros_like",
    "__add__", "__and__", "__div__", "__eq__", "__ge__", "__gt__", "__iadd__", "__iand__", "__imul__", "__invert__",
    "__ior__", "__isub__", "__itruediv__", "__le__", "__lt__", "__mul__", "__ne__", "__neg__", "__or__", "__pow__",
    "__radd__", "__rdiv__", "__rmul__", "__rpow__", "__rsub__", "__rtruediv__", "__sub__", "__truediv__",
})  # fmt: skip
"""Of each number by itself: in pieces of any kind."""

_ON_ANY_SHARDS = frozenset({
    "addmm", "baddbmm", "bmm", "einsum", "embedding", "layer_norm", "linear", "log_softmax", "matmul", "mm", "rms_norm",
    "softmax", "sum", "__matmul__", "__rmatmul__",
})  # fmt: skip
"""Of pieces that may differ in size, but not of parts of sums. Products with vectors have no backward."""

_ON_EQUAL_SHARDS = frozenset({
    "__getitem__", "adaptive_avg_pool2d", "avg_pool2d", "cat", "chunk", "expand", "expand_as", "flatten", "max_pool2d",
    "mean", "movedim", "narrow", "permute", "reshape", "reshape_as", "scaled_dot_product_attention", "select", "split",
    "squeeze", "stack", "swapaxes", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as",
})  # fmt: skip
"""Of pieces that are equal in size."""

_IN_PLACE_DUNDERS = frozenset({
    f"__{name}__"
    for name in (
        "setitem", "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
        "ilshift", "irshift",
    )
})  # fmt: skip


def needs_gather(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator is to be computed on the whole of what it takes."""
    pieces = [each for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor)]
    bare = name if name.startswith("__") else name.removesuffix("_")
    drops = name == "scaled_dot_product_attention" and kwargs.get("dropout_p", args[4] if len(args) > 4 else 0)
    if bare in VALUE_READS or bare in _RANDOM or drops:
        return bool(pieces)
    if bare in _ELEMENTWISE:
        return False
    if bare in _ON_ANY_SHARDS:
        vectors = "matmul" in bare and any(each.dim() < 2 for each in pieces)
        return vectors or any(isinstance(each.placements[0], Partial) for each in pieces)
    return bool(pieces) if bare not in _ON_EQUAL_SHARDS else not all(_is_even(each) for each in pieces)


def is_sharded(x: Any) -> bool:
    """Whether no rank has all of it."""
    return isinstance(x, DTensor) and not x.placements[0].is_replicate()


def _is_even(x: DTensor) -> bool:
    dim = getattr(x.placements[0], "dim", None)
    return not is_sharded(x) or (dim is not None and x.shape[dim] % x.device_mesh.size() == 0)


def is_in_place(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator changes its first argument, or one called `out`."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in _IN_PLACE_DUNDERS
    return name.endswith("_") or kwargs.get("out") is not None or _is_asked(func, "inplace", args, kwargs)


def _is_asked(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function written in Python is given `name`."""
    code = getattr(func, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    place = names.index(name) if name in names else len(args)
    return bool(args[place] if place < len(args) else kwargs.get(name))
