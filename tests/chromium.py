"""A Chromium without a window, driven as a person would: by clicks and keys."""

import asyncio
import base64
import contextlib
import itertools
import pathlib
import shutil
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from tests.waiting import PATIENCE, wait_until

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")


class Tab:
    """A page, by the DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        """Use `opened`."""
        self._socket = socket
        self._numbers = itertools.count()
        self._loads = 0

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol; returns its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        await self._socket.send_json(message)
        while True:
            said = await self._receive()
            if said.get("id") == number:
                assert "error" not in said, (method, said)
                return said["result"]

    async def go(self, url: str) -> None:
        """Opens an address, and waits until it is loaded."""
        self._loads = 0
        await self.call("Page.navigate", url=url)
        await self.loaded()

    async def loaded(self) -> None:
        """Waits for the page that a click or an address has asked for."""
        while not self._loads:
            await self._receive()

    async def value(self, script: str) -> Any:
        found = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def texts(self, selector: str) -> list[str]:
        """Returns the texts of elements as they are shown."""
        script = f"[...document.querySelectorAll({selector!r})].map(e => e.innerText)"
        return await self.value(script)

    async def click(self, selector: str) -> None:
        """Clicks in the middle of an element; `loaded` waits for what follows."""
        self._loads = 0
        box = await self.value(
            f"(e => {{ e.scrollIntoView(); const b = e.getBoundingClientRect(); "
            "return [b.x + b.width / 2, b.y + b.height / 2] })"
            f"(document.querySelector({selector!r}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent",
                **{"type": kind, "x": box[0], "y": box[1]},
                **{"button": "left", "clickCount": 1},
            )

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def picture(self, path: pathlib.Path) -> None:
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    async def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        await self.call("Emulation.setDeviceMetricsOverride", **size, mobile=False)

    async def _receive(self) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE):
            said = await self._socket.receive_json()
        self._loads += said.get("method") == "Page.loadEventFired"
        return said


@contextlib.asynccontextmanager
async def opened(folder: pathlib.Path) -> AsyncIterator[Tab]:
    """Starts a browser with a profile in `folder`; yields its first tab."""
    assert PROGRAM is not None
    arguments = [
        *("--headless=new", "--remote-debugging-port=0", f"--user-data-dir={folder}"),
        *("--no-sandbox", "--no-first-run", "--no-proxy-server", "--disable-gpu"),
        "about:blank",
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([PROGRAM, *arguments], **quiet) as process:
        try:
            said = folder / "DevToolsActivePort"
            wait_until(lambda: said.exists() and len(said.read_text().split()) == 2)
            where = f"http://127.0.0.1:{said.read_text().split()[0]}/json"
            async with aiohttp.ClientSession() as session:
                async with session.get(where) as response:
                    (page,) = [p for p in await response.json() if p["type"] == "page"]
                socket = session.ws_connect(
                    page["webSocketDebuggerUrl"], max_msg_size=0
                )
                async with socket as connected:
                    tab = Tab(connected)
                    await tab.call("Page.enable")
                    yield tab
        finally:
            process.kill()
