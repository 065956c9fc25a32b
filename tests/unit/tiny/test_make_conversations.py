"""The tiny agent's warm-up conversations match its environment token by token."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from examples.tiny import demo
from examples.tiny.make_conversations import FIRST_SEED, PROBLEMS, WITH_TOOL, write_conversations
from examples.tiny.make_model import AGENT_POSITIONS, write_model
from roll.agents.environments.calculator import Calculator
from roll.config.schema.offline import SftConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.data.prompts import FIRST_HELD_OUT
from roll.data.renderers.families import chat_renderer
from roll.types import Ints
from tests.unit.tiny.test_experiments import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agent")
    write_model(folder / "model", seed=0, agent=True)
    write_conversations(folder / "conversations", seed=0)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder / "model")


@pytest.fixture(scope="module")
def conversations(folder: Path) -> list[list[dict]]:
    lines = (folder / "conversations" / "conversations.jsonl").read_text().splitlines()
    return [json.loads(line)["messages"] for line in lines]


def test_share_of_conversations_calls_tool_and_is_right(conversations: list[list[dict]]) -> None:
    right = 0
    for number, (asked, *said) in enumerate(conversations[:200]):
        world = Calculator(**PROBLEMS)
        assert [dict(message) for message in world.reset({}, FIRST_SEED + number).messages] == [asked]
        steps = [world.step(message) for message in said if message["role"] == "assistant"]
        assert steps[-1].done and sum(step.reward for step in steps) == (len(said) == 3)
        right += len(said) == 3
        if len(said) == 3:
            assert steps[0].messages[0]["content"] == said[1]["content"] == said[2]["content"]
    assert right / 200 == pytest.approx(WITH_TOOL, abs=0.1)
    assert len({asked["content"] for asked, *_ in conversations}) > 5000


def test_learnt_conversations_match_what_policy_meets(
    tokenizer: PreTrainedTokenizerBase, conversations: list[list[dict]]
) -> None:
    """A conversation has the same tokens whether it is rendered as a whole (for the warm-up) or built turn by turn (in
    an episode).
    """
    chat = chat_renderer(tokenizer, "model", "native")
    asked, call, result, answer = next(messages for messages in conversations if len(messages) == 4)
    text = tokenizer.apply_chat_template([asked, call, result, answer], tokenize=False)
    whole, end = tokenizer(str(text)).input_ids, tokenizer.eos_token_id
    given = chat.render([asked], []).tolist()
    first = whole[len(given) : whole.index(end, len(given)) + 1]
    assert whole[: len(given)] == given
    tools = Calculator(**PROBLEMS).reset({}, 0).tools
    parsed = chat.parse(ints(first), tools)
    assert not parsed.malformed and parsed.message["tool_calls"][0]["function"] == call["tool_calls"][0]["function"]
    bridge = chat.bridge(ints(given), ints(first), [result], tools)
    assert bridge is not None
    laid = [*given, *first, *bridge.tolist()]
    assert whole[: len(laid)] == laid and whole[len(laid) :][-2:-1] == [end]
    assert len(whole) <= AGENT_POSITIONS


def ints(token_ids: list[int]) -> Ints:
    return np.array(token_ids, np.int32)


def test_agent_experiments_read_previous_outputs() -> None:
    warm_up, agent = load(demo.AGENT_WARM_UP), load(demo.AGENT)
    assert isinstance(warm_up, SftConfig) and isinstance(agent, RlvrConfig)
    assert Path(warm_up.pretrain) == demo.AGENT_MODEL
    assert warm_up.sft_train.data_args.file_name == str(demo.CONVERSATIONS / "conversations.jsonl")
    assert Path(agent.pretrain) == Path(warm_up.output_dir) / "export"
    [environment] = agent.environments.values()
    assert environment.environment_args == PROBLEMS and environment.rows is not None
    assert environment.rows <= FIRST_SEED < FIRST_HELD_OUT, (
        "the warm-up shares no task with RLVR training or validation"
    )
    assert agent.validation is not None and set(agent.validation.rows) == set(agent.environments)
