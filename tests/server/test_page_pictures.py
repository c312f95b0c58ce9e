"""The page's chat with pictures, in a real browser: chosen, pasted and dropped, shown small, sent,
and refused in the server's words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Page, find_chromium, open_page
from optional_packages import require
from servers import RunningServer, serve_model
from vision_models import data_url, picture, write_llava, write_tokenizer

Image = pytest.importorskip("PIL.Image")
require("transformers")
CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium on the path; tools/install-chromium.sh installs it"
    ),
]
IS_READY = "document.getElementById('state')?.dataset.state === 'ready'"
IS_DONE = "document.querySelector('.reply') && !document.querySelector('.message.reply.streaming')"
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "4MiB", "max_num_seqs": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("models") / "llava"
    path.mkdir()
    write_llava(path)
    write_tokenizer(path)
    Image.fromarray(picture(1)).save(path / "one.png")
    (path / "notes.txt").write_text("no picture")
    return path


@pytest.fixture(scope="module")
def vision_server(folder: Path) -> Iterator[RunningServer]:
    with serve_model(model=str(folder), **OPTIONS) as found:
        yield found


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    assert CHROMIUM is not None
    with open_page(CHROMIUM) as page:
        page.resize(1440, 1000)
        yield page


@pytest.fixture
def opened(page: Page, vision_server: RunningServer) -> Page:
    page.open(vision_server.url)
    page.wait(IS_READY)
    page.evaluate("document.getElementById('max-tokens').value = 6")
    return page


def _choose(page: Page, path: Path) -> None:
    document = page.call("DOM.getDocument")["root"]["nodeId"]
    node = page.call("DOM.querySelector", nodeId=document, selector="#picture-file")["nodeId"]
    page.call("DOM.setFileInputFiles", files=[str(path)], nodeId=node)


def _hand_over(page: Page, event: str, selector: str) -> None:
    """Paste or drop a picture, as the browser does with files."""
    encoded = data_url(picture(2)).partition(",")[2]
    kind, field = {
        "paste": ("ClipboardEvent", "clipboardData"),
        "drop": ("DragEvent", "dataTransfer"),
    }[event]
    page.evaluate(
        f"""(() => {{
          const bytes = Uint8Array.from(atob("{encoded}"), (char) => char.charCodeAt(0));
          const data = new DataTransfer();
          data.items.add(new File([bytes], "a.png", {{ type: "image/png" }}));
          const given = {{ {field}: data, bubbles: true, cancelable: true }};
          document.querySelector("{selector}").dispatchEvent(new {kind}("{event}", given));
        }})()"""
    )


def _wait_for_pictures(page: Page, count: int) -> None:
    page.wait(f"document.querySelectorAll('#pictures img').length === {count}")


def test_a_chosen_picture_is_shown_and_sent(opened: Page, folder: Path) -> None:
    _choose(opened, folder / "one.png")
    _wait_for_pictures(opened, 1)
    assert opened.evaluate("document.querySelector('#pictures img').naturalWidth") == 30
    opened.click("#prompt")
    opened.type("What is it?")
    opened.press("Enter")
    opened.wait(IS_DONE)
    assert opened.evaluate("document.querySelectorAll('.message.user img').length") == 1
    assert "What is it?" in opened.text(".message.user")
    assert "6 tokens" in opened.text(".message.reply .meta")
    assert opened.evaluate("document.getElementById('pictures').hidden")
    # the next message carries the conversation with its picture
    opened.click("#prompt")
    opened.type("And now?")
    opened.press("Enter")
    opened.wait(f"document.querySelectorAll('.reply').length === 2 && {IS_DONE}")
    assert "prompt tokens cached" in opened.evaluate(
        "[...document.querySelectorAll('.reply .meta')].pop().textContent"
    )
    assert opened.problems == []


def test_pictures_are_pasted_dropped_and_taken_back(opened: Page) -> None:
    _hand_over(opened, "paste", "#prompt")
    _wait_for_pictures(opened, 1)
    _hand_over(opened, "drop", "#messages")
    _wait_for_pictures(opened, 2)
    opened.click("#pictures button")
    _wait_for_pictures(opened, 1)
    opened.click("#send")  # a picture alone is a message
    opened.wait(IS_DONE)
    assert "6 tokens" in opened.text(".message.reply .meta")
    assert opened.problems == []


def test_what_is_no_picture_is_not_taken(opened: Page, folder: Path) -> None:
    _choose(opened, folder / "notes.txt")
    opened.wait("!document.getElementById('picture-note').hidden")
    assert opened.text("#picture-note") == "Only pictures can be sent."
    assert opened.evaluate("document.getElementById('pictures').hidden")


def test_a_model_of_texts_refuses_in_the_server_s_words(
    page: Page, server: RunningServer, folder: Path
) -> None:
    page.open(server.url)
    page.wait(IS_READY)
    _choose(page, folder / "one.png")
    _wait_for_pictures(page, 1)
    page.click("#send")
    page.wait(IS_DONE)
    assert "this model takes text alone" in page.text(".message.reply .meta")
    assert page.evaluate("document.querySelector('.reply .meta').classList.contains('error')")
    page.problems.clear()  # the browser logs the status 400
    # what was refused does not spoil the conversation
    page.click("#prompt")
    page.type("Tell me a story.")
    page.press("Enter")
    page.wait(f"document.querySelectorAll('.reply').length === 2 && {IS_DONE}")
    assert "tokens" in page.evaluate(
        "[...document.querySelectorAll('.reply .meta')].pop().textContent"
    )
    assert page.problems == []
