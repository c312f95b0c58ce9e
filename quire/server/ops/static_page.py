"""The page to look at: a few files out of the package, served as they are under a strict
Content-Security-Policy.

They hold no secret and nothing of this server, so they need no key; what they show they request
with the key that its user gives. The list of files is made when the server starts, so no path of a
request ever reaches the file system.
"""

from __future__ import annotations

import hashlib
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

INDEX_PATHS = ("/", "/dashboard")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src "
    "'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-cache",
}


def _read_files() -> dict[str, tuple[bytes, str]]:
    """(content, type) of each file, by path."""
    files = {}
    for entry in resources.files("quire.server.ops").joinpath("page").iterdir():
        suffix = f".{entry.name.rpartition('.')[2]}"
        if entry.is_file() and suffix in _TYPES:
            files[f"/page/{entry.name}"] = (entry.read_bytes(), _TYPES[suffix])
    index = files.pop("/page/index.html")
    return files | dict.fromkeys(INDEX_PATHS, index)


_FILES = _read_files()
PATHS = tuple(sorted(_FILES))
"""Everything that is served here."""


async def get(request: Request) -> Response:
    """One of the files; 304 where the browser has it."""
    content, content_type = _FILES[request.scope["route"].path]
    tag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
    headers = {**_HEADERS, "content-type": content_type, "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers)
