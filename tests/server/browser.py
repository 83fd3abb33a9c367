"""A headless Chromium, driven over the WebDriver protocol: the few commands that the tests need."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
ENTER = "\ue007"


def missing() -> str | None:
    """Why there is no browser here; None when there is one."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(lacking)} not found: apt-get install chromium chromium-driver" if lacking else None


class Browser:
    """One window.

    Args:
      width, height: of the window, in CSS pixels.
      dark: ask pages for dark colours.
    """

    def __init__(self, width: int = 1360, height: int = 860, *, dark: bool = False) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={port}", "--log-level=OFF"], stdout=subprocess.DEVNULL
        )
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        arguments = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        arguments += ["--no-sandbox"] if os.geteuid() == 0 else []
        arguments += ["--blink-settings=preferredColorScheme=0"] if dark else []
        options = {"args": arguments, "binary": shutil.which("chromium")}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._wait_for_driver()
        self._session = self._post("/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        # A window has a least width; the viewport of a phone is set as a device's.
        self._cdp(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def close(self) -> None:
        """Ends browser and driver."""
        self._client.delete(f"/session/{self._session}")
        self._client.close()
        self._driver.terminate()
        self._driver.wait(10)

    def open(self, url: str) -> None:
        """Loads a page."""
        self._post(f"/session/{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self._post(f"/session/{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """Text of the first element that matches."""
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def count(self, selector: str) -> int:
        """How many elements match."""
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def click(self, selector: str) -> None:
        """Clicks as a user does: the element must be there to be hit."""
        self._post(f"/session/{self._session}/element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Types into a field."""
        self._post(f"/session/{self._session}/element/{self._find(selector)}/value", {"text": text})

    def hover(self, selector: str) -> None:
        """Moves the pointer over an element."""
        origin = {ELEMENT: self._find(selector)}
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": origin}
        actions = [{"type": "pointer", "id": "mouse", "actions": [move]}]
        self._post(f"/session/{self._session}/actions", {"actions": actions})

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
        """Waits for the page."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what} did not come true; the console says {self.console()}"
            time.sleep(0.05)

    def console(self) -> list[str]:
        """What the page complained of since the last call."""
        entries = self._post(f"/session/{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def screenshot(self, path: Path) -> None:
        """Saves the window as PNG."""
        data = self._client.get(f"/session/{self._session}/screenshot").json()["value"]
        path.write_bytes(base64.b64decode(data))

    def hide(self, hidden: bool) -> None:
        """Makes the page believe that nobody sees it, or that somebody does again."""
        state = "hidden" if hidden else "visible"
        self.run(
            "Object.defineProperty(document, 'visibilityState', {value: arguments[0], configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))",
            state,
        )

    def _find(self, selector: str) -> str:
        found = self._post(f"/session/{self._session}/element", {"using": "css selector", "value": selector})
        return str(found[ELEMENT])

    def _cdp(self, command: str, **parameters: Any) -> None:
        self._post(f"/session/{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._client.post(path, json=body).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer["message"]
        return answer

    def _wait_for_driver(self) -> None:
        end = time.monotonic() + 20
        while True:
            try:
                self._client.get("/status")
                return
            except httpx.ConnectError:
                assert time.monotonic() < end, "chromedriver did not start"
                time.sleep(0.05)
