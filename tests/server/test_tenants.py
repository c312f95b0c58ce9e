"""Keys and tenants."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import httpx
import pytest
from fake_client import FakeClient
from served import until
from servers import serve

from quire.config.api import ApiConfig
from quire.errors import ConfigError
from quire.server.quota import key_watch
from quire.server.quota.tenants import (
    EVERYBODY,
    Tenant,
    key_ring,
    keys_from_text,
    read_keys,
    read_keys_file,
)


def test_a_keys_file(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-hashed-key").hexdigest()
    path = tmp_path / "keys.toml"
    path.write_text(
        f'[[tenant]]\nname = "a"\nkeys = ["sha256:{digest}", "sk-clear-key"]\nweight = '
        "2\ntokens_per_minute = 100\n"
        '[[tenant]]\nname = "b"\nkeys = ["sk-other-key"]\nmax_concurrency = 3\n'
    )
    ring = key_ring(read_keys_file(path))
    first, second = ring.tenants
    assert first == Tenant("a", 2.0, 100, None) and second == Tenant("b", 1.0, None, 3)
    assert ring.find(b"sk-hashed-key") == ring.find(b"sk-clear-key") == first
    assert ring.find(b"sk-other-key") == second
    assert ring.find(digest.encode()) is None and ring.find(b"") is None
    assert b"sk-clear-key" not in repr(vars(ring)).encode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x = 1",
        "[[tenant]]\nname = 'a'",
        "[[tenant]]\nname = 'a'\nkeys = []",
        "[[tenant]]\nname = '../a'\nkeys = ['sk-clear-key']",
        "[[tenant]]\nname = 'a'\nkeys = ['short']",
        "[[tenant]]\nname = 'a'\nkeys = ['sk-clear-key']\nweight = 0",
        "[[tenant]]\nname = 'a'\nkeys = ['sk-clear-key']\nmax_concurrency = 0",
        "[[tenant]]\nname = 'a'\nkeys = ['sk-clear-key']\nwieght = 1",
        "[[tenant]]\nname = 'a'\nkeys = ['sk-clear-key']\npriority = 1.5",
        "[[tenant]]\nname = 'a'\nkeys = ['sk-clear-key']\npriority = true",
        "[[tenant]]\nname = 'a'\nkeys = ['sk-clear-key']\npriority = 10000000",
        "[[tenant]]\nname = 'a'\nkeys = ['sk-clear-key', 'sk-clear-key']",
        (
            "[[tenant]]\nname = 'a'\nkeys = ['sk-clear-key']\n[[tenant]]\nname = 'a'\nkeys = "
            "['sk-other-key']"
        ),
        "sk-clear-key",
    ],
)
def test_a_bad_keys_file_is_refused_without_quoting_a_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        key_ring(read_keys_file(path))
    assert "sk-" not in str(caught.value)


def test_keys_of_the_environment() -> None:
    ring = key_ring(keys_from_text("sk-first-key, team=sk-second-key"))
    assert [tenant.name for tenant in ring.tenants] == ["key-1", "team"]
    assert key_ring([]).is_open and key_ring([]).tenants == (EVERYBODY,)


def test_a_salt_is_the_tenants_and_can_only_be_narrowed() -> None:
    tenants = [Tenant("a"), Tenant("ab"), Tenant("b"), EVERYBODY]
    wishes = [None, "a", "b", "ab", "1:a", ""]
    salts = [tenant.cache_salt(wish) for tenant in tenants for wish in wishes]
    assert len(set(salts)) == len(salts)
    assert EVERYBODY.cache_salt(None) is None


def test_a_class_of_priority_is_the_operators_and_a_request_may_only_ask_for_a_later_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(
        '[[tenant]]\nname = "late"\nkeys = ["sk-late-key"]\npriority = 3\n'
        '[[tenant]]\nname = "plain"\nkeys = ["sk-plain-key"]\n'
        '[[tenant]]\nname = "chief"\nkeys = ["sk-chief-key"]\nadmin = true\n'
    )
    engine = FakeClient(policy="fair")
    with serve(engine, keys=key_ring(read_keys_file(path))) as server:
        for key, priority, served in (
            ("sk-late-key", None, 3), ("sk-late-key", 3, 3), ("sk-late-key", 9, 9),
            ("sk-late-key", 0, None), ("sk-late-key", 2, None),
            ("sk-plain-key", None, 0), ("sk-plain-key", 0, 0), ("sk-plain-key", 7, 7),
            ("sk-plain-key", -1, None), ("sk-chief-key", -7, -7),
        ):  # fmt: skip
            body = {"prompt": [5], "priority": priority}
            answer = httpx.post(
                f"{server.v1}/completions", json=body, headers={"authorization": f"Bearer {key}"}
            )
            if served is None:
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
            else:
                assert answer.status_code == 200 and engine.requests[-1].spec.priority == served
                assert "x-quire-ignored-fields" not in answer.headers


def test_a_priority_is_named_where_it_has_no_effect() -> None:
    with serve(FakeClient()) as server:
        for priority, shown in ((4, "priority"), (-4, "priority"), (0, None)):
            answer = httpx.post(
                f"{server.v1}/completions", json={"prompt": [5], "priority": priority}
            )
            assert (
                answer.status_code == 200 and answer.headers.get("x-quire-ignored-fields") == shown
            )


def _write_keys(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


def test_keys_are_changed_while_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_watch, "POLL_S", 0.01)
    path = tmp_path / "keys.toml"
    old = '[[tenant]]\nname = "a"\nkeys = ["sk-old-key"]\n'
    _write_keys(path, old)
    config = ApiConfig(api_keys_file=str(path))
    with (
        caplog.at_level(logging.WARNING),
        serve(FakeClient(), config, read_keys(config, "other=sk-from-environment")) as server,
    ):

        def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.get(f"{server.url}/v1/models", headers=headers).status_code

        def limit() -> str | None:
            body = {"prompt": "a", "max_tokens": 1}
            headers = {"authorization": "Bearer sk-new-key"}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
            return dict(answer.headers).get("x-ratelimit-limit-requests")

        assert status("sk-old-key") == 200 and status("sk-new-key") == 401
        _write_keys(path, old + '[[tenant]]\nname = "b"\nkeys = ["sk-new-key"]\n')
        until(lambda: status("sk-new-key") == 200)
        assert status("sk-old-key") == 200 and limit() is None
        _write_keys(
            path, '[[tenant]]\nname = "b"\nkeys = ["sk-new-key"]\nrequests_per_minute = 50\n'
        )
        until(lambda: status("sk-old-key") == 401)
        assert limit() == "50"
        for wrong in ('[[tenant]]\nname = "b"\nkeys = ["sk-new-key', ""):
            caplog.clear()
            _write_keys(path, wrong)
            until(lambda: "API keys stay as they were" in caplog.text)
            assert status("sk-new-key") == status("sk-from-environment") == 200
        caplog.clear()
        path.unlink()
        until(lambda: "cannot be read" in caplog.text)
        assert status("sk-new-key") == 200 and status("sk-no-key") == 401
        assert "sk-" not in caplog.text


def test_a_keys_file_that_is_wrong_is_named_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[[tenant]]\nname = "a"\nkeys = [sk-clear-key]\n')
    with pytest.raises(ConfigError, match=r"api_keys_file='.*keys.toml' .*line 3, column 9"):
        read_keys_file(path)
