"""A headless browser, spoken to over two pipes in its own protocol: nothing is installed for it but the browser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DEADLINE_S = 60.0


class Browser:
    """One page of a headless browser; `events` are what it sent since the page was opened."""

    def __init__(self, command: str, profile: str) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--remote-debugging-pipe",
        ]
        line = f'exec "$@" 3<&{to_browser} 4>&{from_browser} 2>/dev/null'
        self._process = subprocess.Popen(
            ["bash", "-c", line, "bash", command, *options, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest, self._count, self._session, self.events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """Send a command and return its result."""
        self._count += 1
        number = self._count
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self):
        start = time.monotonic()
        while b"\0" not in self._rest:
            assert time.monotonic() - start < DEADLINE_S
            piece = os.read(self._in, 1 << 16)
            assert piece, "the browser is gone"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, path, *, width, dark=False, paper=False):
        """Open a file in a window of some width, or on paper, and wait until it is there."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="print" if paper else "screen", features=[scheme])
        self.call("Page.navigate", url=path.as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._next())

    def ask(self, script):
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, condition):
        """Wait until an expression is true in the page; the page looks again before each frame it draws."""
        script = f"""new Promise((done, fail) => {{
          const end = performance.now() + {1000 * DEADLINE_S / 4};
          const look = () => ({condition}) ? done(true) : performance.now() > end ? fail(new Error('never')) : setTimeout(look, 20);
          look(); }})"""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, condition

    def events_of(self, method):
        """Return the parameters of events of one kind."""
        return [e["params"] for e in self.events if e.get("method") == method]

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(timeout=20)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    command = next((found for name in NAMES if (found := shutil.which(name))), None)
    if command is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    one = Browser(command, str(tmp_path_factory.mktemp("profile")))
    yield one
    one.close()
