"""Tools of MCP servers (Model Context Protocol). Each episode starts the servers or connects to them, and closes them
at its end.

The MCP library requires that the task that opened a connection also closes it, but each call of an environment is a
separate task. Therefore one dedicated task opens the connections, holds them during the episode and closes them.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import anyio
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client import Transport
from mcp.shared.message import SessionMessage
from mcp.types import CONNECTION_CLOSED, CallToolResult, ImageContent, TextContent, jsonrpc_message_adapter
from pydantic import ValidationError

from roll.agents.environments.checked import McpServer
from roll.agents.tool_failures import note_failed
from roll.agents.tools import Answered, CallError, answered, failed_call
from roll.errors import EnvironmentFailed
from roll.system.text import cleaned

LEFT_OUT = "[a part of type {} is left out]"


class McpTools:
    """The tools of all servers of a domain, by name."""

    def __init__(self, servers: Sequence[McpServer], sees: bool = False) -> None:
        """`sees`: the policy sees pictures. Otherwise those in answers are left out, with a note to the model."""
        self._servers, self._sees = servers, sees
        self._clients: dict[str, tuple[McpServer, Client]] = {}
        self.schemas: list[Mapping[str, Any]] = []
        """Schemas of all tools in the format of OpenAI's API; available after `open`."""
        self._closing = asyncio.Event()
        self._holding: asyncio.Task[None] | None = None

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all tools."""
        return frozenset(self._clients)

    async def open(self) -> None:
        """Connect to all servers and list their tools. Raises EnvironmentFailed if one fails, or names are equal."""
        opened = asyncio.get_running_loop().create_future()
        self._holding = asyncio.create_task(self._hold(opened))
        await asyncio.wait({opened, self._holding}, return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            self._holding.result()  # raises an unexpected error
        opened.result()

    async def answer(self, call: Mapping[str, Any]) -> Answered:
        """Call a tool and return its answer. An error of the tool or a timeout is reported to the model as the answer.

        Raises:
            EnvironmentFailed: the server has ended.
        """
        name, server, client = call["function"]["name"], *self._clients[call["function"]["name"]]
        try:
            async with asyncio.timeout(server.call_timeout):
                result = await client.call_tool(name, json.loads(call["function"]["arguments"] or "{}"))
        except TimeoutError:
            late = f"did not answer within call_timeout, {server.call_timeout:g} s"
            note_failed(name, f"{server} timed out", f"{server} {late}")
            return failed_call(call, CallError(f"'{name}' {late}"))
        except (anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            raise EnvironmentFailed(f"{server} has ended") from error
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise EnvironmentFailed(f"{server} has ended: {error}") from error
            note_failed(name, f"{server} refused a call", f"{server} refused a call: {error}")
            return failed_call(call, CallError(str(error)))
        if result.is_error or not self._sees or not any(isinstance(part, ImageContent) for part in result.content):
            text = result_text(result)
            if not result.is_error:
                return answered(call, text)
            note_failed(name, f"{server} answered with an error", f"{server} answered with an error: {text}")
            return failed_call(call, CallError(text))
        try:
            return answered(call, [_part(part) for part in result.content])
        except CallError as error:
            return failed_call(call, error)

    async def close(self) -> None:
        """Close all connections and end the servers that were started."""
        if self._holding is not None:
            self._closing.set()
            await asyncio.wait({self._holding})

    async def _hold(self, opened: asyncio.Future[None]) -> None:
        async with AsyncExitStack() as stack:
            for server in self._servers:
                try:
                    client = await stack.enter_async_context(Client(_target(server)))
                    await self._list(server, client)
                except (MCPError, OSError, anyio.ClosedResourceError, ExceptionGroup) as error:
                    opened.set_exception(EnvironmentFailed(f"{server} cannot be started or reached: {error!r:.300}"))
                    return
                except EnvironmentFailed as failed:
                    opened.set_exception(failed)  # if it were raised here, the exit stack would wrap it
                    return
            opened.set_result(None)
            await self._closing.wait()

    async def _list(self, server: McpServer, client: Client) -> None:
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                if tool.name in self._clients:
                    raise EnvironmentFailed(f"two tools are named '{tool.name}'; one of them belongs to {server}")
                self._clients[tool.name] = (server, client)
                function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                self.schemas.append({"type": "function", "function": function})
            if (cursor := page.next_cursor) is None:
                return


def result_text(result: CallToolResult) -> str:
    """Return the text of a result. Each part that is not text is replaced by a note with its type."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(
        part.text if isinstance(part, TextContent) else LEFT_OUT.format(part.type) for part in result.content
    )


def _part(part: Any) -> Any:
    """Return a part of a result as a picture or a text."""
    if isinstance(part, ImageContent):
        return {"type": "image", "base64": part.data}
    return part.text if isinstance(part, TextContent) else LEFT_OUT.format(part.type)


def _target(server: McpServer) -> Transport | str:
    if server.url is not None:
        return server.url
    program, *rest = server.command
    return _cleaned_stdio(
        StdioServerParameters(command=program, args=rest, env=dict(os.environ), encoding_error_handler="replace")
    )


@asynccontextmanager
async def _cleaned_stdio(server: StdioServerParameters) -> AsyncGenerator[tuple[Any, Any]]:
    """Connect to a server over its pipes. Lines that the library refuses for half a surrogate pair are cleaned.

    Otherwise the library would leave them out, and a call would wait for its answer until it times out.
    """
    async with stdio_client(server) as (incoming, outgoing):
        yield _CleanedStream(incoming), outgoing


class _CleanedStream:
    """A stream of a server's messages. Refused lines arrive as exceptions that hold the line."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def receive(self) -> SessionMessage | Exception:
        return _cleaned_message(await self._stream.receive())

    def __aiter__(self) -> _CleanedStream:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        return _cleaned_message(await anext(self._stream))

    async def __aenter__(self) -> _CleanedStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._stream.aclose()


def _cleaned_message(received: SessionMessage | Exception) -> SessionMessage | Exception:
    """Return the message of a line that was refused, if its texts can be cleaned; otherwise what was received."""
    if isinstance(received, ValidationError) and isinstance(line := received.errors()[0]["input"], str):
        with suppress(ValueError, RecursionError):  # the line is no message at all
            return SessionMessage(jsonrpc_message_adapter.validate_python(cleaned(json.loads(line)), by_name=False))
    return received
