"""An MCP server for tests. `mcp_server.py` communicates over stdin and stdout, `mcp_server.py PORT` over HTTP."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("numbers")


@server.tool()
def double(number: int) -> str:
    """Double a number."""
    return str(2 * number)


@server.tool()
def whoami() -> str:
    """Return the server's process id."""
    return str(os.getpid())


@server.tool()
def falls(number: int) -> str:
    """Fail."""
    raise ToolError(f"no {number} here")


@server.tool()
async def waits() -> str:
    """Never answer."""
    await asyncio.Event().wait()
    return ""


@server.tool()
def ends() -> str:
    """End the process."""
    os._exit(3)


if __name__ == "__main__":
    server.run("streamable-http", port=int(sys.argv[1])) if len(sys.argv) > 1 else server.run("stdio")
