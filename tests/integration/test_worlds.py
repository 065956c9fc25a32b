"""Environments of other packages with the real engines: Gymnasium's, and those on a server of OpenEnv."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import limits
from tests.integration.conftest import TINY, Outcome, World
from tests.unit.environments.openenv_server import EchoServer, observed

pytestmark = [pytest.mark.engines, pytest.mark.full]
EPISODES = 128
"""Episodes of a step: 16 tasks with 8 each."""
AGENT = "output/tiny/agent-model"
WARM_UP = ("pretrain=output/tiny/agent-model", "prompt_length=32", "sft_train.data_args.template=native")
"""What `tiny_blackjack.yaml` says of its policy."""


@pytest.fixture(scope="module")
def chatting(world: World) -> World:
    """Return the world with the policy of `tiny_blackjack`, which answers sums in a chat, after a shorter warm-up."""
    make = [sys.executable, str(TINY / "make_model.py"), AGENT, "--agent"]
    subprocess.run(make, cwd=world.folder, check=True, timeout=limits.PROCESS)
    warm = ("--config-name", "tiny/tiny_warm_up", *WARM_UP, "output_dir=output/blackjack-warm-up", "max_steps=60")
    outcome = world.run(*warm)
    assert outcome.status == 0, outcome.output
    return world


def run(world: World, name: str, *overrides: str) -> Outcome:
    """Run one step of `tiny_blackjack`."""
    short = ("max_steps=1", "eval_steps=0", "~validation", "+actor_infer.system_envs={TORCHDYNAMO_DISABLE: '1'}")
    return world.run("--config-name", "tiny/tiny_blackjack", f"output_dir={name}", *short, *overrides)


def episodes(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "samples.jsonl").read_text().splitlines()
    return [response for line in lines for response in json.loads(line)["responses"]]


@contextmanager
def serving(server: EchoServer) -> Iterator[str]:
    """Serve in a thread, and return the base URL."""
    loop, urls = asyncio.new_event_loop(), list[str]()
    begun, over = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with server.serving() as url:
            urls.append(url)
            begun.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert begun.wait(limits.CALL)
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(limits.END)
        loop.close()


def said(response: Mapping[str, Any]) -> list[str]:
    """Return the texts of the policy's turns."""
    [path] = response["trajectories"]
    return [segment["text"].strip() for segment in path["segments"] if segment["role"] == "assistant"]


def test_blackjack_of_gymnasium_is_played(chatting: World, leaves_nothing: Callable[[], None]) -> None:
    outcome = run(chatting, "blackjack")
    assert outcome.status == 0, outcome.output
    leaves_nothing()
    _, line = chatting.metrics("blackjack")
    assert line["episode/environment_failed_fraction"] == 0 == line["episode/retried"]
    assert line["reward/scored_fraction"] == 1 and line["mismatch/logprob_abs_diff_mean"] < 1e-4
    assert 0 < line["environment/blackjack/terminated"] == line["episode/completed_fraction"]
    assert line["environment/blackjack/truncated"] == 0
    rewards = {response["reward"] for response in episodes(chatting.folder / "blackjack")}
    assert rewards <= {-1.0, 0.0, 1.0} and -1.0 in rewards


class Breaking(EchoServer):
    """Asks for one sum in an episode, and hangs up at every twentieth request."""

    def _usual(self, kind: str, given: Mapping[str, Any]) -> Any:
        if len(self.asked) % 20 == 0:
            return "leave"
        if kind == "reset":
            return observed(echoed_message="3+4=")
        return super()._usual(kind, given) if given["message"] == "" else observed(len(given["message"]) / 10, True)


def test_a_server_is_played_though_it_breaks(chatting: World, leaves_nothing: Callable[[], None]) -> None:
    server = Breaking(room=EPISODES)
    with serving(server) as url:
        args = f"{{base_url: '{url}', action_field: message, observation_field: echoed_message}}"
        room = f"rows: 64, attempts: 4, sessions_per_process: {EPISODES}, step_timeout: {limits.CALL}"
        keys = f"{{environment: openenv, environment_args: {args}, {room}}}"
        outcome = run(chatting, "served", "~environments", f"+environments={{sums: {keys}}}")
        assert outcome.status == 0, outcome.output
        limits.until(lambda: server.open == 0, "the server has no session", limits.END)
    leaves_nothing()
    _, line = chatting.metrics("served")
    assert line["episode/retried"] >= 1 and line["episode/crashed"] >= 1
    assert line["reward/scored_fraction"] == 1 and line["episode/environment_failed_fraction"] == 0
    assert server.most > 8 and line["policy/grad_norm"] > 0 and line["episode/completed_fraction"] > 0.5
    for response in episodes(chatting.folder / "served"):
        assert response["reward"] == pytest.approx(next((len(text) / 10 for text in said(response) if text), 0.0))
