"""The secret that all members of a job share, and the keys that are derived from it.

A key is derived for each purpose (HKDF, RFC 5869, with SHA-256), so that what one protocol reveals is of no use in
another. The secret itself is never sent.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

from tutti.errors import ConfigError

_SALT = b"tutti job secret, version 1"

OPEN = "none"
"""The text that turns authentication off."""

_SHORTEST = 16


@dataclass(frozen=True)
class Secret:
    """What members of a job prove to each other that they know. Its text is not shown by `repr`."""

    text: str = field(repr=False)
    encrypt: bool = True
    """Whether connections between hosts are encrypted. They are authenticated either way."""

    def __post_init__(self) -> None:
        if not self.is_open and len(self.text) < _SHORTEST:
            raise ConfigError(
                f"a secret needs {_SHORTEST} characters or more, got {len(self.text)}. Make one with "
                "python -c 'import secrets; print(secrets.token_hex())'."
            )

    @classmethod
    def generate(cls, encrypt: bool = True) -> "Secret":
        """Make a new one, that nobody can guess."""
        return cls(secrets.token_hex(32), encrypt)

    @property
    def is_open(self) -> bool:
        """Whether authentication is turned off: every process that reaches a port is let in."""
        return self.text == OPEN

    def key(self, purpose: str) -> bytes:
        """32 bytes for one purpose. Members with the same secret get the same bytes."""
        extracted = hmac.digest(_SALT, self.text.encode(), hashlib.sha256)
        return hmac.digest(extracted, purpose.encode() + b"\x01", hashlib.sha256)
