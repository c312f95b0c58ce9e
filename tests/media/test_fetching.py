"""URLs of images: what is read, and what never is."""

from __future__ import annotations

import base64
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire.common import lookup
from quire.errors import InvalidParameterError
from quire.media import fetching
from quire.media.fetching import fetch, is_public
from quire.media.sources import MediaAccess

Site = Callable[[str, dict[str, Any]], str]


@pytest.fixture
def site() -> Iterator[tuple[str, dict[str, Any]]]:
    """A web server on this machine; the pages are (status, headers, body)."""
    pages: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = pages.get(self.path, (404, {}, b""))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for piece in body if isinstance(body, list) else [body]:
                    self.wfile.write(piece)
                    time.sleep(0.05 if isinstance(body, list) else 0)
            except OSError:
                pass

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"127.0.0.1:{server.server_port}", pages
    server.shutdown()
    server.server_close()
    thread.join(10)


def _refused(url: str, access: MediaAccess | None = None, says: str = "") -> None:
    with pytest.raises(InvalidParameterError, match=says) as caught:
        fetch(url, access or MediaAccess(), "here")
    assert caught.value.param == "here"


def test_data_urls() -> None:
    data = bytes(range(256))
    encoded = base64.b64encode(data).decode()
    assert fetch(f"data:image/png;base64,{encoded}", MediaAccess()) == data
    assert fetch(f"data:;base64,{encoded[:40]} \n{encoded[40:]}", MediaAccess()) == data
    assert fetch("data:,a%20b", MediaAccess()) == b"a b"
    _refused("data:image/png;base64", says="comma")
    _refused("data:;base64,!!!!", says="base64")
    _refused("data:;base64,QQ", says="base64")


def test_data_urls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MAX_BYTES", 1000)
    _refused("data:," + "a" * 1001, says="at most 1,000")
    _refused("data:;base64," + "A" * 1400, says="at most 1,000")


@pytest.mark.parametrize("broken", ["%", "a%2", "%%41", "%4g", "QUFB%"])
def test_escapes_of_data_urls_are_whole(broken: str) -> None:
    """A body of `%` alone took seconds to decode."""
    for head in ("data:,", "data:;base64,"):
        _refused(head + broken, says="two hexadecimal digits")
    assert fetch("data:;base64,%51UFB%0a", MediaAccess()) == base64.b64decode("QUFB")


@pytest.mark.parametrize("url", ["", "x", "ftp://a/b", "gopher://a", "/etc/passwd", "javascript:1"])
def test_other_urls_are_refused(url: str) -> None:
    _refused(url, MediaAccess(("a",)), "no URL of a known kind")


def test_files_lie_under_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    (folder / "a b.png").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "sub").mkdir()
    os.mkfifo(folder / "pipe")
    access = MediaAccess(folder=folder)
    assert fetch(f"file://{folder}/a%20b.png", access) == b"inside"
    assert fetch(f"file://localhost{folder}/sub/../a%20b.png", access) == b"inside"
    for path in ("/../secret", "/link", "/none", "/%2e%2e/secret"):
        _refused(f"file://{folder}{path}", access, "no file under")
    _refused(f"file://{folder}/pipe", access, "no regular file|cannot be read")
    _refused(f"file://{folder}/sub", access, "no regular file|cannot be read")
    _refused(f"file://elsewhere{folder}/a%20b.png", access, "of this machine")
    _refused("file:///etc/passwd", MediaAccess(), "not allowed")
    _refused("file://[x", access, "no valid URL")


def test_web_images_come_from_allowed_hosts_alone(site: tuple[str, dict[str, Any]]) -> None:
    host, pages = site
    pages["/a?b=1"] = (200, {}, b"image")
    access = MediaAccess((host,))
    assert fetch(f"http://{host}/a?b=1", access) == b"image"
    _refused(f"http://{host}/none", access, "answered 404")
    _refused(f"http://{host}/a?b=1", MediaAccess(), "not fetched from")
    port = host.partition(":")[2]
    _refused(f"http://{host}/a?b=1", MediaAccess(("127.0.0.1",)), "not fetched from")
    _refused(f"http://user@{host}/a?b=1", access, "without a password")
    _refused(f"http://127.0.0.1:{int(port) - 1}/", access, "not fetched from")
    _refused("http://example.com\\@127.0.0.1/", MediaAccess(("example.com",)), "plain host")


def test_redirects_are_judged_like_the_first_url(site: tuple[str, dict[str, Any]]) -> None:
    host, pages = site
    access = MediaAccess((host,))
    pages["/end"] = (200, {}, b"image")
    pages["/1"] = (302, {"Location": "/end"}, b"")
    pages["/loop"] = (301, {"Location": "/loop"}, b"")
    pages["/out"] = (302, {"Location": "http://169.254.169.254/latest"}, b"")
    pages["/file"] = (302, {"Location": "file:///etc/passwd"}, b"")
    pages["/nowhere"] = (302, {}, b"")
    pages["/broken"] = (302, {"Location": "http://[x"}, b"")
    assert fetch(f"http://{host}/1", access) == b"image"
    _refused(f"http://{host}/loop", access, "redirects")
    _refused(f"http://{host}/out", access, "not fetched from")
    _refused(f"http://{host}/file", access, "http or https")
    _refused(f"http://{host}/nowhere", access, "nowhere")
    _refused(f"http://{host}/broken", access, "no valid URL")
    _refused("http://[x", access, "no valid URL")


@pytest.mark.parametrize(
    "before",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nX: ",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;",
        b"HTTP/1.0 200 OK\r\n\r\n",
    ],
    ids=["status", "header", "chunk", "body without a length"],
)
def test_a_byte_now_and_then_prolongs_nothing(
    before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "FETCH_S", 0.4)
    is_over = threading.Event()

    def drip(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            try:
                connection.sendall(before)
                while not is_over.wait(0.05):
                    connection.sendall(b"H")
            except OSError:
                pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=(server,), daemon=True)
        thread.start()
        stop = threading.Timer(10.0, is_over.set)
        stop.start()
        host = f"127.0.0.1:{server.getsockname()[1]}"
        started = time.monotonic()
        _refused(f"http://{host}/x", MediaAccess((host,)), "not fetched within")
        assert time.monotonic() - started < 5.0
        is_over.set()
        stop.cancel()
        thread.join(10)


def test_names_with_private_addresses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    connections: list[object] = []
    monkeypatch.setattr(socket, "create_connection", lambda *args: connections.append(args))
    for address in ("127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "::ffff:10.0.0.1"):
        answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, a=answer, **__: a)
        _refused("http://images.example/x", MediaAccess(("images.example",)), "not public")
    both = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 80)) for each in ("8.8.8.8", "10.0.0.1")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    _refused("http://images.example/x", MediaAccess(("images.example",)), "not public")
    assert connections == []


def test_a_name_that_nobody_answers_for_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do names that are asked for again and again take a thread each."""
    may_answer, asked = threading.Event(), []

    def hang(*_: Any, **__: Any) -> list[Any]:
        asked.append(threading.current_thread())
        may_answer.wait(30)
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(lookup, "_FREE", threading.BoundedSemaphore(2))
    monkeypatch.setattr(fetching, "FETCH_S", 0.1)
    started = time.monotonic()
    for _ in range(4):
        _refused("http://slow.example/x", MediaAccess(("slow.example",)), "not fetched within")
    assert time.monotonic() - started < 5.0 and len(asked) == 2
    may_answer.set()
    for thread in asked:
        thread.join(10)
    monkeypatch.setattr(fetching, "FETCH_S", 10.0)
    _refused("http://slow.example/x", MediaAccess(("slow.example",)), "cannot be fetched: OSError")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("127.0.0.1", False), ("0.0.0.0", False),
        ("10.0.0.1", False), ("172.16.0.1", False), ("192.168.1.1", False), ("100.64.0.1", False),
        ("169.254.169.254", False), ("224.0.0.1", False), ("255.255.255.255", False),
        ("::1", False), ("::", False), ("fe80::1%eth0", False), ("fc00::1", False),
        ("::ffff:127.0.0.1", False), ("::ffff:8.8.8.8", True), ("2002:7f00:1::", False),
        ("64:ff9b::7f00:1", False), ("64:ff9b::808:808", True), ("ff02::1", False),
    ],
)  # fmt: skip
def test_addresses_of_the_public_internet(address: str, expected: bool) -> None:
    assert is_public(address) is expected


def test_transfers_are_bounded_in_bytes_and_time(
    site: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, pages = site
    access = MediaAccess((host,))
    monkeypatch.setattr(fetching, "MAX_BYTES", 1000)
    pages["/large"] = (200, {}, b"x" * 1001)
    pages["/said"] = (200, {"Content-Length": "1001"}, b"x")
    pages["/slow"] = (200, {}, [b"x"] * 100)
    pages["/short"] = (200, {"Content-Length": "10"}, b"x")
    _refused(f"http://{host}/large", access, "at most 1,000")
    _refused(f"http://{host}/said", access, "at most 1,000")
    _refused(f"http://{host}/short", access, "9 bytes before its end")
    monkeypatch.setattr(fetching, "FETCH_S", 0.5)
    started = time.monotonic()
    _refused(f"http://{host}/slow", access, "not fetched within|cannot be fetched")
    assert time.monotonic() - started < 5
