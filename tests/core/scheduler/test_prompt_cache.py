"""Kept prompts outlive others, within shares and for a time; and a miss says why."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.kvcache.audit import audit_kept
from quire.core.kvcache.prefix import PrefixNode
from quire.core.request import CacheMiss, Request
from quire.core.request_spec import Keep
from quire.core.scheduler import prompt_cache
from quire.core.scheduler.prompt_cache import CacheStats, PromptCache

PROMPT = list(range(100, 122))
"""Five blocks of four tokens, and two tokens."""


class Cached:
    """A pool of 40 blocks: a tenant may keep ten of them, all together twenty."""

    def __init__(self, harness: Any, **changes: Any) -> None:
        self.cache = PromptCache(CacheStats(), "log")
        limits = {"num_blocks": 40, **changes}
        self.harness = harness(**limits, prerequisites=(self.cache,))

    def ask(self, request_id: str, prompt: list[int] | int, **changes: Any) -> Request:
        """Serve one request; its tokens are the oracle's."""
        request: Request = self.harness.add(request_id, prompt, **changes)
        self.harness.run()
        self.harness.check(request)
        audit_kept(self.cache.kept, self.harness.scheduler.manager)
        return request

    def nodes(self, prompt: list[int]) -> list[PrefixNode]:
        """The cached nodes of a prompt of the namespace that is none, from its beginning on."""
        index = self.harness.scheduler.manager.index
        keys = index.keys(())
        keys.extend_to(prompt)
        found, node = list[PrefixNode](), index.root(())
        for tokens, digest in zip(keys.tokens, keys.digests, strict=True):
            node = index.child(node, tokens, digest)
            found.append(node)
        return found

    def flood(self, name: str) -> None:
        """Other prompts, of more blocks than there are."""
        for number in range(4):
            self.ask(f"{name}{number}", 60)


def hits(request: Request) -> int:
    return request.metrics.num_prefix_hit_tokens


def test_a_kept_prompt_is_found_after_others_have_filled_the_pool(harness: Any) -> None:
    run = Cached(harness)
    run.ask("kept", PROMPT, keep=(Keep(None, 1e6),))
    run.ask("plain", [7, *PROMPT])
    run.flood("f")
    assert hits(run.ask("again", PROMPT)) == 20
    plain = run.ask("plain again", [7, *PROMPT])
    assert hits(plain) == 0 and plain.metrics.cache_miss == CacheMiss("evicted", 20, 20)


def test_time_ends_what_is_kept(harness: Any) -> None:
    run = Cached(harness)
    run.ask("kept", PROMPT, keep=(Keep(None, 5.0),))
    assert run.cache.kept.num_blocks == 5
    run.flood("f")
    assert run.harness.num_steps > 5 and run.cache.kept.num_blocks == 0
    run.flood("g")
    assert hits(run.ask("again", PROMPT)) == 0


def test_a_tenant_keeps_its_share_and_no_more(harness: Any) -> None:
    run = Cached(harness)
    for name in "abcd":
        run.ask(name, [ord(name), *PROMPT], keep=(Keep(None, 1e6),), tenant="greedy")
    assert run.cache.kept.num_of("greedy") == 10
    run.ask("other", [9, *PROMPT], keep=(Keep(None, 1e6),), tenant="other")
    assert run.cache.kept.num_of("other") == 5
    run.flood("f")
    assert hits(run.ask("d again", [ord("d"), *PROMPT])) == 20, "the newest are kept"
    assert hits(run.ask("a again", [ord("a"), *PROMPT])) == 0
    for number in range(4):
        run.ask(f"t{number}", [number, *PROMPT], keep=(Keep(None, 1e6),), tenant=f"t{number}")
    assert run.cache.kept.num_blocks <= 20


def test_a_request_that_needs_the_whole_pool_gets_it(harness: Any) -> None:
    run = Cached(harness, max_model_len=160)
    run.ask("kept", PROMPT, keep=(Keep(None, 1e6),))
    run.ask("large", 156)
    assert run.cache.kept.num_blocks < 5
    assert run.cache.stats.num_kept_evicted > 0


def test_misses_are_told_apart(harness: Any) -> None:
    run = Cached(harness)
    first = run.ask("new", PROMPT)
    assert first.metrics.cache_miss == CacheMiss("new", 20)
    assert run.ask("hit", PROMPT).metrics.cache_miss == CacheMiss("", 0)
    unlike = run.ask("unlike", list(range(300, 322)))
    assert unlike.metrics.cache_miss == CacheMiss("new", 20)
    other = run.ask("differs", [*PROMPT[:10], *range(200, 210)])
    assert other.metrics.cache_miss == CacheMiss("differs", 16 - 10)
    unread = run.ask("unread", PROMPT, reads_cache=False)
    assert unread.metrics.cache_miss == CacheMiss("not_read", 20)
    off = Cached(harness, enable_prefix_caching=False).ask("off", PROMPT)
    assert off.metrics.cache_miss == CacheMiss("disabled", 22)
    assert run.cache.stats.num_missed_tokens == {"new": 40, "differs": 6, "not_read": 20}


def test_a_tenant_that_keeps_what_another_keeps_does_not_take_it_over(harness: Any) -> None:
    run = Cached(harness)
    run.ask("a", PROMPT, keep=(Keep(None, 1e6),), tenant="a")
    run.ask("b", PROMPT, keep=(Keep(None, 1e6),), tenant="b")
    assert (run.cache.kept.num_of("a"), run.cache.kept.num_of("b")) == (5, 0)
    for number in range(3):
        run.ask(f"b{number}", [number, *PROMPT], keep=(Keep(None, 1e6),), tenant="b")
    assert (run.cache.kept.num_of("a"), run.cache.kept.num_of("b")) == (5, 10)


def test_a_prompt_that_is_kept_and_evicted_again_and_again_leaves_nothing(harness: Any) -> None:
    run = Cached(harness, max_model_len=160)
    run.ask("first", PROMPT, keep=(Keep(None, 1e6),))
    kept, (*_, node) = run.cache.kept, run.nodes(PROMPT)
    for number in range(10_000):
        kept.keep([node], "default", 1e6 + number)
        kept.forget(node, is_eviction=True)
    assert len(kept._ends) < 4096 and len(kept._ending) < 4096
    audit_kept(kept, run.harness.scheduler.manager)


def test_thousands_of_salts_do_not_hide_whose_a_prompt_is(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_cache, "MAX_NAMESPACES", 8)
    run = Cached(harness)
    run.ask("a", PROMPT, tenant="a", namespace=("salt", "a"), keep=(Keep(None, 1e6),))
    for number in range(100):
        run.ask(f"b{number}", 3, tenant="b", namespace=("salt", f"b{number}"))
    assert len(run.cache._tenants) <= 2 * 40, "no more than a pool of 40 blocks explains"
    assert run.cache.clear("a") == 5
    assert hits(run.ask("again", PROMPT, tenant="a", namespace=("salt", "a"))) == 0


def test_clearing_a_tenant_leaves_what_others_have_used_too(harness: Any) -> None:
    run = Cached(harness)
    run.ask("a", PROMPT, tenant="a", namespace=("salt", "a"), keep=(Keep(None, 1e6),))
    run.ask("b", PROMPT, tenant="b", namespace=("salt", "b"))
    run.ask("both", PROMPT, tenant="a")
    run.ask("both too", PROMPT, tenant="b")
    run.harness.add("running", [5, *PROMPT], max_tokens=8, tenant="a", namespace=("salt", "a"))
    run.harness.step()
    assert run.cache.clear("a") > 0
    audit_kept(run.cache.kept, run.harness.scheduler.manager)
    run.harness.run()
    assert hits(run.ask("a2", PROMPT, tenant="a", namespace=("salt", "a"))) == 0
    assert hits(run.ask("b2", PROMPT, tenant="b", namespace=("salt", "b"))) == 21
    assert hits(run.ask("both again", PROMPT, tenant="a")) == 21
    counts = {each.tenant: each.num_cached_tokens for each in run.cache.by_tenant()}
    assert counts["a"] > 0 and counts["b"] > 0
    run.cache.clear()
    assert len(run.harness.scheduler.manager.index) == 0
