"""Measures the latency that the gateway adds to an answer, with many concurrent sessions and an engine that only waits.

    python benchmarks/gateway.py [--api chat] [--sessions 1000] [--turns 4] [--seconds 10] [--tokens 128] [--json FILE]

Each session is an agent that requests OpenAI's chat completions (or, with `--api messages`, Anthropic's messages) over
its own connection, calls a tool in each turn and sends the whole conversation back. The simulated engine answers after
--seconds with --tokens tokens of the tiny model's tokenizer. The renderer of the `chatml` template renders the prompts
and extends them from turn to turn. The agents run in a separate process, start evenly spread over the first --seconds,
and send the next request immediately. The reported latency is the time until the agent has an answer, minus --seconds,
over all answers except the first of each session. It includes the delay of the engine's timer, which runs on the same
event loop. Garbage collection and memory allocation are tuned as in a run (roll/system/step_memory.py).

The same agents then call a plain aiohttp server that waits for the same time and sends one fixed answer. The difference
between the two is due to the gateway. With other work on the machine, both have to wait for the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from benchmarks import launch
from examples.tiny.make_model import build_tokenizer
from roll.agents.gateway.server import Gateway, GatewayBounds
from roll.agents.gateway.session import AgentSession, SessionBounds
from roll.data.renderers.base import ChatRenderer
from roll.data.renderers.families import chat_renderer
from roll.system.step_memory import collect_rarely, memory_of_steps
from roll.types import AskedPictures, Completion, FinishReason, Ints, NumberedCompletions, Sampling, Session

LOOPBACK = "127.0.0.1"
CONTEXT_TOKENS = 1 << 20
REQUEST_SECONDS = 600.0
SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the documents.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
FIRST = [
    {"role": "system", "content": "You answer questions with a tool." * 8},
    {"role": "user", "content": "Which is it?" * 16},
]
ANSWER = "The document says that it is so. " * 8


@dataclass(frozen=True)
class Api:
    """How an agent speaks one of the gateway's APIs."""

    path: str
    asked: Mapping[str, Any]
    """Keys of a request, apart from its messages."""
    goes_on: Callable[[Any], list[Any]]
    """Returns the messages that follow an answer: the policy's, and those with the answers of its calls."""
    plain: Mapping[str, Any]
    """The answer of the plain server."""


def after_chat(said: Any) -> list[Any]:
    """See `Api.goes_on`."""
    message = said["choices"][0]["message"]
    calls = message["tool_calls"]
    return [message, *({"role": "tool", "tool_call_id": call["id"], "content": ANSWER} for call in calls)]


def after_message(said: Any) -> list[Any]:
    """See `Api.goes_on`."""
    calls = [block["id"] for block in said["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call, "content": ANSWER} for call in calls]
    said = {"role": "assistant", "content": said["content"]}
    return [said, *([{"role": "user", "content": results}] if results else [])]


FUNCTION = SCHEMA["function"]
TOOL = {"name": "search", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
TEXT = "so " * 40
APIS = {
    "chat": Api(
        "chat/completions",
        {"tools": [SCHEMA]},
        after_chat,
        {"choices": [{"message": {"role": "assistant", "content": TEXT, "tool_calls": []}}]},
    ),
    "messages": Api(
        "messages",
        {"tools": [TOOL], "max_tokens": 1 << 20},
        after_message,
        {"content": [{"type": "text", "text": TEXT}]},
    ),
}


class WaitingEngine:
    """An engine that answers after `seconds` with `tokens` tokens: filler text and a tool call."""

    def __init__(self, renderer: ChatRenderer, tokenizer: Any, seconds: float, tokens: int) -> None:
        call = '<tool_call>\n{"name": "search", "arguments": {"query": "it"}}\n</tool_call>'
        written = tokenizer.encode(call, add_special_tokens=False)
        filling = tokenizer.encode("so " * tokens, add_special_tokens=False)[: max(0, tokens - len(written) - 1)]
        [end, *_] = sorted(renderer.stop_token_ids)
        self._ids = np.array([*filling, *written, end], np.int32)
        self._seconds = seconds

    async def generate(
        self,
        token_ids: Ints,
        sampling: Sampling,
        seed: int | None = None,
        session: Session | None = None,
        shown: AskedPictures | None = None,
    ) -> AsyncGenerator[NumberedCompletions, None]:
        """See `Generator`."""
        await asyncio.sleep(self._seconds)
        count = len(self._ids)
        log_probs, versions = np.zeros(count, np.float32), np.zeros(count, np.int32)
        yield [(0, Completion(self._ids, log_probs, versions, FinishReason.STOP, ""))]


async def serve(options: argparse.Namespace) -> dict[str, float]:
    """Let all agents call the gateway and then a plain server. Return the figures of both."""
    tokenizer = build_tokenizer()
    renderer = chat_renderer(tokenizer, "tiny", "chatml")
    engine = WaitingEngine(renderer, tokenizer, options.seconds, options.tokens)
    gateway, bounds = Gateway(GatewayBounds(1 << 26, options.sessions)), SessionBounds(options.turns, CONTEXT_TOKENS)
    sampling = Sampling(max(options.tokens, 256))
    async with gateway.listening(LOOPBACK, 0), AsyncExitStack() as stack:
        sessions = [AgentSession(engine, renderer, sampling, bounds, None, time.time) for _ in range(options.sessions)]
        keys = [await stack.enter_async_context(gateway.serving(session)) for session in sessions]
        found = await measured(gateway.base_url, keys, options)
    paths = {len(session.episode(session.stop, 0.0, "").trajectories) for session in sessions}
    assert paths == {1}, "a session that continues its history has one trajectory"
    async with plain_server(options.seconds, APIS[options.api]) as base_url:
        plain = await measured(base_url, keys, options)
    return found | {f"plain_{name}": value for name, value in plain.items()}


@asynccontextmanager
async def plain_server(seconds: float, api: Api) -> AsyncGenerator[str, None]:
    """Run a server that waits and then sends a fixed answer. Yield its base URL."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(seconds)
        return web.json_response(api.plain)

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post(f"/v1/{api.path}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, LOOPBACK, 0).start()
        yield f"http://{LOOPBACK}:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def measured(base_url: str, keys: Sequence[str], options: argparse.Namespace) -> dict[str, float]:
    """Run the agents in their own process and return the figures."""
    command = (sys.executable, "-m", "benchmarks.gateway", "--agents", base_url, "--api", options.api)
    told = json.dumps({"keys": keys, "turns": options.turns, "seconds": options.seconds}).encode()
    agents = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    cpu = time.process_time()
    try:
        async with asyncio.timeout(REQUEST_SECONDS + 4 * options.turns * options.seconds):
            said, _ = await agents.communicate(told)
    finally:
        if agents.returncode is None:
            agents.kill()
            await agents.wait()
    return figures(json.loads(said), time.process_time() - cpu, options)


async def ask(base_url: str, keys: Sequence[str], turns: int, seconds: float, api: Api) -> list[list[float]]:
    """Run the agents. Return the seconds of each answer, by session."""
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as client:

        async def one(number: int, key: str) -> list[float]:
            await asyncio.sleep(seconds * number / len(keys))
            messages: list[Any] = list(FIRST)
            taken = []
            for _ in range(turns):
                body, began = json.dumps({"messages": messages, **api.asked}), time.perf_counter()
                headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
                async with client.post(f"{base_url}/{api.path}", data=body, headers=headers) as answer:
                    said = await answer.read()
                taken.append(time.perf_counter() - began)
                assert answer.status == 200, said
                messages += api.goes_on(json.loads(said))
            return taken

        return await asyncio.gather(*(one(number, key) for number, key in enumerate(keys)))


def figures(taken: Sequence[Sequence[float]], cpu_seconds: float, options: argparse.Namespace) -> dict[str, float]:
    """Return the milliseconds that the server adds to an answer, the CPU milliseconds per request, and the number of
    requests.
    """
    added = 1000 * (np.array([times[1:] for times in taken]).ravel() - options.seconds)
    requests = sum(map(len, taken))
    return {
        "requests": requests,
        "added_p50_ms": float(np.percentile(added, 50)),
        "added_p99_ms": float(np.percentile(added, 99)),
        "added_max_ms": float(added.max()),
        "cpu_ms_per_request": 1000 * cpu_seconds / requests,
    }


def main() -> int:
    """Measure, print, and write JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api", choices=APIS, default="chat")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--agents", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.agents:
        told = json.load(sys.stdin)
        collect_rarely()
        given = told["keys"], told["turns"], told["seconds"], APIS[options.api]
        json.dump(asyncio.run(ask(options.agents, *given)), sys.stdout)
        return 0
    with memory_of_steps():
        found = asyncio.run(serve(options))
    for name, value in found.items():
        print(f"{name:26} {value:10.2f}")
    launch.write(found, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
