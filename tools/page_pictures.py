"""Retakes the pictures of the page in docs/images: `PYTHONPATH=tests/support:. python tools/page_pictures.py`.

Starts a server with the shipped model and drives Chromium as the page's tests do: a chat, dozens of streams beside it, a block
looked at, the slider put back. Each in light and dark.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from browser import Page, find_chromium, open_page
from servers import RunningServer, serve_model

FOLDER = Path(__file__).parent.parent / "docs" / "images"
SIZE = (1560, 1040)
SUBJECTS = ("fox", "lighthouse", "clever hen", "king and a dragon", "brave knight", "lost key", "little boat", "bear")


@contextmanager
def crowd(server: RunningServer, count: int) -> Iterator[None]:
    """Streams in the background, one more every eighth of a second."""

    def ask(number: int) -> None:
        content = f"Tell me a story about a {SUBJECTS[number % len(SUBJECTS)]}."
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 330, "seed": number, "ignore_eos": True}
        time.sleep(number / 8)
        httpx.post(f"{server.v1}/chat/completions", json=body, timeout=300)

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(300)


def say(page: Page, text: str) -> None:
    """Send a message of the chat, and wait for the end of the answer."""
    page.click("#prompt")
    page.type(text)
    page.press("Enter")
    page.wait("document.getElementById('send').textContent === 'Stop'", 60)
    page.wait("document.getElementById('send').textContent === 'Send'", 120)


def take(page: Page, name: str) -> None:
    """The window in both themes."""
    for scheme in ("light", "dark"):
        page.evaluate(
            f"if (document.documentElement.dataset.theme !== '{scheme}') document.getElementById('theme-button').click()"
        )
        time.sleep(0.7)  # the colours fade
        (FOLDER / f"page-{name}-{scheme}.png").write_bytes(page.screenshot())


def main() -> None:
    """Take all pictures."""
    executable = find_chromium()
    if executable is None:
        sys.exit("there is no Chromium on the path; tools/install-chromium.sh installs it")
    with serve_model(kv_cache_memory="12MiB", num_threads=2) as server, open_page(executable) as page:
        page.resize(*SIZE)
        page.open(server.url)
        page.wait("document.getElementById('state')?.dataset.state === 'ready'")
        say(page, "Tell me a story about a clever fox.")
        say(page, "Tell me a story about a brave knight.")
        take(page, "chat")
        with crowd(server, 36):
            page.wait("document.querySelectorAll('#running li .bar').length >= 24", 120)
            page.evaluate("document.getElementById('block-map').focus()")
            for _ in range(3):
                page.press("ArrowRight")
            take(page, "load")
            page.evaluate("document.getElementById('step-slider').focus()")
            for _ in range(60):
                page.press("ArrowLeft")
            take(page, "steps")


if __name__ == "__main__":
    main()
