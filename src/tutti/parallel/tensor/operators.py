"""Lists of operators that DTensor computes on shards with the result of one process. All others need a gather.

An operator is listed only if it was tested, forward and backward, on equal and unequal shards. That DTensor accepts an
operator is not enough: some results or gradients are wrong.
"""

from typing import Any

from torch.distributed.tensor import DTensor, Partial
from torch.utils._pytree import tree_leaves

VALUE_READS = frozenset({
    "item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "__bool__", "__int__", "__float__", "__complex__",
    "__index__", "__array__", "__format__", "__contains__",
})  # fmt: skip
"""Operators that return values to Python, where all ranks must see those of the full tensor."""

_RANDOM = frozenset({
    "alpha_dropout", "bernoulli", "binomial", "cauchy", "dropout1d", "dropout2d", "dropout3d", "exponential",
    "feature_alpha_dropout", "feature_dropout", "fractional_max_pool2d", "fractional_max_pool2d_with_indices",
    "fractional_max_pool3d", "fractional_max_pool3d_with_indices", "geometric", "gumbel_softmax", "log_normal",
    "multi_head_attention_forward", "multinomial", "native_dropout", "normal", "poisson", "rand_like", "randint_like",
    "randn_like", "random", "rrelu", "uniform",
})  # fmt: skip
"""Random operators. They draw for the full tensor on every rank, so that the ranks' generators stay equal."""

METADATA = frozenset({
    "__get__", "__set__", "__len__", "__hash__", "__repr__", "_has_compatible_shallow_copy_type", "_is_view", "dim",
    "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "ndimension", "nelement", "numel",
    "register_hook", "requires_grad_", "retain_grad", "size", "stride",
})  # fmt: skip
"""Operators that read or set properties of a tensor, not its values."""

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
"""Operators on each element by itself: correct on shards of any kind."""

_ON_ANY_SHARDS = frozenset({
    "addmm", "baddbmm", "bmm", "einsum", "embedding", "layer_norm", "linear", "log_softmax", "matmul", "mm", "rms_norm",
    "softmax", "sum", "__matmul__", "__rmatmul__",
})  # fmt: skip
"""Operators that are correct on shards of any size, but not on partial sums. Products with vectors lack a backward."""

_ON_EQUAL_SHARDS = frozenset({
    "__getitem__", "adaptive_avg_pool2d", "avg_pool2d", "cat", "chunk", "expand", "expand_as", "flatten", "max_pool2d",
    "mean", "movedim", "narrow", "permute", "reshape", "reshape_as", "scaled_dot_product_attention", "select", "split",
    "squeeze", "stack", "swapaxes", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as",
})  # fmt: skip
"""Operators that are correct on shards of equal size only."""

_IN_PLACE_DUNDERS = frozenset({
    f"__{name}__"
    for name in (
        "setitem", "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
        "ilshift", "irshift",
    )
})  # fmt: skip
"""Names of the in-place operators of Python's syntax; others end with an underscore."""


def needs_gather(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator must be computed on the full tensors of its arguments."""
    dtensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    # `relu_` counts as `relu`. Dunder names end with underscores of their own.
    bare = name if name.startswith("__") else name.removesuffix("_")
    # `dropout_p` is its fifth argument.
    # Attention with dropout draws random numbers.
    drops = name == "scaled_dot_product_attention" and kwargs.get("dropout_p", args[4] if len(args) > 4 else 0)
    if bare in VALUE_READS or bare in _RANDOM or drops:
        return bool(dtensors)
    if bare in _ELEMENTWISE:
        return False
    if bare in _ON_ANY_SHARDS:
        vectors = "matmul" in bare and any(x.dim() < 2 for x in dtensors)
        return vectors or any(isinstance(x.placements[0], Partial) for x in dtensors)
    # What is not listed was not tested: it is gathered as soon as it takes a DTensor.
    return bool(dtensors) if bare not in _ON_EQUAL_SHARDS else not all(_has_equal_shards(x) for x in dtensors)


def is_sharded(x: Any) -> bool:
    """Whether `x` is a DTensor of which no rank has the full value: sharded, or a partial sum."""
    return isinstance(x, DTensor) and not x.placements[0].is_replicate()


def _has_equal_shards(x: DTensor) -> bool:
    """Whether all ranks hold equally long parts of the tensor, or all of it."""
    dim = getattr(x.placements[0], "dim", None)
    # A partial sum has no dimension: its shards count as unequal, so it is gathered.
    return not is_sharded(x) or (dim is not None and x.shape[dim] % x.device_mesh.size() == 0)


def is_in_place(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator changes its first argument, or one called `out`."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in _IN_PLACE_DUNDERS
    return name.endswith("_") or kwargs.get("out") is not None or _has_flag(func, "inplace", args, kwargs)


def _has_flag(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function written in Python is called with a true argument `name`, by position or keyword."""
    # Functions of `torch.nn.functional` are Python code, whose parameters have names. Built-in functions have none;
    # their in-place forms end with an underscore.
    code = getattr(func, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    index = names.index(name) if name in names else len(args)
    return bool(args[index] if index < len(args) else kwargs.get(name))
