"""The rows of the recipe smollm2_agent match its environment, and its model writes tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from examples.recipes.make_agent import CONVERSATIONS, HELD_OUT, TASKS, WITH_TOOL, give_tools, write_agent
from examples.tiny.make_model import write_model
from roll.agents.environments.calculator import Calculator
from roll.config.schema.offline import SftConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.data.renderers.families import chat_renderer
from roll.data.renderers.templates import turns_renderer
from roll.types import Ints
from tests.unit.config.test_examples import planned


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agent")
    write_model(folder / "model", seed=0, agent=True)
    write_agent(folder / "model", folder / "agent", seed=0)
    return folder / "agent"


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_some_conversations_call_the_tool_and_are_right(folder: Path) -> None:
    told, right = rows(folder / "conversations.jsonl"), 0
    for row in told[:200]:
        asked, *said = row["messages"]
        episode, calls = Calculator(), [message for message in said if message.get("tool_calls")]
        episode.reset({"question": asked["content"], "answer": true_answer(asked["content"])}, 0)
        steps = [episode.step(message) for message in said if message["role"] == "assistant"]
        assert steps[-1].done and steps[-1].reward == len(calls), asked
        assert not calls or steps[0].messages[0]["content"] == said[1]["content"]
        right += len(calls)
    assert right / 200 == pytest.approx(WITH_TOOL, abs=0.1)


def true_answer(question: str) -> str:
    """Return the answer, computed from the words of the question and not by the tool."""
    first, second, *third = (int(word.strip(".?")) for word in question.split() if word.strip(".?").isdecimal())
    if question.startswith("A stack"):
        return str(first + second * third[0])
    if question.startswith("A pump"):
        return str(first * third[0] + second)
    sign = -1 if "lost" in question or "break" in question else 1
    return str(first * second + sign * sum(third))


def test_no_task_is_in_two_files(folder: Path) -> None:
    told = [row["messages"][0]["content"] for row in rows(folder / "conversations.jsonl")]
    given = [row for name in ("train.jsonl", "validation.jsonl") for row in rows(folder / name)]
    assert (len(told), len(given)) == (CONVERSATIONS, TASKS + HELD_OUT)
    assert len({*told, *(row["question"] for row in given)}) == len(told) + len(given)
    assert all(row["answer"] == true_answer(row["question"]) for row in given)


def test_learnt_conversation_has_tokens_of_its_episode(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    chat = chat_renderer(tokenizer, "model", "native")
    row = next(row for row in rows(folder / "conversations.jsonl") if len(row["messages"]) == 4)
    asked, call, result, _ = row["messages"]
    text = turns_renderer(tokenizer, "native")(row["messages"], row["tools"], False)
    whole, end = tokenizer(text).input_ids, tokenizer.eos_token_id
    given = chat.render([asked], row["tools"]).tolist()
    first = whole[len(given) : whole.index(end, len(given)) + 1]
    assert "calc" in tokenizer.decode(given) and whole[: len(given)] == given
    parsed = chat.parse(ints(first), row["tools"])
    assert not parsed.malformed and parsed.message["tool_calls"][0]["function"] == call["tool_calls"][0]["function"]
    bridge = chat.bridge(ints(given), ints(first), [result], row["tools"])
    assert bridge is not None
    laid = [*given, *first, *bridge.tolist()]
    assert whole[: len(laid)] == laid


def test_recipes_read_what_the_script_writes(folder: Path) -> None:
    warm_up, agent = (planned(f"recipes/smollm2_agent_{name}")[0] for name in ("warm_up", "grpo"))
    assert isinstance(warm_up, SftConfig) and isinstance(agent, RlvrConfig)
    assert agent.validation is not None
    sources = (warm_up.sft_train.data_args, agent.actor_train.data_args, agent.validation.data_args)
    files = [columns.file_name for columns in sources if columns]
    assert len(files) == len(sources)
    assert {Path(str(file)).parent for file in files} == {Path(warm_up.pretrain).parent}
    assert all((folder / Path(name).name).exists() for name in [*map(str, files), warm_up.pretrain])
    assert Path(agent.pretrain) == Path(warm_up.output_dir) / "export"
    assert HELD_OUT >= 256 and set(agent.environments) == {"calculator"}


def ints(token_ids: list[int]) -> Ints:
    return np.array(token_ids, np.int32)


def test_model_without_the_marks_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model", seed=0, agent=False)
    written = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    written["added_tokens"] = [token for token in written["added_tokens"] if token["content"] != "<|im_start|>"]
    written["model"]["vocab"] = {name: n for name, n in written["model"]["vocab"].items() if name != "<|im_start|>"}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(written))
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    for key in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
        settings.pop(key, None)
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="is not a token"):
        give_tools(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()
