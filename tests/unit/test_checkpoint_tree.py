"""Nested values of checkpoints: what comes back is exactly what was stored, and the rest is refused by its path."""

import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tutti.checkpoint.tree import TAG, decode, encode
from tutti.errors import CheckpointError, ConfigError

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
keys = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just(TAG)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=20,
)


def there_and_back(value: Any) -> Any:
    encoded, tensors = encode(value)
    return decode(json.loads(json.dumps(encoded, allow_nan=False)), tensors)


@given(values)
def test_plain_values_come_back_exactly(value: Any) -> None:
    assert repr(there_and_back(value)) == repr(value)  # Also types, the order of keys, -0.0 and nan.


def test_numbers_of_thousands_of_digits() -> None:
    assert there_and_back([10**5000, -(2**63), 2**63]) == [10**5000, -(2**63), 2**63]


@pytest.mark.parametrize("made", [Counter("aab"), OrderedDict(b=1, a=2), defaultdict(int, {3: 4})], ids=type)
def test_dicts_of_the_standard_library_become_plain(made: dict[Any, Any]) -> None:
    back = there_and_back(made)
    assert type(back) is dict
    assert list(back.items()) == list(made.items())


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.complex64, torch.complex128, torch.complex32, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)], ids=str)
def test_tensors_of_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    octets = torch.arange(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    tensor = (octets % 2 if dtype == torch.bool else octets).view(dtype).reshape(shape)
    back = there_and_back({"a": [tensor]})["a"][0]
    assert (back.dtype, back.shape) == (dtype, shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_tensors_that_are_views() -> None:
    base = torch.randn(4, 6, dtype=torch.complex128)
    for view in (base.t(), base[:, ::2], base.conj(), base.real, base[0, 0].imag, base.expand(2, 4, 6)):
        assert torch.equal(there_and_back(view), view)


def test_names_of_tensors_are_their_paths_and_unique() -> None:
    one = torch.ones(1)
    value = {"a": {"b": one * 1}, "a.b": one * 2, "n": {0: one * 3, "0": one * 4}, "__metadata__": one * 5}
    encoded, tensors = encode(value)
    assert set(tensors) == {"a.b", "a.b#2", "n.0", "n.0#2", "__metadata__#2"}
    assert decode(encoded, tensors) == value


def test_parameters_come_back_as_plain_tensors() -> None:
    back = there_and_back(nn.Parameter(torch.ones(2)))
    assert type(back) is torch.Tensor
    assert not back.requires_grad


@pytest.mark.parametrize("dtype", ["f8", ">f4", "i2", "u8", "?", "c16", "U3", "S2", "M8[ns]", "m8[s]"])
def test_numpy_arrays_and_scalars(dtype: str) -> None:
    array = np.arange(6).astype(dtype).reshape(2, 3)
    for each in (array, array.T, array[:0], np.asarray(array[1, 1]), array[1, 2]):
        back = there_and_back({"x": each})["x"]
        assert type(back) is type(each)
        assert (back.dtype, back.shape) == (each.dtype, each.shape)
        assert np.array_equal(back, each)
    there_and_back(array)[0, 0] = array[0, 1]  # It is writable.


def test_generators_states_of_python_numpy_and_torch() -> None:
    import random

    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    back = there_and_back(state)
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])
    torch.set_rng_state(back["torch"])
    assert torch.equal(back["torch"], state["torch"])


def test_dtypes_devices_and_sizes() -> None:
    value = [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])]
    assert there_and_back(value) == value
    assert type(there_and_back(value)[2]) is torch.Size


Point = namedtuple("Point", "x y")
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "function": (lambda: {"user": {"callback": there_and_back}}, r"^user\['callback'\] is a function"),
    "set": (lambda: {"user": [1, {2}]}, r"^user\[1\] is a set"),
    "key": (lambda: {"user": {(1, 2): 3}}, r"^user has the key \(1, 2\), which is a tuple"),
    "named tuple": (lambda: {"user": Point(1, 2)}, r"^user is a .*Point"),
    "object array": (lambda: {"user": np.array([None])}, r"^user is a numpy.ndarray of dtype object"),
    "records": (lambda: {"user": np.zeros(1, "i4,f4")}, r"^user is a numpy.ndarray of dtype \["),
    "masked": (lambda: {"user": np.ma.zeros(2)}, r"^user is a numpy.ma"),
    "sparse": (
        lambda: {"user": torch.eye(2).to_sparse()},
        r"^user is a tensor without plain values \(torch.spa",
    ),
    "meta": (lambda: {"user": torch.empty(2, device="meta")}, r"^user is a tensor without plain values \(meta"),
    "generator": (lambda: {"rng": torch.Generator()}, r"^rng is a torch.*Generator"),
    "module": (lambda: {"net": nn.Linear(1, 1)}, r"^net is a torch.nn.modules.linear.Linear"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_values_are_refused_by_their_path(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message) as refused:
        encode(make())
    assert isinstance(refused.value, ConfigError)
    assert "Checkpoints hold numbers, text" in str(refused.value)


def test_paths_begin_with_the_root() -> None:
    with pytest.raises(CheckpointError, match=r"^optimizer\['groups'\]\[0\] is a type"):
        encode({"groups": [int]}, "optimizer")
    with pytest.raises(CheckpointError, match=r"^the value is a type"):
        encode(int)


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(CheckpointError, match=r"a is a set\. b is an object\. Checkpoints"):
        encode({"a": set(), "b": object()})
    with pytest.raises(CheckpointError, match=r"\(and 4 more\)"):
        encode([set()] * 9)


def test_a_list_that_contains_itself() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CheckpointError, match="nested more than 100 deep, or contains itself"):
        encode(endless)


@pytest.mark.parametrize(
    "value",
    [
        {TAG: "tensor", "name": "missing"},
        {TAG: "tensor"},
        {TAG: "new in version 9"},
        {TAG: []},
        {TAG: "dtype", "name": "nn"},
        {TAG: "bytes", "base64": "?"},
        {TAG: "dict", "items": [[[1], 2]]},
        {TAG: "array", "name": "here", "shape": [9], "dtype": "f4"},
        {TAG: "array", "name": "here", "shape": [1], "dtype": "O"},
        {TAG: "tensor", "name": "here", "shape": [9], "dtype": "float32"},
    ],
    ids=str,
)
def test_what_was_never_encoded_is_a_checkpoint_error(value: Any) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        decode([value], {"here": torch.zeros(3, dtype=torch.uint8)})
