"""Headless Chromium for tests, driven by its own DevTools protocol through an inherited pipe: no
port, no library.

Messages are JSON texts, each ended by a zero byte: the browser reads descriptor 3 and writes
descriptor 4. What a page logs as an error, throws or fails to load is collected in `problems`, so
that a test can insist on none.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--mute-audio", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-extensions", "--disable-default-apps", "--hide-scrollbars",
    "--force-color-profile=srgb", "--remote-debugging-pipe",
)  # fmt: skip
_LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Puts the pipe where the browser expects it; not in the test's process,
whose threads must not be forked into."""
_KEYS = {
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Tab": 9,
    "Enter": 13,
    "Home": 36,
    "End": 35,
}


def find_chromium() -> str | None:
    """A browser on this machine's path."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserError(Exception):
    """The browser answered with an error, or not in time."""


class Page:
    """One tab."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._buffer = b""
        self._num_calls = 0
        self._session: str | None = None
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, timeout_s: float = 60.0, **params: Any) -> dict[str, Any]:
        """One command; what it returns."""
        self._num_calls += 1
        message: dict[str, Any] = {"id": self._num_calls, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + timeout_s
        while True:
            answer = self._next(deadline_s, method)
            if answer.get("id") == message["id"]:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def open(self, url: str) -> None:
        """Go somewhere and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited where it is a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 60.0) -> Any:
        """Until a JavaScript expression is true; its value."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            value = self.evaluate(expression)
            if value:
                return value
            if time.monotonic() > deadline_s:
                raise BrowserError(f"never true: {expression}; problems: {self.problems}")
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """The text of the first element that matches."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse, as a user would."""
        x, y = self.middle(selector)
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def middle(self, selector: str) -> tuple[float, float]:
        """Where an element's middle is in the window, after it was scrolled into it."""
        name = json.dumps(selector)
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({name}); e.scrollIntoView({{block: "
            f"'nearest'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height "
            "/ 2]; })()"
        )
        return box[0], box[1]

    def move(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press and release a key."""
        code: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        if key == "Enter":
            code["text"] = "\r"
        self.call("Input.dispatchKeyEvent", type="keyDown", **code)
        self.call(
            "Input.dispatchKeyEvent",
            type="keyUp",
            key=key,
            code=key,
            windowsVirtualKeyCode=_KEYS[key],
        )

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """The window's inner size, in the page's pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """Whether the system says `light` or `dark`."""
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def screenshot(self, clip: dict[str, float] | None = None) -> bytes:
        """A PNG of the window."""
        options: dict[str, Any] = {} if clip is None else {"clip": {**clip, "scale": 1}}
        return base64.b64decode(
            self.call("Page.captureScreenshot", format="png", **options)["data"]
        )

    def _next(self, deadline_s: float, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            readable, _, _ = select.select(
                [self._receive], [], [], max(0.0, deadline_s - time.monotonic())
            )
            data = os.read(self._receive, 1 << 16) if readable else b""
            if not data:
                raise BrowserError(
                    f"{waiting_for}: {'the browser is gone' if readable else 'no answer in time'}"
                )
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(
                str(params["exceptionDetails"].get("exception", {}).get("description", params))
            )
        elif method == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.problems.append(f"console.{params['type']}: {params['args']}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(
                f"{params['entry']['source']}: {params['entry']['text']} "
                f"{params['entry'].get('url', '')}"
            )
        elif method == "Network.requestWillBeSent":
            self._check_host(params["request"]["url"])

    def _check_host(self, url: str) -> None:
        if not url.startswith(("http://127.0.0.1:", "about:", "data:", "chrome:", "chrome-error:")):
            self.problems.append(f"asked another host: {url}")


@contextmanager
def open_page(executable: str) -> Iterator[Page]:
    """A browser with one empty tab; gone afterwards, with every process and file that it made."""
    to_browser, from_us = _pipe()
    from_browser, to_us = _pipe()
    with tempfile.TemporaryDirectory(
        prefix="quire-browser-", ignore_cleanup_errors=True
    ) as profile:
        launch = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(to_browser), str(to_us)]
        process = subprocess.Popen(
            [*launch, executable, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, to_us), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(to_us)
        try:
            yield Page(from_us, from_browser)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)
            os.close(from_us)
            os.close(from_browser)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are not among the descriptors that the browser wants."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
