"""Query strings of whatever kind, on every route: an answer or a refusal by name,
and never a failure of ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import httpx
import msgspec
import pytest
from fake_client import FakeClient
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta
from servers import RunningServer, routes_of, serve

from quire.config.api import ApiConfig
from quire.server.app import build_app
from quire.server.http.call import Call, attach
from quire.server.http.errors import ApiError
from quire.server.http.query import read_query
from quire.server.ops.openapi import ApiRoute
from quire.server.quota.tenants import EVERYBODY, key_ring


class Asked(msgspec.Struct, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: Annotated[str, Meta(max_length=8)] = ""
    order: Literal["asc", "desc"] = "desc"


def read(query_string: bytes, *, is_strict: bool = False) -> tuple[Any, Call]:
    scope: dict[str, Any] = {"query_string": query_string}
    call = Call("x", EVERYBODY, is_strict=is_strict)
    attach(scope, call)
    read_query(scope, Asked)
    return scope["quire.query"], call


NUMBERS = (
    "²",
    "٣",
    "+5",
    " 5",
    "5 ",
    "1_0",
    "1e1",
    "0x5",
    "5.0",
    "",
    "-",
    "--5",
    "0",
    "101",
    "-1",
    "9" * 5000,
    "NaN",
    "\0",
    "true",
)
HOSTILE = (
    *(f"limit={number}".encode() for number in NUMBERS),
    b"limit=%C2%B2",
    b"limit=5&limit=6",
    b"order=ASC",
    b"after=" + b"x" * 4000,
    b"&".join(b"x%d=1" % number for number in range(300)),
)


@pytest.mark.parametrize("query_string", HOSTILE)
def test_what_is_out_of_bounds_is_refused_by_name(query_string: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read(query_string)
    assert caught.value.status == 400 and caught.value.code == "invalid_query"
    assert caught.value.param == (
        None if b"x299" in query_string else query_string.partition(b"=")[0].decode()
    )


def test_what_is_within_them_is_read() -> None:
    query, call = read(b"limit=007&order=asc&after=%C3%A4")
    assert (query.limit, query.order, query.after) == (7, "asc", "ä") and call.ignored_fields == []
    assert read(b"")[0] == Asked()


def test_parameters_that_a_route_does_not_have_are_reported_as_fields_are() -> None:
    query, call = read(b"colour=red&limit=5&colour=blue&=&%00=1")
    assert query.limit == 5 and call.ignored_fields == ["colour", "", "\0"]
    with pytest.raises(ApiError) as caught:
        read(b"colour=red", is_strict=True)
    assert (caught.value.code, caught.value.param) == ("unknown_parameter", "colour")


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(
    st.binary(max_size=200)
    | st.text(max_size=100).map(lambda text: f"limit={text}".encode("utf-8", "surrogatepass"))
)
def test_no_bytes_at_all_are_a_failure_of_ours(query_string: bytes) -> None:
    try:
        query, _ = read(query_string)
    except ApiError as error:
        assert error.status == 400
    else:
        assert 1 <= query.limit <= 100 and query.order in ("asc", "desc")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serve(
        FakeClient(), ApiConfig(data_folder=str(tmp_path_factory.mktemp("data")))
    ) as running:
        yield running


def operations() -> list[ApiRoute]:
    routes = routes_of(build_app(ApiConfig(), FakeClient(), key_ring([])))
    return [route for route in routes if isinstance(route, ApiRoute)]


@pytest.mark.slow
def test_every_route_judges_its_query(server: RunningServer) -> None:
    names = {name for each in operations() for name in each.query_kind.__struct_fields__} | {"x"}
    many = "9" * (3000 // len(names))  # of which a request line holds one for each name
    num_judged = 0
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for operation in operations():
            path = re.sub(r"\{[^}]*\}", "1", operation.path)
            for method in sorted((operation.methods or set()) - {"HEAD"}):
                for value in (
                    "%C2%B2",
                    many,
                    "-1",
                    "%00",
                    "",
                    "%",
                    "%ff",
                    "asc%0d%0ax:y",
                    "%F0%9F%98%80",
                ):
                    query = "&".join(f"{name}={value}" for name in sorted(names))
                    answer = http.request(
                        method, f"{path}?{query}", json={} if method == "POST" else None
                    )
                    assert answer.status_code < 500, (method, path, value, answer.text)
                    num_judged += 1
                    if operation.query_kind.__struct_fields__ and value in ("%C2%B2", many):
                        assert answer.status_code == 400, (method, path, value)
    assert num_judged > 250


def test_what_is_unknown_is_named_in_the_answer_of_any_kind(server: RunningServer) -> None:
    stream = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with httpx.Client(base_url=server.url, timeout=60) as http:
        file_id = http.post("/v1/files", data={"purpose": "batch"}, files={"file": b"x"}).json()[
            "id"
        ]
        paths = ("/livez", "/metrics", f"/v1/files/{file_id}/content", "/openapi.json")
        answers = [http.get(f"{path}?colour=red") for path in paths]
        answers.append(http.post("/v1/chat/completions?colour=red", json=stream))
        for answer in answers:
            assert (
                answer.status_code == 200 and answer.headers["x-quire-ignored-fields"] == "colour"
            ), answer.url
        assert "x-quire-ignored-fields" not in http.get("/livez").headers
        tokens = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}
        counted = http.post("/v1/messages/count_tokens?beta=true", json=tokens)
        assert counted.status_code == 200 and "x-quire-ignored-fields" not in counted.headers
