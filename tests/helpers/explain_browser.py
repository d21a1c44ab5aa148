"""A real browser for tests: Chromium without a window, driven over the DevTools protocol."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 60


def find_browser() -> str | None:
    """The first of the browsers that is on PATH."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. Events are kept in `events` as they come in with answers."""

    def __init__(self, address: str) -> None:
        import websocket

        self._socket = websocket.create_connection(address, timeout=TIMEOUT_S, suppress_origin=True)
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End the browser."""
        self._session = None
        self.call("Browser.close")
        self._socket.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer; what the browser says in between is kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer.get("result", {})
            self.events.append(answer)

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a file and wait until its script has said that it is ready."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(json.loads(self._socket.recv()))
        self.run(
            "new Promise((done) => { const look = () => {"
            " const state = document.documentElement.dataset.state;"
            " if (state === 'loading') setTimeout(look, 20); else requestAnimationFrame(() => done(state));"
            " }; look(); })"
        )

    def frame(self) -> None:
        """Wait until two frames have been drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def move(self, x: float, y: float) -> None:
        """Put the mouse somewhere."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Press and release the left button."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press and release a key by its name."""
        codes = {"ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39, "Enter": 13, "End": 35, "Home": 36}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes.get(key, 0))

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and refusals by the page's own policy."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown":
                    found.append(json.dumps(params["exceptionDetails"])[:500])
                case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                    found.append(json.dumps(params["args"])[:500])
                case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                    found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """What the page asked for."""
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]


@contextmanager
def open_browser(executable: str, profile: Path) -> Iterator[Page]:
    """A browser with a profile of its own, closed at the end."""
    flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars"
    quiet = "--disable-background-networking --disable-component-update"
    port = [f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
    command = [executable, *flags.split(), *quiet.split(), *port]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            said, address = "", None
            while address is None:
                said += (line := process.stderr.readline())
                assert line, f"the browser ended: {said}"
                address = re.match(r"DevTools listening on (\S+)", line)
            # From here on nobody reads what it writes there, and a full pipe would stop it.
            process.stderr.close()
            with closing(Page(address[1])) as page:
                yield page
            process.wait(TIMEOUT_S)
        finally:
            process.kill()
