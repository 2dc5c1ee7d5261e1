"""`Outbox`: what a member sends to its coordinator, and sends again to every new one.

How it works
------------
Sending never waits: `post` hands a message to the connection, or drops it while there is none. That loses nothing,
because `attach` sends everything again that a coordinator has to know: what was given to `send` and not withdrawn.

Locks: `_sending` keeps messages in order and is held while one is handed over, also by `attach`, so that a message is
sent again before any later one. `_lock` guards what is kept and is never held while anything is handed over: the
other side may be delivering to this member at that moment.
"""

import threading
from collections.abc import Callable

from tutti.coordination.frames import Message
from tutti.coordination.knowledge import is_inside

Key = tuple[str, ...]
"""What a kept message is about: its kind, and a scope, a key of a value or the number of a request."""


class Outbox:
    """Messages of one member."""

    def __init__(self) -> None:
        """Start without a connection."""
        self._post: Callable[[Message], None] = _drop
        self._sending = threading.RLock()
        self._lock = threading.Lock()
        self._kept: dict[Key, Message] = {}

    def __contains__(self, key: Key) -> bool:
        with self._lock:
            return key in self._kept

    def post(self, message: Message) -> None:
        """Send a message once, if there is a connection."""
        self._post(message)

    def send(self, key: Key, message: Message) -> None:
        """Send a message, and send it again to every new coordinator, until another one has its key."""
        with self._sending:
            with self._lock:
                self._kept[key] = message
            self._post(message)

    def withdraw(self, *keys: Key) -> None:
        """Do not send messages again."""
        with self._lock:
            for key in keys:
                self._kept.pop(key, None)

    def forget(self, scope: str) -> None:
        """Do not send again what is about a scope that is over."""
        with self._lock:
            # Requests have numbers where the others have a scope or a key.
            kept = {key for key in self._kept if key[0] == "request" or not is_inside(key[1], scope)}
            self._kept = {key: message for key, message in self._kept.items() if key in kept}

    def attach(self, post: Callable[[Message], None]) -> None:
        """Send by `post` from now on, everything that is kept first."""
        with self._sending:
            self._post = post
            with self._lock:
                messages = list(self._kept.values())
            for message in messages:
                post(message)

    def detach(self) -> None:
        """There is no connection."""
        with self._sending:
            self._post = _drop


def _drop(message: Message) -> None:
    """Send a message nowhere."""
