"""Reasoning as clients carry it from one answer to the next: `reasoning.encrypted_content` of
/v1/responses.

A client that keeps its conversation itself sends an answer's reasoning items back, often with
nothing in them but this text. It is signed for the tenant that got it, so that what comes back is
known to be what the model wrote. It is not encrypted: the same reasoning is readable beside it in
the item's `content`, and hiding them here would protect nothing. The key is made when the server
starts and leaves it in no form; what an earlier process signed cannot be verified any more.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from hmac import compare_digest

_PREFIX = "quire1."
_MAC_BYTES = 32


class Sealer:
    """One server's key."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def seal(self, tenant: str, text: str) -> str:
        """Return a text that `unseal` takes back, from the same tenant."""
        data = text.encode()
        return _PREFIX + base64.urlsafe_b64encode(self._mac(tenant, data) + data).decode()

    def unseal(self, tenant: str, sealed: str) -> str | None:
        """Return the text, or None where this server has not sealed it for this tenant."""
        if not sealed.startswith(_PREFIX):
            return None
        try:
            data = base64.b64decode(
                sealed[len(_PREFIX) :].encode("ascii"), altchars=b"-_", validate=True
            )
        except (binascii.Error, UnicodeEncodeError):
            return None
        mac, text = data[:_MAC_BYTES], data[_MAC_BYTES:]
        return text.decode() if compare_digest(mac, self._mac(tenant, text)) else None

    def _mac(self, tenant: str, data: bytes) -> bytes:
        # of one length, so that names cannot shift
        name = hashlib.blake2b(tenant.encode(), digest_size=32).digest()
        return hashlib.blake2b(name + data, key=self._key, digest_size=_MAC_BYTES).digest()
