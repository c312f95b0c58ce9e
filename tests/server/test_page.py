"""The page as a user sees it, in a real browser: a chat that streams, a map that follows,
a slider that goes back."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from browser import Page, find_chromium, open_page
from servers import RunningServer, serve_model

from quire.server.quota.tenants import Tenant, key_ring

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on the path; tools/install-chromium.sh installs it"
)
KEY = "sk-the-admin-key"
IS_READY = "document.getElementById('state')?.dataset.state === 'ready'"
PIXELS = "document.getElementById('block-map').toDataURL()"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    assert CHROMIUM is not None
    with open_page(CHROMIUM) as page:
        page.resize(1440, 1000)
        page.prefer("light")
        yield page


@pytest.fixture(autouse=True)
def no_problems(page: Page) -> Iterator[None]:
    yield
    problems, page.problems = page.problems, []
    assert problems == []


@pytest.fixture
def opened(page: Page, server: RunningServer) -> Page:
    page.open(server.url)
    page.wait(IS_READY)
    return page


@contextmanager
def _crowd(server: RunningServer, count: int) -> Iterator[None]:
    """So many answers with a common beginning under way: whoever has got his asks again,
    until the end of the block."""
    is_over = threading.Event()

    def ask(number: int) -> None:
        content = f"Tell me a long and gentle story for children about animal number {number}."
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 200,
            "seed": number,
            "ignore_eos": True,
        }
        while not is_over.is_set():
            httpx.post(f"{server.v1}/chat/completions", json=body, timeout=60).raise_for_status()

    with ThreadPoolExecutor(count) as pool:
        asked = [pool.submit(ask, number) for number in range(count)]
        try:
            yield
        finally:
            is_over.set()
            for each in asked:
                each.result()


def _pause_when(opened: Page, condition: str) -> None:
    """The page stands still at a moment of which the condition holds: later it may no more.

    The map, the rows and the text stand still, the tiles do not: an answer that ends in between
    counts there, so there are further attempts.
    """
    for _ in range(10):
        opened.wait(f"({condition}) && (document.getElementById('live').click(), true)")
        assert (
            opened.evaluate("document.getElementById('live').getAttribute('aria-pressed')")
            == "false"
        )
        if opened.evaluate(condition):
            return
        opened.click("#live")
    raise AssertionError("it did not stand still")


def test_a_message_is_answered_piece_by_piece_in_the_colour_of_its_blocks(opened: Page) -> None:
    opened.click("#prompt")
    opened.type("Tell me a story about a clever fox.")
    opened.press("Enter")
    early = opened.wait(  # all at one moment: the answer may end right after it
        "(() => { const shown = document.querySelector('.message.reply.streaming "
        ".text')?.textContent.length;"
        " return shown > 20 && document.getElementById('send').textContent === 'Stop' ? "
        "shown : 0; })()"
    )
    opened.wait("!document.querySelector('.message.reply.streaming')")
    assert len(opened.text(".message.reply .text")) > early
    assert "tokens" in opened.text(".message.reply .meta") and opened.text("#send") == "Send"
    assert "oklch" in opened.evaluate(
        "document.querySelector('.message.reply').style.getPropertyValue('--hue')"
    )


@pytest.mark.slow
def test_the_map_follows_and_the_slider_goes_back(opened: Page, server: RunningServer) -> None:
    opened.evaluate("document.activeElement.blur()")
    with _crowd(server, 12):
        _pause_when(
            opened,
            "document.querySelectorAll('#running li').length === 12"
            " && Number(document.querySelector('#tile-requests "
            ".value').firstChild.textContent) === 12"
            " && /[1-9]\\d* of them shared/.test(document.getElementById('map-caption').textContent)",
        )
        frozen, caption = opened.evaluate(PIXELS), opened.text("#step-caption")
    opened.wait(
        "Number(document.querySelector('#tile-requests .value').firstChild.textContent) === 0"
    )
    assert (opened.evaluate(PIXELS), opened.text("#step-caption")) == (frozen, caption)
    opened.evaluate("document.getElementById('step-slider').focus()")
    opened.press("ArrowLeft")
    assert opened.text("#step-caption") != caption, "the slider works from the keyboard"
    opened.click("#live")
    opened.wait("document.getElementById('running').textContent === 'Nobody.'")
    assert opened.evaluate(PIXELS) != frozen


@pytest.mark.slow
def test_a_block_tells_what_it_holds_by_pointer_and_by_keyboard(
    opened: Page, server: RunningServer
) -> None:
    with _crowd(server, 3):
        _pause_when(opened, "document.querySelectorAll('#running li .bar').length === 3")
    opened.evaluate("document.getElementById('block-map').focus()")
    for key in ("Home", "ArrowRight", "ArrowLeft"):
        opened.press(key)
    assert opened.text("#detail-head b") == "Block 0"
    found = opened.wait(
        "(async () => { const map = document.getElementById('block-map'); for (let i = 0; i "
        "< 400; i++) {"
        " const t = document.getElementById('detail-head').textContent;"
        " if (t.includes('3 references')) return t;"
        " map.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'})); } return ''; })()"
    )
    assert "16 of 16 slots filled" in found
    opened.wait(
        "document.getElementById('detail-text').textContent.includes('Tell me a long and gentle')"
    )
    number = int(found.split(" ")[1].replace(",", ""))
    x, y, width, cell = opened.evaluate(
        "(() => { const m = document.getElementById('block-map'); const b = "
        "m.getBoundingClientRect();"
        " return [b.x, b.y, b.width, Number(m.dataset.cell)]; })()"
    )
    columns = width // cell
    for block in (number + 1, number):
        opened.move(x + (block % columns + 0.5) * cell, y + (block // columns + 0.5) * cell)
        assert opened.text("#detail-head b") == f"Block {block}"


def test_light_and_dark(opened: Page) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        opened.evaluate("localStorage.clear()")
        opened.prefer(scheme)
        opened.call("Page.reload")
        opened.wait(f"{IS_READY} && document.documentElement.dataset.theme === '{scheme}'")
        seen[scheme] = (
            opened.evaluate("getComputedStyle(document.body).backgroundColor"),
            opened.evaluate(PIXELS),
        )
    assert seen["light"][0] != seen["dark"][0] and seen["light"][1] != seen["dark"][1]
    opened.click("#theme-button")
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == seen["light"][0]
    opened.evaluate("localStorage.clear()")
    opened.prefer("light")


def test_everything_can_be_reached_with_the_tab_key(opened: Page) -> None:
    opened.evaluate("document.body.focus()")
    reached = set()
    for _ in range(24):
        opened.press("Tab")
        reached.add(opened.evaluate("document.activeElement.id"))
    assert {
        "theme-button",
        "messages",
        "prompt",
        "send",
        "many",
        "block-map",
        "live",
        "step-slider",
    } <= reached


@pytest.mark.slow
def test_twenty_thousand_blocks_are_drawn_in_a_frame(opened: Page) -> None:
    cost = json.loads(
        opened.evaluate(
            """(async () => {
            const { BlockMap } = await import(new URL('page/blockmap.js', location.href));
            const { State } = await import(new URL('page/history.js', location.href));
            const wrap = document.createElement('div');
            wrap.style.width = '900px';
            document.body.append(wrap);
            const canvas = wrap.appendChild(document.createElement('canvas'));
            const map = new BlockMap(canvas, document.createElement('canvas'), () => 0);
            const state = new State(20000);
            for (let row = 0; row < 200; row++) {
              const blocks = Array.from({ length: 60 }, (_, place) => 500 + row * 60 + place);
              state.rows.set(row, { name: `r${row}`, colour: row, prompt: 9, computed: 950, blocks, isWriting: true });
            }
            map.resize(20000, 16);
            const time = (work) => { const began = performance.now(); work(); return performance.now() - began; };
            const first = time(() => map.show(state));
            const later = [];
            for (let step = 0; step < 20; step++) {
              for (const row of state.rows.values()) row.computed += 1;
              later.push(time(() => map.show(state)));
            }
            const counts = map.counts();
            wrap.remove();
            return JSON.stringify({ first, later: later.sort((a, b) => a - b)[10], counts });
            })()"""
        )
    )
    assert cost["counts"] == {"free": 8000, "cached": 0, "owned": 12000, "shared": 0}
    assert cost["later"] < 200, cost  # 2 ms on an idle core


@pytest.mark.slow
def test_with_keys_the_page_asks_for_one_and_keeps_it_in_the_tab(page: Page) -> None:
    with serve_model(
        keys=key_ring([(Tenant("boss", is_admin=True), [KEY])]), kv_cache_memory="8MiB"
    ) as server:
        page.open(server.url)
        page.wait("document.getElementById('key-dialog').open")
        page.evaluate("document.getElementById('key').focus()")
        page.type(KEY)
        page.press("Enter")
        page.wait(IS_READY)
        assert page.evaluate("sessionStorage.getItem('quire-key')") == KEY
        assert KEY not in page.evaluate(
            "JSON.stringify(localStorage) + document.cookie + location.href"
        )
        page.evaluate("sessionStorage.clear()")
    # A browser tells of every 401; the one before the key was given is no problem of the page's.
    assert page.problems
    page.problems[:] = [each for each in page.problems if "401" not in each]
    forget_refusals(page)


def forget_refusals(page: Page) -> None:
    """Of a server that has gone, while the page was still open or had just been left."""
    page.problems[:] = [each for each in page.problems if "ERR_CONNECTION" not in each]


@pytest.mark.slow
def test_accepted_drafts_are_marked_in_an_answer(page: Page, server: RunningServer) -> None:
    """A story that is told again is drafted from the first telling."""
    with serve_model(speculative_config={"method": "suffix"}, kv_cache_memory="8MiB") as drafting:
        page.open(drafting.url)
        page.wait(IS_READY)
        page.evaluate("document.getElementById('temperature').value = '0'")
        for _ in range(20):
            page.evaluate("document.getElementById('chat-clear').click()")
            page.evaluate(
                "document.getElementById('prompt').value = 'Tell me a story about a fox.'"
            )
            page.evaluate("document.getElementById('send').click()")
            page.wait("document.querySelector('.reply .meta')?.textContent.includes('tokens')")
            if page.evaluate("document.querySelectorAll('.reply mark.drafted').length"):
                break
        marked = page.evaluate("document.querySelector('.reply mark.drafted').textContent")
        text = page.evaluate("document.querySelector('.reply .text').textContent")
        assert marked and marked in text
        assert " drafted" in page.evaluate("document.querySelector('.reply .meta').textContent")
        page.open(server.url)
        page.wait(IS_READY)
    forget_refusals(page)
