"""A chat-completions server that answers or fails as the test specifies. It uses real sockets in the event loop of the
test.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Response:
    """Response of the server to one request."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    hangs: bool = False
    """Whether the server never answers, and keeps the connection open until its own end."""
    cut: bool = False
    """Whether the server closes the connection in the middle of the response."""


Behaviour = Callable[[dict[str, Any], int], Response]
"""Maps the body of a request and its number, counted from 0, to the response."""


@dataclass
class ChatServer:
    """The URL of the server, and the requests that it received."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    open_requests: int = 0
    most_open: int = 0


def completion(*answers: str, prompt_tokens: int = 7, completion_tokens: int = 3) -> Response:
    """Return a successful response with one choice per answer."""
    choices = [
        {"index": index, "message": {"role": "assistant", "content": answer}} for index, answer in enumerate(answers)
    ]
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return Response(body=json.dumps({"object": "chat.completion", "choices": choices, "usage": usage}).encode())


def error(status: int, message: str, **headers: str) -> Response:
    """Return an error response in the format of OpenAI."""
    return Response(status, json.dumps({"error": {"message": message}}).encode(), headers)


@asynccontextmanager
async def chat_server(behaviour: Behaviour) -> AsyncIterator[ChatServer]:
    """Run the server until the end of the context."""
    seen = ChatServer()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await _serve(seen, behaviour, reader, writer):
                pass
        except (asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            pass  # the client or the test has ended
        finally:
            writer.close()

    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(one(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    seen.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield seen
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


async def _serve(
    seen: ChatServer, behaviour: Behaviour, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    """Serve one request. Return whether the connection stays open for another one."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    request, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = json.loads(await reader.readexactly(int(headers["content-length"])))
    assert request.startswith("POST /v1/chat/completions ")
    number = len(seen.bodies)
    seen.bodies.append(body)
    seen.headers.append(headers)
    seen.open_requests += 1
    seen.most_open = max(seen.most_open, seen.open_requests)
    try:
        response = behaviour(body, number)
        await asyncio.sleep(0)  # other requests may arrive meanwhile
        if response.hangs:
            await asyncio.Event().wait()
        said = {"content-type": "application/json", "content-length": str(len(response.body)), **response.headers}
        head = (
            f"HTTP/1.1 {response.status} X\r\n"
            + "".join(f"{name}: {value}\r\n" for name, value in said.items())
            + "\r\n"
        )
        whole = head.encode() + response.body
        writer.write(whole[: len(whole) // 2] if response.cut else whole)
        await writer.drain()
        return not response.cut
    finally:
        seen.open_requests -= 1
