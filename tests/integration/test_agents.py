"""Episodes in environments with the real engines: the run trains on the tokens that the engine saw, and survives broken
environments.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import limits
from tests.integration.conftest import World

pytestmark = pytest.mark.engines
WORLDS = '''
import os
import signal
import time

from roll.agents.environments.base import Observation, Step


class Asks:
    """Two turns about a sum. Each answer earns half its fraction of digits.

    With `trouble`, some tasks break in the last step.
    """

    def __init__(self, trouble: bool = False) -> None:
        self._trouble = trouble

    def reset(self, row, seed):
        self._row, self._asked = row, 0
        return Observation([{"role": "user", "content": row["prompt"]}])

    def step(self, message):
        self._asked += 1
        said = str(message["content"])
        earned = sum(letter in "0123456789" for letter in said) / max(len(said), 1) / 2
        if self._asked == 2 and self._trouble:
            self._break(self._row["prompt"][:3])
        return Step([{"role": "user", "content": "ok?"}], earned, self._asked == 2, {"asked": 1.0})

    def _break(self, first):
        if first == "1+1":
            raise RuntimeError("it fell over")
        if first == "2+2":
            time.sleep(1e6)
        if first == "3+3":
            self._held = [bytearray(1 << 28) for _ in range(64)]
        if first == "4+4":
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self):
        pass
'''
BROKEN = ("1+1", "2+2", "3+3", "4+4")


def agent(world: World, name: str, *overrides: str) -> tuple[str, ...]:
    """Return the arguments of a small run whose prompts come from an environment."""
    (world.folder / "worlds.py").write_text(WORLDS)
    return world.rlvr(
        name,
        "~rewards",
        "~reference",
        "use_kl_loss=false",
        "kl_loss_coef=0",
        "+environments={arithmetic: {environment: 'worlds:Asks', max_turns: 4, sessions_per_process: 64}}",
        "prompt_length=32",
        "+sequence_length=64",
        "actor_train.data_args.template=chatml",
        "validation.data_args.template=chatml",
        *overrides,
    )


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_agent_run_trains_on_tokens_of_engine(world: World, leaves_nothing: Callable[[], None]) -> None:
    overrides = ("max_steps=2", "eval_steps=2", "validation.generating_args.num_return_sequences=1")
    outcome = world.run(*agent(world, "agent", *overrides))
    assert outcome.status == 0, outcome.output
    leaves_nothing()
    steps = world.metrics("agent")
    assert [line["step"] for line in steps] == [0, 1, 2]
    for line in steps[1:]:
        assert line["episode/turns_mean"] > 1.5, "most episodes have both turns"
        assert line["mismatch/logprob_abs_diff_mean"] < 1e-4, "the trainer sees what the engine saw, in fp32"
        assert line["episode/forks"] == line["episode/environment_failed_fraction"] == 0 == line["episode/retried"]
        assert line["environment/arithmetic/asked"] == pytest.approx(line["episode/turns_mean"], abs=0.5)
        assert line["policy/grad_norm"] > 0
    assert all("val/heldout/pass@1" in line for line in (steps[0], steps[2]))
    responses = [response for record in samples(world.folder / "agent") for response in record["responses"]]
    several = [
        response["trajectories"][0] for response in responses if len(response["trajectories"][0]["segments"]) == 4
    ]
    assert several, "samples.jsonl has episodes with both turns"
    for path in several:
        roles = [segment["role"] for segment in path["segments"]]
        assert roles == ["environment", "assistant"] * 2
        assert path["segments"][2]["text"].endswith("<|im_start|>user\nok?<|im_end|>\n<|im_start|>assistant\n")
        assert sum(segment["length"] for segment in path["segments"]) <= 64


@pytest.mark.full
def test_broken_environments_do_not_end_an_asynchronous_run(world: World, leaves_nothing: Callable[[], None]) -> None:
    """Environments that raise, hang, exceed their memory or are killed: their groups are replaced, and none of them is
    scored.
    """
    rows = [json.loads(line) for line in (world.folder / "output/tiny/problems/train.jsonl").read_text().splitlines()]
    broken = [row for row in rows if row["prompt"][:3] in BROKEN][:8]
    sound = [row for row in rows if row["prompt"][:3] not in BROKEN][:56]
    (world.folder / "troubled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*broken, *sound]))
    overrides = (
        "max_steps=4",
        "async_generation_ratio=1",
        "actor_train.data_args.file_name=troubled.jsonl",
        "environments.arithmetic.environment_args={trouble: true}",
        "environments.arithmetic.memory_gib=1",
        "environments.arithmetic.sessions_per_process=16",
        "environments.arithmetic.world_size=2",
        f"environments.arithmetic.step_timeout={10 * limits.EXPIRY}",
    )
    outcome = world.run(*agent(world, "troubled", *overrides))
    assert outcome.status == 0, outcome.output
    leaves_nothing()
    steps = world.metrics("troubled")
    assert [line["step"] for line in steps] == [0, 1, 2, 3, 4]
    assert sum(line.get("episode/failed_groups", 0) for line in steps) >= 1
    assert all(
        line["reward/scored_fraction"] == 1 and line["episode/environment_failed_fraction"] == 0 for line in steps[1:]
    )
    asked = [record["prompt"] for record in samples(world.folder / "troubled")]
    assert asked and not any(text.removeprefix("<|im_start|>user\n").startswith(BROKEN) for text in asked)
