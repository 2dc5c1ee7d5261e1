"""Nested Python values as JSON and named tensors, and back, exactly and without pickle.

JSON values stand for themselves. Everything else is an object with the key "!", which names its type:

    {"!": "tensor", "name": "state.0.exp_avg"}                               a tensor of the file
    {"!": "tensor", "name": ..., "dtype": "complex128", "shape": [2]}        one stored as bytes
    {"!": "tensor", "name": ..., "place": {"dim": 0, "shape": [8], "pieces": [[4, 2]]}}
                                                                             a shard, and its place in the whole tensor
    {"!": "array", "name": ..., "dtype": "<f4", "shape": [2]}                a NumPy array, stored as bytes
    {"!": "dict", "items": [[key, value], ...]}                              keys that are not all text

Tensors come back on the CPU, without gradients. `Counter`, `OrderedDict` and `defaultdict` come back as `dict`.
"""

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tutti.errors import CheckpointError
from tutti.parallel.shards import Shard, TensorShard

TAG = "!"
"""The key that marks an object which is not a plain dict."""

SAFE_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes that every release of safetensors since 0.4.4 loads, by their names in a file. Others become bytes."""

_MAX_DEPTH = 100
PLAIN_DICTS = frozenset({dict, OrderedDict, defaultdict, Counter})
PLAIN_KEYS = frozenset({type(None), str, int, float, bool})
PLAIN_TENSORS = frozenset({Tensor, nn.Parameter, nn.Buffer})
_HELD = "numbers, text, bytes, tensors, NumPy arrays, and dicts, lists and tuples of these"

_SIMPLE: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: None,
    bool: lambda value: value,
    str: lambda value: value,
    # Python refuses to print numbers of thousands of digits, except in hexadecimal.
    int: lambda value: value if abs(value) < 2**63 else {TAG: "int", "hex": hex(value)},
    float: lambda value: value if math.isfinite(value) else {TAG: "float", "text": str(value)},
    bytes: lambda value: {TAG: "bytes", "base64": base64.b64encode(value).decode()},
    torch.dtype: lambda value: {TAG: "dtype", "name": str(value).removeprefix("torch.")},
    torch.device: lambda value: {TAG: "device", "name": str(value)},
    torch.Size: lambda value: {TAG: "size", "shape": list(value)},
}
"""Values without parts as JSON, by type."""

SIMPLE_KINDS = frozenset(_SIMPLE)
"""Types of values without parts, none of which can change."""

_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda value: int(value["hex"], 16),
    "float": lambda value: float(value["text"]),
    "bytes": lambda value: base64.b64decode(value["base64"], validate=True),
    "dtype": lambda value: _dtype(value["name"]),
    "device": lambda value: torch.device(value["name"]),
    "size": lambda value: torch.Size(value["shape"]),
    "scalar": lambda value: _stored_array({"shape": [], **value}, base64.b64decode(value["base64"], validate=True))[()],
}
"""Values without parts from JSON, by tag."""

Path = tuple[Any, ...]


def encode(value: Any, root: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Return `value` as a JSON value, and the tensors to which it refers by name.

    Raises `CheckpointError` with the path of everything that cannot be stored; `root` is how these paths begin.
    """
    encoder = _Encoder(root)
    encoded = encoder.encode(value, ())
    if encoder.problems:
        more = f" (and {len(encoder.problems) - 5} more)" if len(encoder.problems) > 5 else ""
        raise CheckpointError(
            f"{'. '.join(encoder.problems[:5])}{more}. Checkpoints hold {_HELD}. Leave it out, or store what it can be "
            "made from again, such as its state_dict()."
        )
    return encoded, encoder.tensors


class _Encoder:
    """One pass over a value, which collects its tensors and everything that cannot be stored."""

    def __init__(self, root: str) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.problems: list[str] = []
        self._root = root

    def encode(self, value: Any, path: Path) -> Any:
        """Return one value as JSON; None in place of what is refused."""
        if len(path) > _MAX_DEPTH:
            return self._refuse(path[:3], f"is nested more than {_MAX_DEPTH} deep, or contains itself")
        if isinstance(value, Tensor | TensorShard):
            return self._tensor(value, path)
        if isinstance(value, np.generic | np.ndarray):  # Before float: np.float64 is one.
            return self._array(value, path)
        if type(value) in PLAIN_DICTS:
            return self._dict(value, path)
        if type(value) in (list, tuple):
            items = [self.encode(item, (*path, number)) for number, item in enumerate(value)]
            return items if type(value) is list else {TAG: "tuple", "items": items}
        make = _SIMPLE.get(type(value))
        return make(value) if make else self._refuse(path, f"is {_kind(value)}")

    def _dict(self, value: dict[Any, Any], path: Path) -> Any:
        wrong = [key for key in value if type(key) not in PLAIN_KEYS]
        if wrong:
            return self._refuse(path, f"has the key {wrong[0]!r}, which is {_kind(wrong[0])} and not text or a number")
        if TAG not in value and all(type(key) is str for key in value):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        items = [[self.encode(key, path), self.encode(item, (*path, key))] for key, item in value.items()]
        return {TAG: "dict", "items": items}

    def _tensor(self, value: Tensor | TensorShard, path: Path) -> Any:
        if isinstance(value, TensorShard):
            entry = self._tensor(value.tensor, path)
            return entry and {**entry, "place": asdict(value.place)}
        if type(value) not in PLAIN_TENSORS:
            return self._refuse(path, f"is {_kind(value)}, a subclass of Tensor")
        if value.layout is not torch.strided or value.is_quantized or value.is_nested or value.is_meta:
            kind = "quantised" if value.is_quantized else "nested" if value.is_nested else str(value.layout)
            return self._refuse(path, f"is a tensor without plain values ({'meta' if value.is_meta else kind})")
        value = value.detach()
        if value.dtype in SAFE_DTYPES.values():
            return {TAG: "tensor", "name": self._add(value, path)}
        raw = value.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        dtype = str(value.dtype).removeprefix("torch.")
        return {TAG: "tensor", "name": self._add(raw, path), "dtype": dtype, "shape": list(value.shape)}

    def _array(self, value: Any, path: Path) -> Any:
        array = np.asarray(value)
        if array.dtype.kind in "OV" or not (type(value) is np.ndarray or isinstance(value, np.generic)):
            return self._refuse(path, f"is {_kind(value)} of dtype {array.dtype}")
        raw = array.tobytes()
        if isinstance(value, np.generic):
            return {TAG: "scalar", "dtype": array.dtype.str, "base64": base64.b64encode(raw).decode()}
        name = self._add(torch.from_numpy(np.frombuffer(bytearray(raw), np.uint8)), path)
        return {TAG: "array", "name": name, "dtype": array.dtype.str, "shape": list(array.shape)}

    def _add(self, tensor: Tensor, path: Path) -> str:
        """Keep a tensor under the name that its path suggests: unique, and free for use in a safetensors file."""
        wanted = name = ".".join(map(str, path)).encode(errors="backslashreplace").decode() or "value"
        number = 1
        while name in self.tensors or name == "__metadata__":
            number += 1
            name = f"{wanted}#{number}"
        self.tensors[name] = tensor
        return name

    def _refuse(self, path: Path, problem: str) -> None:
        parts = [f"[{key!r}]" for key in path]
        if not self._root and path:
            parts[0] = str(path[0])
        self.problems.append(f"{self._root}{''.join(parts) or 'the value'[: 0 if self._root else None]} {problem}")


def _kind(value: Any) -> str:
    """The type of a value with its article, such as "a function"."""
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `encode` was given. Raises `CheckpointError` if that cannot have been `value`."""
    try:
        return _decode(value, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(
            f"the checkpoint holds a value that cannot be read ({type(error).__name__}: {error}). It was not written "
            "by Tutti, or was changed afterwards; use another checkpoint."
        ) from error


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _decode(item, tensors) for key, item in value.items()}
    kind = value[TAG]
    if kind in ("tensor", "array"):
        return (_stored_tensor if kind == "tensor" else _stored_array)(value, tensors[value["name"]])
    if kind in ("dict", "tuple"):
        items = _decode(value["items"], tensors)
        return dict(items) if kind == "dict" else tuple(items)
    return _DECODERS[kind](value)


def _stored_tensor(value: dict[str, Any], stored: Tensor) -> Tensor | TensorShard:
    tensor = stored.view(_dtype(value["dtype"])).reshape(value["shape"]) if "dtype" in value else stored
    if (place := value.get("place")) is None:
        return tensor
    pieces = tuple((start, length) for start, length in place["pieces"])
    return TensorShard(tensor, Shard(place["dim"], tuple(place["shape"]), pieces))


def _stored_array(value: dict[str, Any], raw: Tensor | bytes) -> np.ndarray:
    content = bytearray(raw.numpy().tobytes() if isinstance(raw, Tensor) else raw)
    dtype = np.dtype(value["dtype"])
    if dtype.hasobject:
        raise ValueError(f"an array of dtype {dtype}")  # Its bytes would be taken for addresses.
    return np.ndarray(tuple(value["shape"]), dtype, buffer=content)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch.{name} is not a dtype")
    return found
