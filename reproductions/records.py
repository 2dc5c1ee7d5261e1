"""Conversion between frozen dataclasses and JSON, for the stored results of the reproductions.

`save` and `load` write and read a file; `to_json` and `from_json` convert values, for example those that worker
processes send. Reading validates: a missing or unknown field and a value of another type raise `RecordError`, with
the path of the value. Points of curves are named tuples: in the file they are short lists.
"""

import dataclasses
import json
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tutti.errors import ConfigError

Record = TypeVar("Record")


class RecordError(ConfigError):
    """A stored result that does not have the expected form."""


def save(record: Any, path: Path) -> None:
    """Write a dataclass as JSON: one field per line, and one line per element of a list of records."""
    fields = [f"{json.dumps(name)}: {_field_text(value)}" for name, value in to_json(record).items()]
    path.write_text("{\n" + ",\n".join(fields) + "\n}\n")


def load(kind: type[Record], path: Path) -> Record:
    """Read what `save` wrote, as a `kind`; raise `RecordError` if the file holds anything else."""
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise RecordError(f"{path} is not JSON: {error}") from error
    return from_json(kind, value, str(path))


def to_json(value: Any) -> Any:
    """Return a dataclass, or a container of them, as dictionaries, lists and plain values."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def from_json(kind: type[Record], value: Any, where: str = "value") -> Record:
    """Return a value of type `kind` from what `to_json` made of it; `where` names it in error messages."""
    result: Record = _read(kind, value, where)
    return result


def _field_text(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f" {json.dumps(item)}" for item in value) + "\n]"
    return json.dumps(value)


def _read(kind: Any, value: Any, where: str) -> Any:
    """Convert by the annotation `kind`: a dataclass, a named tuple, a plain type, or a container or union of them."""
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _read_union(arguments, value, where)
    if origin is Literal:
        return _expect(value in arguments, value, " or ".join(map(repr, arguments)), where)
    if origin is tuple:
        return _read_tuple(arguments, value, where)
    if origin is dict:
        _expect(isinstance(value, dict), value, "an object", where)
        key_kind, item_kind = arguments
        return {_read_key(key_kind, key, where): _read(item_kind, value[key], f"{where}.{key}") for key in value}
    return _read_plain_or_named_tuple(kind, value, where)


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), value, f"an object of {kind.__name__}", where)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    required = [name for name, field in fields.items() if _has_no_default(field)]
    if missing := [name for name in required if name not in value]:
        raise RecordError(f"{where}: {kind.__name__} lacks {', '.join(missing)}.")
    if unknown := [name for name in value if name not in fields]:
        raise RecordError(f"{where}: {kind.__name__} has no field {', '.join(unknown)}; known: {', '.join(fields)}.")
    hints = get_type_hints(kind)
    return kind(**{name: _read(hints[name], item, f"{where}.{name}") for name, item in value.items()})


def _has_no_default(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _read_union(kinds: Iterable[Any], value: Any, where: str) -> Any:
    """Read an optional value; unions of other types are not used."""
    (kind,) = (kind for kind in kinds if kind is not type(None))
    return None if value is None else _read(kind, value, where)


def _read_tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    _expect(isinstance(value, list), value, "a list", where)
    if kinds[-1] is Ellipsis:
        return tuple(_read(kinds[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    _expect(len(value) == len(kinds), value, f"a list of {len(kinds)}", where)
    pairs = zip(kinds, value, strict=True)
    return tuple(_read(kind, item, f"{where}[{index}]") for index, (kind, item) in enumerate(pairs))


def _read_key(kind: Any, key: str, where: str) -> Any:
    """JSON has only strings as keys."""
    if kind is not int:
        return key
    _expect(key.lstrip("-").isdigit(), key, "a whole number as key", where)
    return int(key)


def _read_plain_or_named_tuple(kind: Any, value: Any, where: str) -> Any:
    if issubclass(kind, tuple):
        return kind(*_read_tuple(tuple(get_type_hints(kind).values()), value, where))
    if kind is float:  # A float that is whole may have been written as an integer.
        _expect(isinstance(value, int | float) and not isinstance(value, bool), value, "a number", where)
        return float(value)
    if kind is int:  # A bool is an int to Python, and not to JSON.
        return _expect(isinstance(value, int) and not isinstance(value, bool), value, "a whole number", where)
    return _expect(isinstance(value, kind), value, f"a {kind.__name__}", where)


def _expect(valid: bool, value: Any, wanted: str, where: str) -> Any:
    if not valid:
        raise RecordError(f"{where}: expected {wanted}, got {value!r:.80}.")
    return value
