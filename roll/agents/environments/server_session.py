"""One session of a server of OpenEnv: a WebSocket, requests one after another, and answers that are checked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from roll.agents.environments.checked import MOST_REPLY
from roll.agents.tools import MOST_ERROR
from roll.errors import EnvironmentFailed

CLOSE_SECONDS = 2.0
"""Seconds that the server has to end a session, and then the connection. Its place is free for another one
afterwards.
"""
VALIDATION_ERROR = "VALIDATION_ERROR"
"""Code of the answer to an action that is none."""
Kind = Literal["reset", "step"]


class UnreadableAction(Exception):
    """The policy's text is no action of the server. `str()` is the reason, for the policy."""

    def __init__(self, reason: str, errors: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(reason)
        self.errors = errors
        """The server's errors, as pydantic lists them."""


@dataclass(frozen=True)
class Answer:
    """What the server answered to `reset` or `step`."""

    observation: Mapping[str, Any]
    reward: float | None
    """None if the environment gave none."""
    done: bool


class ServerSession:
    """A connection to `<base_url>/ws`. The caller sets the deadline of each call, by cancelling it."""

    def __init__(self, base_url: str, key: str | None) -> None:
        """`key` is sent as `Authorization: Bearer`."""
        self._url, self._key = f"{base_url.rstrip('/')}/ws", key
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reading: asyncio.Task[None] | None = None
        self._received: asyncio.Queue[str | None] = asyncio.Queue()
        self._why = ""

    async def open(self) -> None:
        """Connect. Raises EnvironmentFailed if the server does not accept the connection."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._client = aiohttp.ClientSession(headers=headers)
        try:
            self._socket = await self._client.ws_connect(self._url, max_msg_size=MOST_REPLY)
        except aiohttp.ClientError as error:
            raise EnvironmentFailed(f"{self._url} does not accept a session: {error}") from error
        self._reading = asyncio.create_task(self._read(self._socket))

    async def ask(self, kind: Kind, given: Mapping[str, Any]) -> Answer:
        """Send a request, and return the answer.

        Raises:
            UnreadableAction: the server refuses the action of a `step`.
            EnvironmentFailed: the session has ended, or the answer is an error or malformed.
        """
        assert self._socket is not None, "the session is open"
        # A refused session is told by an error before any request, and closed: then the request is not sent.
        with suppress(ConnectionError):
            await self._socket.send_str(json.dumps({"type": kind, "data": dict(given)}))
        text = await self._received.get()
        if text is None:
            self._received.put_nowait(None)
            raise EnvironmentFailed(f"{self._url} has ended the session{self._why}")
        return answer_of(kind, text)

    async def close(self) -> None:
        """End the session, and wait until the server has ended it, too: at most twice CLOSE_SECONDS."""
        try:
            if self._socket is not None and self._reading is not None:
                with suppress(ConnectionError):
                    await self._socket.send_str(json.dumps({"type": "close"}))
                await asyncio.wait({self._reading}, timeout=CLOSE_SECONDS)
                self._reading.cancel()
                await asyncio.wait({self._reading})
                with suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_SECONDS):
                        await self._socket.close()
        finally:
            if self._client is not None:
                await self._client.close()

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Keep the answers until they are asked for. Pings are answered meanwhile, also while the policy thinks."""
        try:
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    self._why = f": it sent {message.type.name}, {message.data!r:.100}"
                    break
                self._received.put_nowait(message.data)
        finally:
            if not self._why and socket.close_code is not None:
                self._why = f" (status {socket.close_code})"
            self._received.put_nowait(None)


def answer_of(kind: Kind, text: str) -> Answer:
    """Return the answer in a message of the server. Raises as `ServerSession.ask` does."""
    try:
        said = json.loads(text)
        form, told = said["type"], said["data"]
        if form == "error":
            code, reason, errors = told.get("code"), str(told.get("message")), told.get("errors") or ()
            if code == VALIDATION_ERROR and kind == "step":
                raise UnreadableAction("; ".join(map(_said, errors)), errors)
            raise EnvironmentFailed(f"the server answers {kind} with the error {code}: {reason[:MOST_ERROR]}")
        observation, reward, done = told["observation"], told.get("reward"), told.get("done", False)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentFailed(f"the server's answer to {kind} is malformed: {text:.100}") from error
    if not isinstance(observation, dict) or not isinstance(done, bool) or not isinstance(reward, int | float | None):
        raise EnvironmentFailed(f"the server's answer to {kind} is malformed: {text:.100}")
    return Answer(observation, None if reward is None else float(reward), done)


def _said(error: Mapping[str, Any]) -> str:
    """Return one of pydantic's errors as text: where, and what."""
    return f"{'.'.join(map(str, error.get('loc') or ()))}: {error.get('msg')}"
