"""Headless Chromium over its own protocol: opens a file, says what it asked for and complained of, and takes pictures."""

from __future__ import annotations

import base64
import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fakes.waiting import PATIENT_S, until

START_S = PATIENT_S
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium() -> str | None:
    """The browser's program, or None where none is on the PATH."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """One tab. `events` are all messages that were not answers."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._count = 0
        self.events: list[dict[str, Any]] = []

    def ask(self, method: str, **parameters: object) -> dict[str, Any]:
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=START_S))
            if message.get("id") == self._count:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def open(self, path: Path, *, width: int, height: int = 800, dark: bool = False) -> None:
        """Show a file at this size in this theme, and wait until it is there."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.ask("Page.navigate", url=path.as_uri())
        until(
            lambda: self.value("document.readyState") == "complete" and self.value("document.body.innerText"),
            "the page loads",
        )

    def value(self, expression: str) -> Any:
        """What an expression comes to in the page."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def of_kind(self, *methods: str) -> list[dict[str, Any]]:
        """What the tab told of these kinds since the page was opened."""
        return [event["params"] for event in self.events if event["method"] in methods]

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        data = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def browser_tab(program: str, profile: Path) -> Iterator[Tab]:
    """A tab of a browser of its own, ended afterwards with all its processes."""
    from websockets.sync.client import connect

    command = [
        program,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-extensions",
        "--disable-background-networking",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "about:blank",
    ]
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        told = profile / "DevToolsActivePort"

        def started() -> bool:
            assert child.poll() is None, f"{program} ended with {child.returncode}"
            return told.exists() and len(told.read_text().split()) == 2

        until(started, f"{program} starts")
        port, _ = told.read_text().split()
        with connect(
            f"ws://127.0.0.1:{port}{told.read_text().split()[1]}",
            max_size=None,
            open_timeout=START_S,
            ping_interval=None,
        ) as whole:
            browser = Tab(whole)
            target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
            with connect(
                f"ws://127.0.0.1:{port}/devtools/page/{target}", max_size=None, open_timeout=START_S, ping_interval=None
            ) as socket:
                yield Tab(socket)
            browser.ask("Browser.close")
        child.wait(timeout=START_S)
    finally:
        if child.poll() is None:
            import os

            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
