"""Which pages of other origins may use this server from a browser: the headers of CORS, for every
answer and error.

Off unless the operator names origins. A preflight, which browsers send without a key, is answered
for every path alike, so that it tells nothing of them. Credentials (cookies, a proxy's log-in) are
only ever allowed to origins that are named one by one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from quire.server.http.errors import ApiError

Headers = list[tuple[bytes, bytes]]

_METHODS = b"GET, HEAD, POST, DELETE"
_MAX_AGE_S = b"600"
"""How long a browser may rely on a preflight's answer."""
_EXPOSED = b", ".join(
    [
        b"x-request-id",
        b"request-id",
        b"openai-processing-ms",
        b"retry-after",
        b"x-should-retry",
        b"x-quire-ignored-fields",
        *(
            b"x-ratelimit-%b-%b" % (what, of)
            for what in (b"limit", b"remaining", b"reset")
            for of in (b"requests", b"tokens")
        ),
    ]
)
"""What scripts may read of an answer besides its body. Each by name:
`*` does not cover requests with credentials."""
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*\Z")


class Cors:
    """The rule for one server. `origins`: as browsers send them, or `*`."""

    def __init__(self, origins: Collection[str]) -> None:
        self._is_for_all = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def headers(self, fields: Mapping[bytes, bytes]) -> Headers:
        """Return the headers of any answer to a request with these headers."""
        if not self._origins:
            return []
        if self._is_for_all:
            return [
                (b"access-control-allow-origin", b"*"),
                (b"access-control-expose-headers", _EXPOSED),
            ]
        # also where it is not allowed: a cache must not give one origin's answer to another
        varies = [(b"vary", b"origin")]
        origin = fields.get(b"origin")
        if origin not in self._origins:
            return varies
        return [
            *varies,
            (b"access-control-allow-origin", origin),
            (b"access-control-allow-credentials", b"true"),
            (b"access-control-expose-headers", _EXPOSED),
        ]

    def preflight(self, method: str, fields: Mapping[bytes, bytes]) -> Headers | None:
        """Return what the answer to a preflight has besides `headers`; None where this is none, or
        where CORS is off.

        Raises ApiError 403 for an origin that is not allowed.
        """
        is_preflight = (
            method == "OPTIONS"
            and b"origin" in fields
            and b"access-control-request-method" in fields
        )
        if not self._origins or not is_preflight:
            return None
        if not self._is_for_all and fields[b"origin"] not in self._origins:
            message = (
                "pages of this origin may not use this server; its operator can allow them with "
                "--allow-origin"
            )
            raise ApiError(403, message, code="origin_not_allowed")
        wanted = fields.get(b"access-control-request-headers", b"")
        return [
            (b"vary", b"access-control-request-headers"),
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", _MAX_AGE_S),
            *([(b"access-control-allow-headers", wanted)] if _NAMES.match(wanted) else []),
        ]
