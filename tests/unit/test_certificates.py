"""Certificates that every process of a run makes from the secret."""

from datetime import UTC, datetime, timedelta

import pytest

from support import SECRET
from tutti.coordination import Secret
from tutti.coordination.certificates import _identity

x509 = pytest.importorskip("cryptography.x509")


def test_hosts_whose_clocks_differ_accept_each_other() -> None:
    authority, chain = _identity(SECRET)
    own = chain[chain.index(b"-----BEGIN CERTIFICATE") :]
    for each in map(x509.load_pem_x509_certificate, (authority.encode(), own)):
        for wrong_by in (timedelta(0), timedelta(days=1), -timedelta(days=1), timedelta(days=3650)):
            clock = datetime.now(UTC) + wrong_by
            assert each.not_valid_before_utc < clock < each.not_valid_after_utc


def test_the_authority_depends_on_the_secret_alone() -> None:
    first = _identity(SECRET)
    _identity.cache_clear()
    assert _identity(SECRET)[0] == first[0], "another process has the same one"
    assert _identity(SECRET)[1] != first[1], "and a key of its own"
    assert _identity(Secret("another secret of a run"))[0] != first[0]
