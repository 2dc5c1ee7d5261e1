"""Notices: what members have announced about the end of their part in a scope, as the coordinator keeps them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tutti.coordination.frames import ProtocolError
from tutti.coordination.knowledge import is_inside

TERMINAL = frozenset({"left", "closed", "aborted"})
"""Kinds of notices after which a member takes no more part in the scope."""

KINDS = TERMINAL | {"fled"}

_MOST_NOTICES = 20_000
"""Notices of one member that are kept."""
_MOST_PARTICIPANTS = 1 << 16
_LONGEST_REASON = 1000
_MOST_TEXT, _PER_TEXT = 64 << 20, 64
"""Characters of all notices of one member that are kept, with so many more for each text."""


@dataclass(eq=False)
class _Part:
    """The notices of one scope."""

    size: int = 0
    participants: frozenset[str] = frozenset()
    """Ids of the members of a channel that not all members of its world are in; empty where all are."""
    reasons: dict[str, dict[str, str]] = field(default_factory=dict)
    """Reasons by member and kind."""
    lengths: dict[tuple[str, str], int] = field(default_factory=dict)
    """Characters of notices by member and kind."""


class NoticeTable:
    """Notices by scope. Each belongs to the member that announced it, and dies with its scope."""

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}
        self._counts: Counter[str] = Counter()
        """Number of notices of each member."""
        self._lengths: Counter[str] = Counter()
        """Characters of the notices of each member."""

    def __len__(self) -> int:
        return sum(self._counts.values())

    def add(self, member: str, scope: str, kind: str, reason: str, members: tuple[int, list[str]]) -> None:
        """Keep what a member announced. Raises `ProtocolError` for what no member announces.

        Args:
            members: how many members the scope has, and who they are, unless all members of its world are in it.
        """
        size, listed = members
        names = all(isinstance(each, str) for each in listed) and len(listed) <= _MOST_PARTICIPANTS
        if kind not in KINDS or not names or (listed and len(set(listed)) != size):
            raise ProtocolError("a notice that no member sends")
        if self._counts[member] >= _MOST_NOTICES:
            raise ProtocolError(f"a member has announced more than {_MOST_NOTICES} ends")
        reason = reason[:_LONGEST_REASON]
        part = self._parts.get(scope) or _Part()
        before = part.lengths.get((member, kind), 0)  # It is sent again when its member has connected again.
        length = sum(len(each) + _PER_TEXT for each in (scope, reason, *listed))
        if self._lengths[member] + length - before > _MOST_TEXT:
            raise ProtocolError(f"a member has announced more than {_MOST_TEXT} characters")
        self._parts[scope] = part
        part.size, part.participants = size, frozenset(listed)
        part.reasons.setdefault(member, {})[kind] = reason
        part.lengths[member, kind] = length
        self._counts[member] += not before
        self._lengths[member] += length - before

    def __iter__(self) -> Iterator[tuple[str, str, str, str]]:
        """All of them: scope, member, kind and reason."""
        for scope, part in self._parts.items():
            for member, kinds in part.reasons.items():
                for kind, reason in kinds.items():
                    yield scope, member, kind, reason

    def scopes(self) -> list[str]:
        """Scopes about which something was announced."""
        return list(self._parts)

    def size(self, scope: str) -> int | None:
        """How many members a scope has, as was announced; None if nothing was."""
        return self._parts[scope].size if scope in self._parts else None

    def participants(self, scope: str) -> frozenset[str]:
        """The members of a channel that not all members of its world are in; empty where all are."""
        return self._parts[scope].participants if scope in self._parts else frozenset()

    def finished(self, scope: str) -> set[str]:
        """Members that take no more part in a scope."""
        reasons = self._parts[scope].reasons if scope in self._parts else {}
        return {member for member, kinds in reasons.items() if TERMINAL & kinds.keys()}

    def drop_scope(self, scope: str) -> None:
        """Forget all that was announced about a scope, and about channels in it."""
        for name in [name for name in self._parts if is_inside(name, scope)]:
            part = self._parts.pop(name)
            for member in part.reasons:
                self._count_off(member, part)

    def drop_member(self, member: str) -> None:
        """Forget what a member has announced."""
        for scope, part in list(self._parts.items()):
            self._count_off(member, part)
            part.reasons.pop(member, None)
            if not part.reasons:
                del self._parts[scope]

    def _count_off(self, member: str, part: _Part) -> None:
        """Count the notices of a member in a scope no more."""
        kinds = part.reasons.get(member, {})
        self._counts[member] -= len(kinds)
        self._lengths[member] -= sum(part.lengths.pop((member, kind)) for kind in kinds)
        if not self._counts[member]:
            del self._counts[member], self._lengths[member]
