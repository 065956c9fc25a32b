"""A server with the protocol of OpenEnv's WebSocket, which can fail in many ways. `benchmarks/worlds.py` plays the real
one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer

Answers = Mapping[str, Any]
TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {"a": {}, "b": {}}}}


def observed(reward: float | None = None, done: bool = False, **fields: Any) -> Answers:
    return {"type": "observation", "data": {"observation": fields, "reward": reward, "done": done}}


def failed(code: str, message: str, **more: Any) -> Answers:
    return {"type": "error", "data": {"code": code, "message": message, **more}}


def refused(kind: str, field: str, message: str) -> Answers:
    """Return the answer to an action with one field that pydantic refuses."""
    return failed("VALIDATION_ERROR", "Invalid message", errors=[{"type": kind, "loc": [field], "msg": message}])


class EchoServer:
    """Echoes `message`, and knows the tool `add`. Counts its sessions, and records what it was asked."""

    def __init__(self, room: int = 99, told: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            room: largest number of sessions at a time.
            told: by type of request: an answer, a text, or "leave" and "hang", in place of the usual answer.
        """
        self.open, self.most, self.closed, self._room, self._told = 0, 0, 0, room, dict(told or {})
        self.asked: list[Any] = []
        self.headers: list[Mapping[str, str]] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve, and return the base URL."""
        app = web.Application()
        app.router.add_get("/ws", self._session)
        async with TestServer(app) as server:
            yield str(server.make_url("")).rstrip("/")

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        self.headers.append(request.headers)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.open >= self._room:
            await socket.send_json(failed("CAPACITY_REACHED", "no room"))
            await socket.close()
            return socket
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await self._answer_all(socket)
        finally:
            self.open -= 1
            await socket.close()
        return socket

    async def _answer_all(self, socket: web.WebSocketResponse) -> None:
        async for message in socket:
            assert message.type is WSMsgType.TEXT
            request = json.loads(message.data)
            self.asked.append(request)
            if request["type"] == "close":
                self.closed += 1
                if self._told.get("close") == "hang":
                    await asyncio.sleep(3600)
                return
            answer = self._told.get(request["type"]) or self._usual(request["type"], request.get("data") or {})
            if answer == "leave":
                return
            if answer == "hang":
                await asyncio.sleep(3600)
            await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))

    def _usual(self, kind: str, given: Mapping[str, Any]) -> Answers:
        if kind == "reset":
            return observed(echoed_message=f"Ready for {given['seed']}", metadata={"at": len(self.asked)})
        if given.get("type") == "list_tools":
            return observed(tools=[TOOL])
        if given.get("type") == "call_tool":
            if given["tool_name"] != "add":
                return observed(
                    0.0, tool_name="sub", result=None, error={"error_type": "tool_not_found", "message": "no"}
                )
            total = given["arguments"]["a"] + given["arguments"]["b"]
            result = {"content": [{"type": "text", "text": str(total)}], "is_error": False}
            return observed(0.5, total > 9, tool_name="add", result=result, error=None)
        if "message" not in given:
            return refused("missing", "message", "Field required")
        if given["message"] == "":
            return refused("string_too_short", "message", "too short")
        return observed(len(given["message"]) / 10, given["message"] == "bye", echoed_message=given["message"])
