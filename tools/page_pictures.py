"""Retakes the pictures of the page in docs/images: `PYTHONPATH=tests/support:. python
tools/page_pictures.py [stills|film]`.

Starts a server with the shipped model and drives Chromium as the page's tests do. The stills: a
chat, dozens of streams beside it, a block looked at, the slider put back. The film (needs Pillow,
which comes with matplotlib): the block map through the recorded steps of a real run, one frame for
every few steps. Each in light and dark.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from browser import Page, find_chromium, open_page
from PIL import Image
from servers import RunningServer, serve_model

FOLDER = Path(__file__).parent.parent / "docs" / "images"
SIZE = (1560, 1040)
FILM_SIZE = (1240, 900)
NUM_FRAMES, STEPS_A_FRAME, FRAME_MS = 56, 5, 130
SUBJECTS = (
    "fox",
    "lighthouse",
    "clever hen",
    "king and a dragon",
    "brave knight",
    "lost key",
    "little boat",
    "bear",
)


@contextmanager
def crowd(server: RunningServer, count: int, lengths: tuple[int, ...] = (330,)) -> Iterator[None]:
    """Streams in the background, one more every eighth of a second."""

    def ask(number: int) -> None:
        content = f"Tell me a story about a {SUBJECTS[number % len(SUBJECTS)]}."
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": lengths[number % len(lengths)],
            "seed": number,
            "ignore_eos": True,
        }
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


def choose_theme(page: Page, scheme: str) -> None:
    """Switch the page to `light` or `dark`."""
    page.evaluate(
        f"if (document.documentElement.dataset.theme !== '{scheme}') "
        "document.getElementById('theme-button').click()"
    )
    time.sleep(0.7)  # the colours fade


def take(page: Page, name: str) -> None:
    """The window in both themes."""
    for scheme in ("light", "dark"):
        choose_theme(page, scheme)
        (FOLDER / f"page-{name}-{scheme}.png").write_bytes(page.screenshot())


def take_stills(server: RunningServer, page: Page) -> None:
    """The chat, the map under load, and a step of the past."""
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


def take_film(server: RunningServer, page: Page) -> None:
    """The block map and the bar of steps while requests come, share blocks, and leave."""
    page.resize(*FILM_SIZE)
    page.open(server.url)
    page.wait("document.getElementById('state')?.dataset.state === 'ready'")
    with crowd(server, 40, lengths=(60, 110, 40, 160, 90, 200)):
        pass  # every stream has ended: the film is of recorded steps
    last = int(page.evaluate("Number(document.getElementById('step-slider').max)"))
    first = max(1, last - NUM_FRAMES * STEPS_A_FRAME)
    for scheme in ("light", "dark"):
        choose_theme(page, scheme)
        frames = [_frame(page, step) for step in range(first, last, STEPS_A_FRAME)]
        frames[0].save(
            FOLDER / f"block-map-{scheme}.webp", save_all=True, append_images=frames[1:],
            duration=FRAME_MS, loop=0, lossless=True, quality=100, method=6, minimize_size=True,
        )  # fmt: skip


def _frame(page: Page, step: int) -> Image.Image:
    """Return the two cards as they show one step of the past."""
    look = (
        "s => { const e = document.getElementById('step-slider'); e.value = s; "
        "e.dispatchEvent(new Event('input')); }"
    )
    page.evaluate(f"({look})({step})")
    page.wait(f"document.getElementById('step-caption').textContent.includes('step {step} ')")
    page.evaluate(
        "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
    )
    box = page.evaluate(
        "(() => { const a = document.querySelector('.map-card').getBoundingClientRect();"
        " const b = document.querySelector('.time-card').getBoundingClientRect();"
        " return {x: a.x - 8, y: a.y - 8, width: a.width + 16, height: b.bottom - a.y + 16}; })()"
    )
    return Image.open(io.BytesIO(page.screenshot(box))).convert("RGB")


def main() -> None:
    """Take what the command line names, by default all."""
    wanted = sys.argv[1:] or ["stills", "film"]
    executable = find_chromium()
    if executable is None:
        sys.exit("there is no Chromium on the path; tools/install-chromium.sh installs it")
    for name in wanted:
        with (
            serve_model(kv_cache_memory="12MiB", num_threads=2) as server,
            open_page(executable) as page,
        ):
            {"stills": take_stills, "film": take_film}[name](server, page)


if __name__ == "__main__":
    main()
