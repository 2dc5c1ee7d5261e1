"""Operators that DTensor takes on, but of which it makes something else than one process would, or has no backward."""

from typing import Any

READS = frozenset({
    "item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "__bool__", "__int__", "__float__", "__complex__",
    "__index__", "__array__", "__format__", "__contains__",
})  # fmt: skip
"""What gives the model numbers, which must be of all ranks together."""

_DRAWS = frozenset({
    "alpha_dropout", "bernoulli", "binomial", "cauchy", "dropout1d", "dropout2d", "dropout3d", "exponential",
    "feature_alpha_dropout", "feature_dropout", "fractional_max_pool2d", "fractional_max_pool2d_with_indices",
    "fractional_max_pool3d", "fractional_max_pool3d_with_indices", "geometric", "gumbel_softmax", "log_normal",
    "multi_head_attention_forward", "multinomial", "native_dropout", "normal", "poisson", "rand_like", "randint_like",
    "randn_like", "random", "rrelu", "uniform",
})  # fmt: skip
"""Random operators: ranks draw alike as long as all draw as many numbers. Plain dropout needs no messages."""

_UNLIKE = frozenset({"cummax", "cummin", "cumprod", "cumsum", "logcumsumexp"})
"""Computed in pieces without regard to the others."""

_NO_BACKWARD = frozenset({"group_norm", "instance_norm", "prelu"})
"""Computed in pieces, until gradients are wanted."""

_WHOLE = _DRAWS | _UNLIKE | _NO_BACKWARD

_CHANGES = frozenset({
    f"__{name}__"
    for name in (
        "setitem", "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
        "ilshift", "irshift",
    )
})  # fmt: skip


def needs_whole(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether an operator is to be computed on the whole of what it takes."""
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p"))
    return name in READS or name.removesuffix("_") in _WHOLE


def in_place(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator changes its first argument, or one called `out`."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in _CHANGES
    return name.endswith("_") or kwargs.get("out") is not None or bool(argument(func, "inplace", args, kwargs))


def argument(func: Any, name: str, args: Any, kwargs: dict[str, Any], default: Any = None) -> Any:
    """What a function written in Python is given as `name`."""
    if name in kwargs:
        return kwargs[name]
    code = getattr(func, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    place = names.index(name) if name in names else len(args)
    return args[place] if place < len(args) else default
