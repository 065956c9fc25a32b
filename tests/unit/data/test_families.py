"""Which renderer each model family gets, what it refuses, and how it reads tool calls from sampled tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from roll.config.schema.model import DataConfig
from roll.data.chat import TemplateFault, ends_of
from roll.data.renderers.families import FamilyRenderer, TemplateRenderer
from tests.unit.data.formats import FORMATS, make_renderer, make_tokenizer

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]
HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
DEEPSEEK_CALL = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}{{"x": 1}}\n```<｜tool▁call▁end｜>'
SAMPLED = np.array([5], np.int32)
KNOWN = {"qwen3", "llama3", "deepseek", "glm"}


@pytest.mark.parametrize("name", FORMATS)
def test_known_families_use_the_library_renderer(name: str, tmp_path: Path) -> None:
    chosen = make_renderer(FORMATS[name], make_tokenizer(FORMATS[name]), tmp_path)
    assert type(chosen) is (FamilyRenderer if name in KNOWN else TemplateRenderer)


@pytest.mark.parametrize("name", FORMATS)
def test_agents_stop_on_the_end_of_single_turns(name: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(FORMATS[name])
    ends = ends_of(DataConfig.model_validate({"file_name": "rows.jsonl"}), tokenizer).token_ids
    assert ends and set(ends) <= make_renderer(FORMATS[name], tokenizer, tmp_path).stop_token_ids


def test_template_that_differs_from_library_uses_template_renderer(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(FORMATS["llama3"])
    tokenizer.chat_template = str(tokenizer.chat_template).replace(
        "Cutting Knowledge Date: December 2023", "Cutting Knowledge Date: May 2026"
    )
    assert type(make_renderer(FORMATS["llama3"], tokenizer, tmp_path)) is TemplateRenderer


@pytest.mark.parametrize("name", ["qwen3", "llama3", "deepseek"])
def test_library_continues_no_message_with_pictures(name: str, tmp_path: Path) -> None:
    renderer = make_renderer(FORMATS[name], make_tokenizer(FORMATS[name]), tmp_path)
    before = renderer.render([{"role": "user", "content": "1+1?"}], ())
    text = {"role": "user", "content": "Right?"}
    shown = {"role": "user", "content": [{"type": "image", "path": "a"}, {"type": "text", "text": "Right?"}]}
    sampled = np.array([max(renderer.stop_token_ids)], np.int32)
    assert renderer.bridge(before, sampled, [text], ()) is not None
    assert renderer.bridge(before, sampled, [shown], ()) is None


def test_template_that_moves_system_message_refuses_one(tmp_path: Path) -> None:
    renderer = make_renderer(FORMATS["mistral"], make_tokenizer(FORMATS["mistral"]), tmp_path)
    with pytest.raises(TemplateFault, match="system message"):
        renderer.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}], ())


@pytest.mark.parametrize("name", ["mistral", "gemma"])
def test_tools_are_refused_where_calls_cannot_be_read(name: str, tmp_path: Path) -> None:
    renderer = make_renderer(FORMATS[name], make_tokenizer(FORMATS[name]), tmp_path)
    with pytest.raises(TemplateFault, match="tool calls"):
        renderer.render([{"role": "user", "content": "1+1?"}], TOOLS)
    assert (
        renderer.bridge(
            renderer.render([{"role": "user", "content": "1+1?"}], ()), SAMPLED, [{"role": "tool", "content": "2"}], ()
        )
        is None
    )


@pytest.mark.parametrize(
    ("name", "written", "calls", "malformed"),
    [
        ("qwen2.5", '<tool_call>{"name": "add", "arguments": {"x": "QUOTED"}}</tool_call>', ["QUOTED"], 0),
        ("qwen2.5", f"<think>{HERMES_CALL}</think>2", [], 0),
        ("qwen2.5", "QUOTED so", [], 0),
        ("qwen3", f"<think>{HERMES_CALL}</think>\n\n{HERMES_CALL}", [1], 0),
        ("qwen3", "<tool_call>{add}</tool_call>", [], 1),
        ("qwen3", f"{HERMES_CALL}\n<tool_call>{{", [1], 1),
        ("llama3", '{"name": "add", "parameters": {"x": 1}}', [1], 0),
        ("deepseek", f"<｜tool▁calls▁begin｜>{DEEPSEEK_CALL.format('{{')}<｜tool▁calls▁end｜>", [], 1),
        ("deepseek", f"<｜tool▁calls▁begin｜>{DEEPSEEK_CALL.format('')}<｜tool▁calls▁end｜>", [1], 0),
        (
            "glm",
            "<think></think>\n<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
            [1],
            0,
        ),
        ("glm", "<think></think>\n<tool_call>add\n<arg_key>x</arg_key>", [], 1),
    ],
)
def test_tool_calls_are_parsed_from_tag_tokens(
    name: str, written: str, calls: list[object], malformed: int, tmp_path: Path
) -> None:
    """QUOTED stands for a closing tag that is spelt in ordinary tokens, not with the tag's own token."""
    tokenizer = make_tokenizer(FORMATS[name])
    pieces = [tokenizer.encode(piece, add_special_tokens=False) for piece in written.split("QUOTED")]
    quoted = tokenizer.encode("<", add_special_tokens=False) + tokenizer.encode("/tool_call>", add_special_tokens=False)
    sampled = [*pieces[0], *(token for piece in pieces[1:] for token in (*quoted, *piece))]
    parsed = make_renderer(FORMATS[name], tokenizer, tmp_path).parse(np.array(sampled, np.int32), TOOLS)
    found = [json.loads(call["function"]["arguments"])["x"] for call in parsed.message.get("tool_calls", ())]
    assert found == ["</tool_call>" if one == "QUOTED" else one for one in calls]
    assert len(parsed.malformed) == malformed


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_tag_text_in_ordinary_tokens_is_no_call(name: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(FORMATS[name])
    sampled = [token for piece in ("<", HERMES_CALL[1:]) for token in tokenizer.encode(piece, add_special_tokens=False)]
    parsed = make_renderer(FORMATS[name], tokenizer, tmp_path).parse(np.array(sampled, np.int32), TOOLS)
    assert parsed.message == {"role": "assistant", "content": HERMES_CALL}
    assert not parsed.malformed
