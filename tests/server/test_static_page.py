"""The page's files: there without a key, with a policy that lets nothing in from elsewhere,
and nothing secret in them."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from fake_client import FakeClient
from servers import serve

import quire.server.ops
from quire.config.api import ApiConfig
from quire.server.ops.static_page import PATHS
from quire.server.quota.tenants import Tenant, key_ring

FOLDER = Path(quire.server.ops.__file__).parent / "page"


def test_the_page_needs_no_key_and_has_a_strict_policy() -> None:
    with serve(FakeClient(), keys=key_ring([(Tenant("a"), ["sk-right-key"])])) as server:
        for path in PATHS:
            answer = httpx.get(server.url + path)
            policy = answer.headers["content-security-policy"]
            assert (
                answer.status_code == 200
                and "default-src 'none'" in policy
                and "script-src 'self'" in policy
            )
            assert "unsafe" not in policy and "http" not in policy and "*" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = httpx.get(server.url + path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert httpx.get(server.url + "/").content == httpx.get(server.url + "/dashboard").content
        assert httpx.head(server.url + "/").status_code == 200


def test_every_file_is_served_and_refers_to_this_server_alone() -> None:
    served = {path.removeprefix("/page/") for path in PATHS if path.startswith("/page/")}
    assert served == {path.name for path in FOLDER.iterdir()} - {"index.html"}
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == [], path.name
        assert "innerHTML" not in text and len(text.splitlines()) <= 600, path.name
        for name in re.findall(r"""from "\./([^"]+)"|(?:href|src)="page/([^"]+)""", text):
            assert "".join(name) in served, (path.name, name)


def test_behind_a_proxy_everything_is_relative() -> None:
    with serve(FakeClient(), ApiConfig(root_path="/llm")) as server:
        index = httpx.get(f"{server.url}/llm/")
        assert index.status_code == 200 and 'src="page/main.js"' in index.text
        assert httpx.get(f"{server.url}/llm/page/main.js").status_code == 200
        assert not re.search(
            r"""["'`](?:/v1|/inspect|/page)""",
            (FOLDER / "main.js").read_text() + (FOLDER / "api.js").read_text(),
        )
