"""A third-party agent, written with OpenAI's and Anthropic's clients, does the calculator task with the real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import limits
from tests.integration.conftest import TINY, World

pytestmark = [pytest.mark.engines, pytest.mark.full]
AGENT = """
import json
import sys

from anthropic import Anthropic
from openai import OpenAI

row = json.load(sys.stdin)
messages = row["messages"]
if row["seed"] % 3 == 0:
    sys.exit("this task is not for me")


def result(text):
    left, right = text.split("*")
    return str(int(left) * int(right))


def openai_turn(turn, client=OpenAI()):
    if turn % 2:
        with client.chat.completions.stream(model="policy", messages=messages, tools=row["tools"]) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(model="policy", messages=messages,
        tools=row["tools"]).choices[0].message
    messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    for call in message.tool_calls or ():
        answer = result(json.loads(call.function.arguments)["x"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
    return message.tool_calls


def anthropic_turn(turn, client=Anthropic()):
    tools = [one["function"] for one in row["tools"]]
    renamed = {"name": "name", "description": "description", "input_schema": "parameters"}
    tools = [{new: one[old] for new, old in renamed.items()} for one in tools]
    keys = {"model": "policy", "messages": messages, "tools": tools}
    count = client.messages.count_tokens(**keys).input_tokens
    with client.messages.stream(max_tokens=512, **keys) as stream:
        message = stream.get_final_message() if turn % 2 else None
    if message is None:  # the stream was cut
        message = client.messages.create(max_tokens=512, **keys)
    read = message.usage.input_tokens + message.usage.cache_read_input_tokens
    with open("answers", "a") as file:
        print(json.dumps([turn, message.stop_reason, count, read]), file=file)
    messages.append({"role": "assistant", "content": message.content})
    calls = [block for block in message.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": one.id, "content": result(one.input["x"])} for one in calls]
    messages.append({"role": "user", "content": results})
    return calls


for turn in range(3):
    if not (openai_turn if row["seed"] % 2 else anthropic_turn)(turn):
        break
"""


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a world with the tiny agent model, after the warm-up that teaches the model to call the tool."""
    folder = tmp_path_factory.mktemp("agents")
    for script, *given in (
        ("make_model.py", "output/tiny/agent-model", "--agent"),
        ("make_conversations.py", "output/tiny/conversations"),
    ):
        subprocess.run([sys.executable, str(TINY / script), *given], cwd=folder, check=True, timeout=limits.PROCESS)
    tiny_world = World(folder)
    outcome = tiny_world.run("--config-name", "tiny/tiny_agent_warm_up", "output_dir=warm")
    assert outcome.status == 0, outcome.output
    (folder / "agent.py").write_text(AGENT)
    return tiny_world


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_agent_of_both_clients_trains_on_engine_tokens(agents: World, leaves_nothing: Callable[[], None]) -> None:
    outcome = agents.run(
        *(
            "--config-name",
            "tiny/tiny_agent",
            "output_dir=gateway",
            "pretrain=warm/export",
            "max_steps=2",
            "eval_steps=0",
        ),
        *("rollout_batch_size=4", "num_return_sequences_in_group=8", "updates_per_step=1"),
        f"+environments.calculator.agent={{command: ['{sys.executable}', agent.py]}}",
        "environments.calculator.sessions_per_process=4",
    )
    assert outcome.status == 0, outcome.output
    leaves_nothing()
    steps = agents.metrics("gateway")[1:]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["mismatch/logprob_abs_diff_mean"] < 1e-4, "the trainer sees what the engine saw, in fp32"
        assert line["episode/forks"] == 0 and line["episode/turns_mean"] > 1 and line["episode/tool_calls"] > 0
        assert line["reward/scored_fraction"] == 1
    assert any(line["policy/grad_norm"] > 0 for line in steps)
    assert sum(line.get("episode/failed_groups", 0) for line in steps) > 0, (
        "groups of tasks for which the agent fails are replaced"
    )
    paths = [one["trajectories"] for record in samples(agents.folder / "gateway") for one in record["responses"]]
    assert paths and all(len(path) == 1 for path in paths)
    several = [path[0]["segments"] for path in paths if len(path[0]["segments"]) > 2]
    assert several, "some episodes call the tool and continue after its answer"
    for segments in several:
        assert [segment["role"] for segment in segments] == ["environment", "assistant"] * (len(segments) // 2)
    answers = [json.loads(line) for line in (agents.folder / "answers").read_text().splitlines()]
    assert {"tool_use", "end_turn"} <= {reason for _, reason, _, _ in answers} and {0, 1} <= {
        turn for turn, *_ in answers
    }
    assert all(count == read for *_, count, read in answers), "what is counted is what the engine reads"


def test_unstartable_agent_is_refused_before_start(agents: World) -> None:
    outcome = agents.run(
        *("--config-name", "tiny/tiny_agent", "output_dir=refused", "pretrain=warm/export"),
        "+environments.calculator.agent={command: [no-such-program]}",
    )
    assert outcome.status == 2
    assert "environments.calculator.agent.command: 'no-such-program'" in outcome.output
