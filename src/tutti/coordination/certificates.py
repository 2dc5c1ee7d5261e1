"""Mutual TLS from one secret: every member derives the same certificate authority, and issues itself a certificate.

The authority's Ed25519 key comes from the secret, and its serial number and dates are fixed: so all members have the
same authority without sending anything. Dates from 2020 to 2120 make the clocks of hosts irrelevant. Who does not know
the secret cannot make a certificate that either end accepts, and is refused inside the handshake.
"""

import os
import ssl
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from tutti.coordination.secret import Secret
from tutti.errors import ConfigError

_FIRST_DAY, _LAST_DAY = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)
_AUTHORITY, _MEMBER = "tutti job", "tutti member"


@lru_cache(maxsize=8)
def context(secret: Secret, *, server: bool) -> ssl.SSLContext:
    """A TLS 1.3 context that accepts only members with the same secret, for either end of a connection."""
    authority, chain = _identity(secret)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # Members have no names: to know the secret is what counts.
    made.verify_mode = ssl.CERT_REQUIRED
    if server:
        # A member that only sends never reads such a ticket. The kernel would then reset the connection when the
        # member closes it, and drop what is still on its way.
        made.num_tickets = 0
    made.load_verify_locations(cadata=authority)
    # `load_cert_chain` takes a file. One in memory leaves no key on a disk.
    file = os.memfd_create("tutti-certificate")
    try:
        os.write(file, chain)
        made.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return made


@lru_cache(maxsize=4)
def _identity(secret: Secret) -> tuple[str, bytes]:
    """The authority's certificate, and this process's key and certificate, as PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    except ImportError:
        raise ConfigError(
            "connections between hosts are encrypted, which needs the package cryptography: pip install cryptography. "
            "TUTTI_ENCRYPT=0 on every host turns encryption off, on a network where nobody else listens."
        ) from None
    root = Ed25519PrivateKey.from_private_bytes(secret.key("certificate authority"))
    own = Ed25519PrivateKey.generate()

    def certificate(subject: str, key: Any, serial: int, is_authority: bool) -> Any:
        names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in (subject, _AUTHORITY)]
        builder = x509.CertificateBuilder(names[1], names[0], key, serial, _FIRST_DAY, _LAST_DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        # Names of keys, by which OpenSSL builds the chain.
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key())
        if is_authority:
            builder = builder.add_extension(_authority_usage(x509), critical=True)
        return builder.add_extension(issuer, critical=False).sign(root, None)

    authority = certificate(_AUTHORITY, root.public_key(), 1, is_authority=True)
    leaf = certificate(_MEMBER, own.public_key(), x509.random_serial_number(), is_authority=False)
    key = own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return authority.public_bytes(Encoding.PEM).decode(), key + leaf.public_bytes(Encoding.PEM)


def _authority_usage(x509: Any) -> Any:
    """What the authority's key is for: signing certificates."""
    unused = dict.fromkeys(
        (
            "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
            "encipher_only", "decipher_only",
        ),
        False,
    )  # fmt: skip
    return x509.KeyUsage(key_cert_sign=True, crl_sign=False, **unused)
