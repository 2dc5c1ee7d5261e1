"""Values that members set and others wait for, as the coordinator keeps them."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from tutti.coordination.frames import ProtocolError
from tutti.coordination.knowledge import is_inside

_MOST_VALUES = 20_000
"""Values of one member, and proposals."""
_MOST_TEXT = 16 << 20
"""Characters of all values of one member with their keys, and of proposals."""
_MOST_REQUESTS = 1_000
"""Requests of one member that wait at the same time: a thread has one."""


@dataclass(frozen=True)
class _Request:
    """A member that waits for values."""

    member: str
    number: int
    keys: tuple[str, ...]


@dataclass(eq=False)
class _Owned:
    """Values that one member has set, or has proposed."""

    sizes: dict[str, int] = field(default_factory=dict)
    """Characters of each value and its key, by key."""
    num_characters: int = 0

    def add(self, key: str, value: str, verb: str) -> None:
        """Count a value. Raises `ProtocolError` for more than a member needs."""
        self.num_characters += len(key) + len(value) - self.sizes.get(key, 0)
        self.sizes[key] = len(key) + len(value)
        if len(self.sizes) > _MOST_VALUES:
            raise ProtocolError(f"a member has {verb} more than {_MOST_VALUES} values")
        if self.num_characters > _MOST_TEXT:
            raise ProtocolError(f"a member has {verb} values of more than {_MOST_TEXT} characters")

    def drop_scope(self, scope: str) -> None:
        """Count the values of a scope no more."""
        for key in [key for key in self.sizes if is_inside(key, scope)]:
            self.num_characters -= self.sizes.pop(key)


class ValueTable:
    """Texts by key, each of a member or of a scope, and the requests that wait for some of them."""

    def __init__(self, answer: Callable[[str, int, list[str]], None]) -> None:
        """Call `answer` with a member, the number of its request, and the values, when all of them are there."""
        self._answer = answer
        self._values: dict[str, str] = {}
        self._set: dict[str, _Owned] = defaultdict(_Owned)
        """What each member has set."""
        self._proposed: dict[str, _Owned] = defaultdict(_Owned)
        """What each member has proposed, while it is a member."""
        self._num_requests: Counter[str] = Counter()
        """Requests of each member that wait."""
        self._waiting: dict[str, list[_Request]] = defaultdict(list)
        """Requests by a key that they lack."""

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def set(self, member: str, key: str, value: str) -> None:
        """Set a value of a member's, which dies with it."""
        self._set[member].add(key, value, "set")
        self._store(key, value)

    def propose(self, member: str, key: str, value: str) -> None:
        """Set a value unless there is one. Its scope owns it: the decision outlives who proposed it."""
        if key not in self._values:
            self._proposed[member].add(key, value, "proposed")
            self._store(key, value)

    def _store(self, key: str, value: str) -> None:
        self._values[key] = value
        for request in self._waiting.pop(key, []):
            self._num_requests[request.member] -= 1
            self._try(request)

    def request(self, member: str, number: int, keys: list[str]) -> None:
        """Answer when all values are there."""
        if not all(isinstance(key, str) for key in keys):
            raise ProtocolError("keys of values are texts")
        if self._num_requests[member] >= _MOST_REQUESTS:
            raise ProtocolError(f"a member waits for {_MOST_REQUESTS} answers already")
        self._try(_Request(member, number, tuple(keys)))

    def _try(self, request: _Request) -> None:
        """Answer if all values are there; otherwise wait for the first that is missing."""
        missing = next((key for key in request.keys if key not in self._values), None)
        if missing is None:
            self._answer(request.member, request.number, [self._values[key] for key in request.keys])
        else:
            self._waiting[missing].append(request)
            self._num_requests[request.member] += 1

    def cancel(self, member: str, number: int | None = None) -> None:
        """Drop a request of a member, or all of them."""
        for key, requests in list(self._waiting.items()):
            kept = [each for each in requests if each.member != member or number not in (None, each.number)]
            self._num_requests[member] -= len(requests) - len(kept)
            if kept:
                self._waiting[key] = kept
            else:
                del self._waiting[key]

    def drop_member(self, member: str) -> None:
        """Forget the values and requests of a member that is gone."""
        for key in self._set.pop(member, _Owned()).sizes:
            self._values.pop(key, None)
        self.cancel(member)
        self._proposed.pop(member, None)
        self._num_requests.pop(member, None)

    def drop_scope(self, scope: str) -> None:
        """Forget all values of a scope."""
        for key in [key for key in self._values if is_inside(key, scope)]:
            del self._values[key]
        for owned in (*self._set.values(), *self._proposed.values()):
            owned.drop_scope(scope)
