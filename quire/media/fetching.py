"""Images by URL: `data:` anywhere, `http:` and `https:` from hosts that the operator allows,
`file:` under a folder that the operator names.

A URL is chosen by the sender of a request, so nothing of it is believed: hosts are compared before
they are looked up, connections go to addresses that were looked up and judged here, redirects begin
anew, and every transfer is bounded in bytes and time. Private addresses are reached only where the
list names the address itself, or `localhost`. Blocks: for threads.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import ipaddress
import os
import re
import socket
import ssl
import stat
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import NoReturn
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urljoin, urlsplit

from quire.common.lookup import look_up
from quire.errors import InvalidParameterError
from quire.media.sources import MediaAccess

MAX_BYTES = 32 << 20
"""Of a file."""
FETCH_S = 10.0
"""Of a transfer, redirects included."""
MAX_REDIRECTS = 3
MAX_URL_CHARS = 8192
"""Of one that is no data URL."""
_PIECE = 64 << 10
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}
_SHOWN = 80
_BROKEN_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")


def fetch(url: str, access: MediaAccess, param: str = "image_url") -> bytes:
    """Return the bytes that a URL names. Raises InvalidParameterError naming `param`."""
    fetcher = _Fetcher(access, param)
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        return fetcher.data(url)
    if len(url) > MAX_URL_CHARS:
        fetcher.refuse(f"it has {len(url)} characters; at most {MAX_URL_CHARS} are read")
    if scheme == "file":
        return fetcher.file(url)
    if scheme in _PORTS:
        return fetcher.web(url)
    return fetcher.refuse(
        f"{url[:_SHOWN]!r} is no URL of a known kind; give data:, http:, https: or file:"
    )


class _Fetcher:
    def __init__(self, access: MediaAccess, param: str) -> None:
        self._access, self._param = access, param
        self._deadline_s = time.monotonic() + FETCH_S

    def refuse(self, why: str) -> NoReturn:
        raise InvalidParameterError(f"{self._param}: {why}", param=self._param)

    def data(self, url: str) -> bytes:
        """Decode a data URL (RFC 2397)."""
        header, comma, payload = url[5:].partition(",")
        if not comma:
            self.refuse("a data URL needs a comma before its data")
        if len(payload) > MAX_BYTES * 2:
            self._refuse_size(len(payload))
        if _BROKEN_ESCAPE.search(payload) is not None:  # millions take the decoder seconds
            self.refuse("the data URL has a % that two hexadecimal digits do not follow")
        try:
            is_base64 = header.rstrip().lower().endswith(";base64")
            found = (
                base64.b64decode("".join(unquote(payload).split()), validate=True)
                if is_base64
                else unquote_to_bytes(payload)
            )
        except (binascii.Error, ValueError):
            self.refuse("the data URL is not valid base64")
        if len(found) > MAX_BYTES:
            self._refuse_size(len(found))
        return found

    def file(self, url: str) -> bytes:
        """Read a file under the folder, links resolved."""
        folder = self._access.folder
        if folder is None:
            self.refuse(
                "file: URLs are not allowed here; the operator can name a folder "
                "(--allowed-local-media-path)"
            )
        parts = self._split(url)
        if parts.netloc not in ("", "localhost") or "\0" in unquote(parts.path):
            self.refuse("a file: URL must name a file of this machine: file:///folder/name.png")
        try:
            path = Path(unquote(parts.path)).resolve(strict=True)
            is_inside = path.is_relative_to(folder.resolve(strict=True))
        except (OSError, RuntimeError):
            is_inside = False
        if not is_inside:
            self.refuse("the file: URL names no file under the allowed folder")
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    self.refuse("the file: URL names no regular file")
                found = file.read(MAX_BYTES + 1)
        except OSError as error:
            self.refuse(f"the file cannot be read: {error.strerror}")
        if len(found) > MAX_BYTES:
            self._refuse_size(status.st_size)
        return found

    def web(self, url: str) -> bytes:
        """Fetch by HTTP; each redirect is judged as the first URL was."""
        for _ in range(MAX_REDIRECTS + 1):
            try:
                found = self._get(self._split(url))
            except (OSError, ValueError, http.client.HTTPException) as error:
                self._left()
                self.refuse(f"the image cannot be fetched: {type(error).__name__}")
            if isinstance(found, bytes):
                return found
            url = self._joined(url, found)
        return self.refuse(f"more than {MAX_REDIRECTS} redirects")

    def _split(self, url: str) -> SplitResult:
        try:
            return urlsplit(url)
        except ValueError:
            return self.refuse(f"{url[:_SHOWN]!r} is no valid URL")

    def _joined(self, url: str, location: str) -> str:
        try:
            return urljoin(url, location)
        except ValueError:
            return self.refuse(f"a redirect to {location[:_SHOWN]!r}, which is no valid URL")

    def _get(self, parts: SplitResult) -> bytes | str:
        """Return the body, or where it is said to be."""
        host, port = self._allowed(parts)
        address = self._address(host, port)
        connection = _Connection(host, port, address, self._left(), is_tls=parts.scheme == "https")
        watch = threading.Timer(self._left(), connection.cut)
        watch.daemon = True
        watch.start()
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", target, headers={"Accept": "image/*", "User-Agent": "quire"})
            with closing(connection.getresponse()) as response:
                if response.status in _REDIRECTS:
                    return response.getheader("Location") or self.refuse("a redirect to nowhere")
                if response.status != 200:
                    self.refuse(f"the image's server answered {response.status}")
                return self._body(response)
        finally:
            watch.cancel()
            connection.close()

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        if response.length is not None and response.length > MAX_BYTES:
            self._refuse_size(response.length)
        found = bytearray()
        while True:
            piece = response.read1(_PIECE)
            self._left()  # where the connection was cut, this is no end
            if not piece and response.length:
                self.refuse(f"the transfer ended {response.length:,} bytes before its end")
            if not piece:
                return bytes(found)
            found += piece
            if len(found) > MAX_BYTES:
                self._refuse_size(len(found))

    def _allowed(self, parts: SplitResult) -> tuple[str, int]:
        """Return host and port, if the list has them."""
        host = (parts.hostname or "").rstrip(".").lower()
        usual = _PORTS.get(parts.scheme)
        if usual is None or not host or "@" in parts.netloc or not host.isascii():
            self.refuse("the URL must be http or https with a plain host, without a password")
        port = parts.port or usual
        shown = f"[{host}]" if ":" in host else host
        names = {f"{shown}:{port}"} | ({host, shown} if port == usual else set())
        if not any(each.lower() in names for each in self._access.domains):
            self.refuse(
                f"images are not fetched from {host[:_SHOWN]!r}; the operator can allow it "
                "(--allowed-media-domains), or send the image as a data: URL"
            )
        return host, port

    def _address(self, host: str, port: int) -> str:
        """Return an address of a host that was allowed, if all of them are public."""
        is_named = host == "localhost" or _is_address(host)
        addresses = look_up(host, port, self._left())
        if not addresses or not (is_named or all(map(is_public, addresses))):
            self.refuse(f"{host[:_SHOWN]!r} has an address that is not public")
        return addresses[0]

    def _left(self) -> float:
        """Seconds that are left."""
        left = self._deadline_s - time.monotonic()
        if left <= 0:
            self.refuse(f"the image was not fetched within {FETCH_S:g} s")
        return left

    def _refuse_size(self, size: int) -> NoReturn:
        self.refuse(f"the file has {size:,} bytes or more; at most {MAX_BYTES:,} are read")


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet, not of a machine or network nearby."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo and found.teredo[1])
        if inner is not None:
            return is_public(str(inner))
        if found in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
    return found.is_global and not found.is_multicast


_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class _Connection(http.client.HTTPConnection):
    """A connection to an address that was judged, under the name of its host."""

    def __init__(
        self, host: str, port: int, address: str, timeout_s: float, *, is_tls: bool
    ) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._address, self._is_tls = address, is_tls
        self._seconds = timeout_s
        self._open: socket.socket | None = None
        """What `sock` was: a response that ends its connection takes it over."""

    def connect(self) -> None:
        """Connect, and encrypt where the URL says so."""
        self._open = self.sock = socket.create_connection((self._address, self.port), self._seconds)
        if self._is_tls:
            context = ssl.create_default_context()
            self._open = self.sock = context.wrap_socket(
                self.sock, server_hostname=self.host, do_handshake_on_connect=False
            )
            self.sock.do_handshake()

    def cut(self) -> None:
        """End every wait for the other side, which may send a byte now and then for hours: a
        timeout of the socket begins anew with each. For any thread."""
        if self._open is not None:
            with suppress(OSError):
                socket.socket.shutdown(self._open, socket.SHUT_RDWR)
