"""A seeded run on vLLM servers outside the run has the metrics of a run with engines of its own, also if a server is
killed. One that is started again takes part again.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests import limits
from tests.engines.outside import end_server, free_port, start_server, wait_for_server
from tests.integration.conftest import World

pytestmark = [pytest.mark.engines, pytest.mark.full]
STEPS, UPDATES = 4, 2
"""Steps of a run, and updates of a step."""
SYNCED = ("weight_sync.lora=merged", "weight_sync.bucket_mib=1")
SIZES = ("--max-model-len=24", "--max-num-seqs=512")
STRATEGY = "actor_infer.strategy_args"


@dataclass
class Servers:
    """Two servers of one model, and their addresses."""

    model: Path
    folder: Path
    ports: tuple[int, int]
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def start(self, number: int) -> None:
        """Start a server. It does not answer yet."""
        log = self.folder / f"server{number}.log"
        self.running[number] = start_server(self.model, self.ports[number], log, SIZES)

    def until_answers(self, number: int) -> None:
        wait_for_server(self.running[number], self.urls[number], self.folder / f"server{number}.log")

    def kill(self, number: int) -> None:
        end_server(self.running[number])

    def version(self, number: int) -> str:
        """Return what a server says of its weights."""
        return str(httpx.get(f"{self.urls[number]}/weight_info", trust_env=False).json()["weight_version"])

    def generated(self, number: int) -> float:
        """Return the number of tokens that a server has sampled since it was started."""
        text = httpx.get(f"{self.urls[number]}/metrics", trust_env=False).text
        counts = re.findall(r"^vllm:generation_tokens_total\S* (\S+)$", text, re.MULTILINE)
        return sum(map(float, counts))

    def overrides(self) -> tuple[str, ...]:
        """Return the overrides that let the servers generate."""
        block = f"{{base_urls: [{', '.join(self.urls)}], max_num_seqs: 512}}"
        chosen = (f"{STRATEGY}.strategy_name=vllm_server", f"~{STRATEGY}.strategy_config")
        return (*chosen, f"+{STRATEGY}.strategy_config={block}", "~actor_infer.world_size", "~actor_infer.system_envs")


@pytest.fixture
def servers(world: World, tmp_path: Path) -> Iterator[Servers]:
    both = Servers(world.folder / "warm" / "export", tmp_path, (free_port(), free_port()))
    with ExitStack() as stack:
        for number in (0, 1):
            both.start(number)
            stack.callback(lambda number=number: both.kill(number))
        for number in (0, 1):
            both.until_answers(number)
        yield both


@pytest.fixture(scope="module")
def of_own_engines(world: World) -> str:
    """Return the name of a run with two engines of its own."""
    outcome = world.run(*world.rlvr("inside", f"max_steps={STEPS}", *SYNCED, "actor_infer.world_size=2"))
    assert outcome.status == 0, outcome.output
    return "inside"


def test_servers_generate_what_own_engines_do(world: World, of_own_engines: str, servers: Servers) -> None:
    """One is killed amid the run: its samples start again on the other."""
    arguments = world.rlvr("outside", f"max_steps={STEPS}", *SYNCED, *servers.overrides())
    process = world.start(*arguments)
    world.wait_for_step("outside", 1, process)
    assert servers.version(0).endswith(f":{UPDATES}")
    servers.kill(1)
    outcome = world.wait(process)
    assert outcome.status == 0, outcome.output
    assert f"rank 1 leaves the pool: {servers.urls[1]}" in outcome.output, outcome.output
    world.assert_same_steps("outside", of_own_engines)
    assert world.metrics("outside")[-1]["engine/healthy"] == 1
    assert servers.version(0).endswith(f":{STEPS * UPDATES}")


def test_server_that_returns_gets_weights_and_requests(world: World, servers: Servers) -> None:
    process = world.start(*world.rlvr("returned", "max_steps=1000", *SYNCED, *servers.overrides(), "validation=null"))
    world.wait_for_step("returned", 1, process)
    servers.kill(1)
    servers.start(1)
    servers.until_answers(1)
    began = servers.version(1)

    def generates() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return servers.version(1) != began and servers.generated(1) > 0

    limits.until(generates, "the second server has weights of the run and generates", limits.RUN)
    world.wait_for_step("returned", len(world.metrics("returned")) + 1, process)
    assert world.metrics("returned")[-1]["engine/healthy"] == 2
    process.send_signal(signal.SIGTERM)
    outcome = world.wait(process)
    assert f"rank 1 leaves the pool: {servers.urls[1]}" in outcome.output, outcome.output
