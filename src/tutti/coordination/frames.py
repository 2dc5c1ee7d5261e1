"""Messages between members and the coordinator: four bytes of length, then a JSON object.

Every message has a field `op`, and exactly the fields that `SCHEMA` names for it. A message that is too long, is not
JSON or does not fit the schema is a `ProtocolError`, and ends the connection it came by. Nothing is unpickled.
"""

import json
import struct
from typing import Any

Message = dict[str, Any]

MAX_BYTES = 1 << 20
"""The longest message. Values are addresses and the like; a roster of a thousand ranks has 200 KB."""

HEADER = struct.Struct("!I")

Fields = dict[str, type | tuple[type, ...]]

_LIMITS: Fields = {"minimum": int, "maximum": int, "expected": int}
"""How many members an elastic world may have, and how many its launcher has started."""

SCHEMA: dict[str, Fields] = {
    # From members.
    "hello": {"version": str, "member": dict, "known": list, "lost": dict},
    "join": {"scope": str, "rank": int, "size": int},
    "set": {"key": str, "value": str},
    "get": {"request": int, "keys": list},
    "cancel": {"request": int},
    "propose": {"key": str, "value": str},
    "notice": {"scope": str, "kind": str, "reason": str, "size": int, "members": list},
    "beat": {"status": dict},
    "sync": {"request": int},
    "seen": {"member": str, "state": str},
    "query": {"request": int},
    "ask_stack": {"rank": int},
    "stack": {"text": str},
    "bye": {},
    "enter": {"scope": str, **_LIMITS, "after": int, "ready": int, "info": dict},
    "belongs": {"scope": str, **_LIMITS, "number": int},
    "recalled": {"scope": str, "number": int, "members": list, "too_few": int},
    "depart": {"scope": str, **_LIMITS, "finished": int},
    "want": {"scope": str, **_LIMITS, "number": int},
    "boundary": {"scope": str, **_LIMITS, "number": int, "steps": int},
    "numbers": {"request": int, "count": int},
    "replaces": {"yes": int},
    "manage": {"request": int, "action": str, "number": int},
    # From the coordinator.
    "welcome": {"version": str, "lost": dict, "host_id": str},
    "refused": {"reason": str},
    "roster": {"scope": str, "members": list},
    "missing": {"scope": str, "ranks": list, "seconds": (int, float)},
    "conflict": {"scope": str, "reason": str},
    "values": {"request": int, "values": list},
    "noticed": {"scope": str, "member": str, "kind": str, "reason": str},
    "forget": {"scope": str},
    "lost": {"member": str, "reason": str},
    "synced": {"request": int},
    "look": {"member": str, "pid": int, "started": int},
    "send_stack": {},
    "table": {"request": int, "members": list},
    "stuck": {"reason": str},
    "generation": {"scope": str, "number": int, "members": list, "too_few": int},
    "recall": {"scope": str, "number": int},
    "running": {"scope": str, "size": int},
    "change": {"scope": str, "number": int},
    "switch": {"scope": str, "number": int, "steps": int},
    "released": {"scope": str, "number": int},
    "numbered": {"request": int, "first": int, "minimum": int, "maximum": int, "present": int},
    "managed": {"request": int, "done": int, "text": str},
}
"""The fields of each message and their types."""

_LONGEST_TEXT = 1 << 16


class ProtocolError(Exception):
    """Bytes that are not a message of this protocol."""


def encode(message: Message) -> bytes:
    """A message as bytes, its length first."""
    payload = json.dumps(message, separators=(",", ":")).encode()
    if len(payload) > MAX_BYTES:
        raise ProtocolError(f"a message of {len(payload)} bytes is longer than {MAX_BYTES}")
    return HEADER.pack(len(payload)) + payload


def length(header: bytes) -> int:
    """The number of bytes that follow a header."""
    (num_bytes,) = HEADER.unpack(header)
    if num_bytes > MAX_BYTES:
        raise ProtocolError(f"a message of {num_bytes} bytes is longer than {MAX_BYTES}")
    return int(num_bytes)


def decode(payload: bytes) -> Message:
    """The message in these bytes, checked against the schema."""
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON ({error})") from None
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise ProtocolError("not an object with a field 'op'")
    fields = SCHEMA.get(message["op"])
    if fields is None:
        raise ProtocolError(f"unknown message '{message['op'][:40]}'")
    if message.keys() - {"op"} != fields.keys():
        raise ProtocolError(f"'{message['op']}' needs the fields {', '.join(fields) or 'none'}")
    for name, kind in fields.items():
        value = message[name]
        # A bool is an int for Python, and no number of a rank.
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ProtocolError(f"'{message['op']}' has a wrong '{name}'")
        if isinstance(value, str) and len(value) > _LONGEST_TEXT:
            raise ProtocolError(f"'{message['op']}' has a '{name}' of {len(value)} characters")
    return message
