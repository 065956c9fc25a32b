"""Controls a headless Chromium through the DevTools protocol."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

START_SECONDS, CALL_SECONDS, END_SECONDS = 60.0, 120.0, 20.0
LARGEST_ANSWER = 1 << 28
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


@dataclass
class Page:
    """A tab."""

    socket: aiohttp.ClientWebSocketResponse
    session: str = ""
    problems: list[str] = field(default_factory=list)
    """Errors in the page's scripts, and its network requests."""
    numbers: count[int] = field(default_factory=count)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Make one call of the protocol and return its result.

        Raises:
            RuntimeError: the call failed.
            TimeoutError: there was no answer within `CALL_SECONDS`.
        """
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params} | (
            {"sessionId": self.session} if self.session else {}
        )
        await self.socket.send_str(json.dumps(message))
        async with asyncio.timeout(CALL_SECONDS):
            while True:
                answer = json.loads(await self.socket.receive_str())
                if answer.get("id") == number:
                    break
                self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    async def evaluate(self, script: str) -> Any:
        """Return the value of an expression. A promise is awaited.

        Raises:
            RuntimeError: the expression threw an exception.
        """
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if details := answer.get("exceptionDetails"):
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    async def press(self, key: str, code: int) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            thrown = params["exceptionDetails"]
            self.problems.append(thrown.get("exception", {}).get("description", thrown["text"]))
        elif event.get("method") == "Network.requestWillBeSent" and not params["request"]["url"].startswith(
            ("file:", "data:", "blob:")
        ):
            self.problems.append(f"network request: {params['request']['url']}")


@asynccontextmanager
async def chromium(program: Path) -> AsyncIterator[Page]:
    """Yield an empty tab of a browser with a temporary profile.

    Raises:
        TimeoutError: the browser does not start within `START_SECONDS`.
    """
    with tempfile.TemporaryDirectory(prefix="roll-pages-", ignore_cleanup_errors=True) as folder:
        command = [str(program), *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port, path = await _listening(Path(folder) / "DevToolsActivePort")
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(f"ws://127.0.0.1:{port}{path}", max_msg_size=LARGEST_ANSWER) as socket,
            ):
                page = Page(socket)
                target = await page.call("Target.createTarget", url="about:blank")
                page.session = (await page.call("Target.attachToTarget", targetId=target["targetId"], flatten=True))[
                    "sessionId"
                ]
                for domain in ("Page", "Runtime", "Network"):
                    await page.call(f"{domain}.enable")
                yield page
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _listening(file: Path) -> tuple[str, str]:
    """Wait for the browser's file and return the port and path in it."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            lines = file.read_text().splitlines() if file.is_file() else []
            if len(lines) == 2:
                return lines[0], lines[1]
            await asyncio.sleep(0.05)
