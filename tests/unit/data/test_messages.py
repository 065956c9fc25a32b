"""One reading of messages: OpenAI's formats, ShareGPT, and the keys of other frameworks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll.agents.environments.base import Observation
from roll.agents.environments.checked import BadReturn, observation_of
from roll.agents.environments.picture_contents import file_of
from roll.agents.environments.tasks import task_of
from roll.agents.gateway.asked import RequestRefused
from roll.agents.gateway.checked import messages_of
from roll.config.schema.model import DataConfig
from roll.data.examples import ExampleSet, Kind, LengthLimits, prepare_examples
from roll.data.messages import MessageFault, read_message, unread_message_keys
from roll.data.rows import UNNAMED, UNREAD
from roll.errors import DataError, FaultCode
from tests.unit.data.formats import FORMATS, make_renderer, make_tokenizer

Write = Callable[..., str]
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
ADD = {"name": "add", "arguments": {"x": 1}}


def said(**keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", **keys}


def with_arguments(arguments: Any) -> dict[str, Any]:
    return said(tool_calls=[{**CALL, "function": {"name": "add", "arguments": arguments}}])


@pytest.mark.parametrize(
    ("message", "read"),
    [
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "ab"},
        ),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}]}, {"role": "user", "content": "a"}),
        (
            {"role": "user", "content": [{"type": "text", "value": "a"}], "loss_weight": 0.0},
            {"role": "user", "content": "a"},
        ),
        ({"role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "function", "name": "add", "content": "2"}, {"role": "tool", "content": "2", "name": "add"}),
        ({"from": "system", "value": "a"}, {"role": "system", "content": "a"}),
        ({"from": "human", "value": "a"}, {"role": "user", "content": "a"}),
        ({"from": "gpt", "value": "a", "weight": 0}, {"role": "assistant", "content": "a", "train": False}),
        ({"from": "observation", "value": "2"}, {"role": "tool", "content": "2"}),
        ({"from": "tool", "value": "2"}, {"role": "tool", "content": "2"}),
        ({"from": "function_call", "value": json.dumps(ADD)}, said(tool_calls=[{"type": "function", "function": ADD}])),
        (
            {"from": "function_call", "value": json.dumps([ADD, ADD])},
            said(tool_calls=[{"type": "function", "function": ADD}] * 2),
        ),
        (said(content=None, tool_calls=[CALL]), said(tool_calls=[CALL])),
        (with_arguments('{"x": 1}'), said(tool_calls=[CALL])),
        (with_arguments(""), with_arguments({})),
        (with_arguments("{}"), with_arguments({})),
        (with_arguments(None), with_arguments({})),
        (
            said(tool_calls=[{"function": {"name": "add"}}]),
            said(tool_calls=[{"function": {"name": "add", "arguments": {}}}]),
        ),
        (
            said(function_call={"name": "add"}),
            said(tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {}}}]),
        ),
        (with_arguments('{"x": "\\u00e9\\ud83d\\ude00", "y": null}'), with_arguments({"x": "é😀", "y": None})),
        (said(tool_calls=json.dumps([CALL])), said(tool_calls=[CALL])),
        (said(tool_calls=[ADD]), said(tool_calls=[{"type": "function", "function": ADD}])),
        (
            said(tool_calls=[{**ADD, "id": "b", "arguments": '{"x": 1}'}]),
            said(tool_calls=[{"id": "b", "type": "function", "function": ADD}]),
        ),
        (
            said(function_call={"name": "add", "arguments": '{"x": 1}'}),
            said(tool_calls=[{"type": "function", "function": ADD}]),
        ),
        (said(function_call=None, tool_calls=None), said()),
        (said(function_call=ADD, tool_calls=[CALL]), said(tool_calls=[CALL])),
        (said(content="12", thinking="7+5"), said(content="12", reasoning_content="7+5")),
        (said(content="12", reasoning="7+5"), said(content="12", reasoning_content="7+5")),
        (said(content="12", reasoning="7+5", reasoning_content="7+5"), said(content="12", reasoning_content="7+5")),
        (said(content="12", reasoning=None, thinking=""), said(content="12")),
        *(
            (said(content="x", **{key: 0}), said(content="x", train=False))
            for key in ("weight", "train", "loss", "loss_weight", "trainable")
        ),
        *(
            (said(content="x", **{key: True}), said(content="x"))
            for key in ("weight", "train", "loss_scale", "step_loss_mask")
        ),
        (said(content="x", train=False, weight=0), said(content="x", train=False)),
        ({"role": "user", "content": "x", "train": False}, {"role": "user", "content": "x"}),
        ({"role": "user", "value": "x"}, {"role": "user", "content": "x"}),
        ({"from": "gpt", "content": "x", "value": None}, {"role": "assistant", "content": "x"}),
    ],
)
def test_a_message_is_read_in_every_public_format(message: dict, read: dict) -> None:
    assert read_message(message) == read


@pytest.mark.parametrize(
    ("message", "code", "said"),
    [
        (with_arguments("x=1"), "malformed", "call 0 with arguments that are no JSON object: 'x=1'"),
        (with_arguments("[1]"), "malformed", "call 0 with arguments that are no JSON object: '[1]'"),
        (with_arguments('"{}"'), "malformed", "arguments"),
        (with_arguments([1]), "malformed", "arguments"),
        (with_arguments('{"x": 1, "x": 2}'), "malformed", "arguments"),
        (with_arguments('{"x": NaN}'), "malformed", "arguments"),
        (with_arguments({"x": [float("inf")]}), "malformed", "arguments"),
        (with_arguments('{"x": "\\ud800"}'), "malformed", "arguments"),
        (with_arguments("null"), "malformed", "arguments"),
        (said(tool_calls=[{"name": "add", "parameters": {"x": 1}}]), "missing", "'parameters'"),
        (said(tool_calls=[{"function": {"name": "add", "arguments": None, "input": {"x": 1}}}]), "missing", "'input'"),
        ({"role": "user", "content": "x", "value": "y"}, "contradiction", "'content' and 'value'"),
        (said(tool_calls=[{"type": "function"}]), "missing", "{'type': 'function'}"),
        (said(tool_calls=["add"]), "missing", "'add'"),
        (said(tool_calls="add(1)"), "malformed", "tool_calls that is not JSON"),
        ({"from": "function_call", "value": "add(1)"}, "malformed", "function_call that is not JSON"),
        ({"from": "function_call", "value": None}, "wrong_type", "function_call"),
        (
            said(function_call={"name": "sub", "arguments": {}}, tool_calls=[CALL]),
            "contradiction",
            "tool_calls and function_call",
        ),
        (said(reasoning="a", thinking="b"), "contradiction", "thinking and reasoning"),
        (said(reasoning=[{"text": "a"}]), "wrong_type", "a list as 'reasoning'"),
        (said(content="x", weight=0.5), "not_allowed", "'weight': 0.5"),
        (said(content="x", train="no"), "not_allowed", "'train': 'no'"),
        (said(content="x", loss_scale=2), "not_allowed", "'loss_scale': 2"),
        (said(content="x", weight=0, train=True), "contradiction", "train and weight"),
        (said(content="x", train_detail=[{"begin_offset": 0}]), "not_supported", "'train_detail'"),
        (said(content="x", mask=True), "not_supported", "'mask'"),
        ({"role": "user", "content": "x", "train": True}, "not_supported", "'user' and 'train': True"),
        ({"from": "narrator", "value": "x"}, "not_allowed", "from 'narrator'"),
        ({"role": "human", "content": "x"}, "not_allowed", "role 'human'"),
        ({"role": ["user"], "content": "x"}, "not_allowed", "role ['user']"),
        ({"role": "user", "content": {"text": "x"}}, "wrong_type", "a dict as content"),
        ({"role": "user", "content": [{"type": "text"}]}, "wrong_type", "part 0"),
        ({"role": "user", "content": ["x"]}, "wrong_type", "part 0"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]},
            "not_supported",
            "part of the type 'image'",
        ),
        ({"role": "user", "content": "x", "images": ["a.png"]}, "not_supported", "'images'"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "not_supported", "'input_audio'"),
    ],
)
def test_message_that_would_be_misread_is_a_fault(message: dict, code: FaultCode, said: str) -> None:
    with pytest.raises(MessageFault) as caught:
        read_message(message)
    assert caught.value.code == code and said in str(caught.value) and caught.value.reason


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_remedy_for_a_learnt_question_names_its_key(role: str) -> None:
    with pytest.raises(MessageFault) as caught:
        read_message({"role": role, "content": "x", "weight": 1})
    assert caught.value.code == "not_supported" and caught.value.remedy.startswith("remove 'weight'")


@pytest.mark.parametrize("column", ["messages", "tools"])
def test_lone_surrogate_in_json_text_is_fault(examples: Callable[..., ExampleSet], column: str) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, said(content="b")], "tools": []}
    text = '[{"role": "user", "content": "\\ud800"}]' if column == "messages" else '[{"name": "\\ud800"}]'
    with pytest.raises(DataError) as caught:
        examples([{**row, column: text}])
    (fault,) = caught.value.faults
    assert fault.code == "malformed" and fault.place.endswith("rows.jsonl:1") and f"'{column}'" in fault.problem


def test_keys_that_nothing_reads_are_named() -> None:
    message = {
        "role": "user",
        "content": "x",
        "timestamp": 3,
        "id": "",
        "annotations": [],
        "reasoning": "y",
        "refusal": None,
    }
    assert list(unread_message_keys(message)) == ["timestamp", "reasoning"]
    assert list(unread_message_keys(said(reasoning="y", weight=1, name="a", prefix=True))) == ["prefix"]


@pytest.fixture
def examples(write_jsonl: Write, tmp_path: Path) -> Callable[..., ExampleSet]:
    tokenizer = make_tokenizer(FORMATS["qwen2.5"])

    def prepare(rows: list[dict], kind: Kind = "responses", **columns: Any) -> ExampleSet:
        data_args = DataConfig.model_validate({"file_name": write_jsonl(rows), **(columns or {"messages": "messages"})})
        return prepare_examples(data_args, tokenizer, LengthLimits(9999, 9999), kind, cache_folder=tmp_path / "cache")

    return prepare


def tokens(examples: ExampleSet, index: int) -> tuple[list[int], list[bool]]:
    sequence = examples.example(index).sequences[0]
    return sequence.token_ids.tolist(), sequence.response_mask.tolist()


def test_formats_of_one_conversation_give_the_same_tokens(examples: Callable[..., ExampleSet]) -> None:
    openai = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add 1 and 2"},
        said(content=None, tool_calls=[CALL]),
        {"role": "tool", "content": "3", "tool_call_id": "a"},
        said(content="It is 3."),
    ]
    texts = [{**one, "role": "developer" if one["role"] == "system" else one["role"]} for one in openai]
    texts = [
        {**one, "content": [{"type": "text", "text": one["content"]}] if one["content"] else None} for one in texts
    ]
    texts[2] = {**texts[2], "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"x": 1}'}}]}
    old = [
        *openai[:2],
        said(function_call={"name": "add", "arguments": '{"x": 1}'}),
        {"role": "function", "content": "3"},
        openai[4],
    ]
    sharegpt = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Add 1 and 2"},
        {"from": "function_call", "value": json.dumps(ADD)},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "It is 3."},
    ]
    for kind in ("responses", "turns"):
        found = examples([{"messages": messages} for messages in (openai, texts, old, sharegpt)], kind)
        assert tokens(found, 1) == tokens(found, 0) == tokens(found, 2) == tokens(found, 3)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"x": None},
        {"x": "é😀\u2028"},
        {"x": 'a"b\\n\n\t'},
        {"x": {"y": [None, {"z": True}]}},
        {"x": 1e-7},
        {"b": 10**30, "a": 2},
    ],
)
def test_a_learnt_call_is_read_again_by_agents(
    examples: Callable[..., ExampleSet], tmp_path: Path, given: dict
) -> None:
    chat = make_renderer(FORMATS["qwen2.5"], make_tokenizer(FORMATS["qwen2.5"]), tmp_path)
    rows = [
        {"messages": [{"role": "user", "content": "Hi"}, with_arguments(one)]} for one in (given, json.dumps(given))
    ]
    found = examples(rows)
    for index in range(2):
        sequence = found.example(index).sequences[0]
        (call,) = chat.parse(sequence.token_ids[sequence.response_mask], ()).message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == given


@pytest.mark.parametrize("key", ["weight", "train", "loss", "trainable"])
def test_an_excluded_turn_is_not_learnt(examples: Callable[..., ExampleSet], key: str) -> None:
    bad = {"role": "assistant", "content": "BAD", key: 0}
    messages = [{"role": "user", "content": "Hi"}, bad, {"role": "user", "content": "Again"}, said(content="Good")]
    token_ids, learnt = tokens(examples([{"messages": messages}], "turns"), 0)
    text = make_tokenizer(FORMATS["qwen2.5"]).decode(np.array(token_ids)[learnt])
    assert text == "Good<|im_end|>"


def test_message_fault_names_row_and_place(examples: Callable[..., ExampleSet]) -> None:
    with pytest.raises(DataError) as caught:
        examples([{"messages": [{"role": "user", "content": "Hi"}, with_arguments("x=1")]}])
    (fault,) = caught.value.faults
    assert fault.code == "malformed" and fault.place.endswith("rows.jsonl:1")
    assert fault.problem.startswith("'messages' item 1 ") and "tool call 0" in fault.problem
    assert '{"function"' in fault.remedy


def test_unread_keys_and_columns_are_counted_by_file(examples: Callable[..., ExampleSet]) -> None:
    talk = [{"role": "user", "content": "Hi", "timestamp": 1}, said(content="Yo", timestamp=2)]
    rows = [
        {"messages": talk, "history": [["a", "b"]]},
        {"messages": talk, "history": []},
        {"messages": [talk[0], said(content="Yo")]},
    ]
    found = examples(rows)
    counts = {remark: sum(files.values()) for remark, files in found.remarks.items()}
    assert counts == {UNREAD.format("timestamp"): 3, UNNAMED.format("history"): 1}


def test_alpaca_rows_say_or_include_their_input(examples: Callable[..., ExampleSet]) -> None:
    rows = [
        {"instruction": "Sum", "input": "1 2", "output": "3"},
        {"instruction": "Say hi", "input": "", "output": "Hi"},
    ]
    found = examples(rows, prompt="instruction", response="output")
    assert [sum(files.values()) for what, files in found.remarks.items() if "'input'" in what] == [1]
    with_input = examples(rows, prompt="instruction", input="input", response="output")
    joined = examples([{"p": "Sum\n1 2", "r": "3"}, {"p": "Say hi", "r": "Hi"}], prompt="p", response="r")
    assert [tokens(with_input, index) for index in (0, 1)] == [tokens(joined, index) for index in (0, 1)]
    assert not with_input.remarks


def test_input_that_is_not_text_is_fault(examples: Callable[..., ExampleSet]) -> None:
    with pytest.raises(DataError, match="'input' is a list") as caught:
        examples([{"p": "Sum", "input": [1], "r": "3"}], prompt="p", input="input", response="r")
    assert [fault.code for fault in caught.value.faults] == ["wrong_type"]


@pytest.mark.parametrize("label", [True, 1, "true", "True", "1"])
def test_labels_and_margins_may_be_text(examples: Callable[..., ExampleSet], label: Any) -> None:
    found = examples([{"p": "a", "r": "b", "good": label}], "labelled", prompt="p", response="r", label="good")
    assert found.example(0).value == 1.0
    pairs = examples(
        [{"p": "a", "c": "b", "r": "d", "m": "0.5"}], "pairs", prompt="p", chosen="c", rejected="r", margin="m"
    )
    assert pairs.example(0).value == 0.5


def test_answers_as_json_text_are_read_as_messages(examples: Callable[..., ExampleSet]) -> None:
    lists = {"p": "q", "c": [said(content="a", id=3)], "r": [{"from": "gpt", "value": "d", "id": 3}], "good": 1}
    texts = {**lists, "c": json.dumps(lists["c"]), "r": f" {json.dumps(lists['r'])}"}
    for kind, columns in (
        ("pairs", {"chosen": "c", "rejected": "r"}),
        ("labelled", {"response": "r", "label": "good"}),
    ):
        found = examples([lists, texts], kind, prompt="p", **columns)
        assert [one.token_ids.tolist() for one in found.example(0).sequences] == [
            one.token_ids.tolist() for one in found.example(1).sequences
        ]
        assert [(sum(files.values()), "'id'" in what) for what, files in found.remarks.items()] == [(2, True)]


def test_messages_as_text_are_pointed_to_messages_key(examples: Callable[..., ExampleSet]) -> None:
    row = {"p": json.dumps([{"role": "user", "content": "q"}]), "r": "a"}
    with pytest.raises(DataError) as caught:
        examples([row], prompt="p", response="r")
    (fault,) = caught.value.faults
    assert fault.code == "wrong_type" and "data_args.messages=p" in fault.remedy


@pytest.mark.parametrize(
    "text", ["[1]", "[]", '[{"role": 1}]', '[{"name": "a"}]', '[{"role": "user"', '["user"]', "[user]"]
)
def test_other_lists_stay_texts(examples: Callable[..., ExampleSet], text: str) -> None:
    token_ids, learnt = tokens(examples([{"p": text, "r": text}], prompt="p", response="r"), 0)
    assert make_tokenizer(FORMATS["qwen2.5"]).decode(np.array(token_ids)[learnt]) == f"{text}<|im_end|>"


def test_the_gateway_reads_messages_as_data_does() -> None:
    asked = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "b"},
        said(reasoning="c"),
    ]
    assert messages_of(asked, "messages") == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "", "reasoning_content": "c"},
    ]
    with pytest.raises(RequestRefused, match="different texts"):
        messages_of([said(reasoning="c", thinking="d")], "messages")


def test_environments_read_messages_as_data_does() -> None:
    parts = [{"type": "text", "text": "a"}]
    assert observation_of(Observation([{"role": "developer", "content": parts}]), file_of).messages == [
        {"role": "system", "content": "a"}
    ]
    assert task_of({"messages": [{"from": "human", "value": "a"}]}) == [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match="message 1 .*'train': True; remove 'train'"):
        task_of({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "train": True}]})
    with pytest.raises(BadReturn, match="picture"):
        observation_of(Observation([{"role": "user", "content": [{"type": "image_url"}]}]), file_of)
