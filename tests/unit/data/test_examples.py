"""Training examples: their token ids and response masks, limits on their lengths, and faults in rows."""

from __future__ import annotations

import copy
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from roll.config.schema.model import DataConfig
from roll.data.chat import renderer
from roll.data.examples import ExampleSequence, ExampleSet, Kind, LengthLimits, prepare_examples
from roll.data.native import opening
from roll.data.unwritten import UNWRITTEN
from roll.errors import DataError, FaultCode
from roll.models.load import load_tokenizer
from roll.models.thinking import ResponseTexts
from roll.runs.rlvr.reward_models import answered_encoder
from tests.faults import coded

Write = Callable[..., str]
MESSAGES = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]


def only(path: str, folder: Path, tokenizer: PreTrainedTokenizerFast, **columns: Any) -> ExampleSequence:
    examples = prepare_examples(
        DataConfig.model_validate({"file_name": path, **columns}),
        tokenizer,
        LengthLimits(100, 100),
        cache_folder=folder / "cache",
    )
    assert len(examples) == 1
    return examples.example(0).sequences[0]


@pytest.mark.parametrize(
    ("template", "prompt", "response"),
    [
        ("chatml", "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n", "Two.<|im_end|>"),
        ("native", "[user]One?<|endoftext|>\n[assistant]", "Two.<|endoftext|>"),
        ("raw", "One?", "Two.<|endoftext|>"),
    ],
)
@pytest.mark.parametrize("shape", ["messages", "prompt"])
def test_the_mask_is_true_on_the_response_alone(
    write_jsonl: Write,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    template: str,
    prompt: str,
    response: str,
    shape: str,
) -> None:
    path = write_jsonl([{"messages": MESSAGES} if shape == "messages" else {"question": "One?", "solution": "Two."}])
    columns = {"messages": "messages"} if shape == "messages" else {"prompt": "question", "response": "solution"}
    sequence = only(path, tmp_path, tokenizer, template=template, **columns)
    assert tokenizer.decode(sequence.token_ids[~sequence.response_mask]) == prompt
    assert tokenizer.decode(sequence.token_ids[sequence.response_mask]) == response
    assert sequence.token_ids.dtype == np.int32 and sequence.response_mask.dtype == np.bool_
    assert np.flatnonzero(sequence.response_mask).tolist() == list(
        range((~sequence.response_mask).sum(), len(sequence.token_ids))
    )


def test_prompt_tokens_equal_those_of_generation(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    # "answ" + "er is" would merge into one token across the boundary if the two were tokenised together.
    sequence = only(
        write_jsonl([{"q": "The answ", "a": "er is"}]), tmp_path, tokenizer, template="raw", prompt="q", response="a"
    )
    assert sequence.token_ids[~sequence.response_mask].tolist() == tokenizer("The answ")["input_ids"]
    together = tokenizer("The answer is")["input_ids"]
    assert sequence.token_ids[:-1].tolist() != together


def test_a_message_keeps_its_calls_and_its_thinking(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif "
        "%}{{ "
        "m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %};{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    speaking = copy.deepcopy(tokenizer)
    speaking.chat_template = template
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    answer = {"role": "assistant", "content": "Two.", "reasoning_content": "Hm.", "tool_calls": None}
    path = write_jsonl([{"messages": [MESSAGES[0], call, {"role": "tool", "content": "2"}, answer]}])
    sequence = only(path, tmp_path, speaking, messages="messages")
    assert tokenizer.decode(sequence.token_ids[~sequence.response_mask]) == (
        '[user]One?;[assistant]{"name": "add", "arguments": {}};[tool]2;[assistant]'
    )
    assert tokenizer.decode(sequence.token_ids[sequence.response_mask]) == "<Hm.>Two.;"


BEGIN, END = "<|im_start|>", "<|im_end|>"


@pytest.mark.parametrize(("form", "begins"), [("{0} $A {1}", True), ("{0} $A", True), ("$A {1}", False)])
def test_tokenizer_that_appends_eos_does_not_end_prompt(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, form: str, begins: bool
) -> None:
    ending = copy.deepcopy(tokenizer)
    marks = [(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in (BEGIN, END)]
    ending.backend_tokenizer.post_processor = TemplateProcessing(single=form.format(BEGIN, END), special_tokens=marks)
    sequence = only(
        write_jsonl([{"q": f"One?{END}", "a": "Two."}]), tmp_path, ending, template="raw", prompt="q", response="a"
    )
    begin = BEGIN if begins else ""
    assert tokenizer.decode(sequence.token_ids[~sequence.response_mask]) == f"{begin}One?{END}"
    assert tokenizer.decode(sequence.token_ids[sequence.response_mask]) == "Two.<|endoftext|>"
    whole = only(write_jsonl([{"t": "One? Two."}]), tmp_path, ending, text="t")
    assert tokenizer.decode(whole.token_ids) == f"{begin}One? Two.<|endoftext|>"


def test_conversation_learns_all_assistant_turns_only(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    later = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Three."}]
    path = write_jsonl([{"messages": [*MESSAGES, *later]}, {"messages": MESSAGES}])
    data_args = DataConfig.model_validate({"file_name": path, "template": "chatml", "messages": "messages"})
    rows = prepare_examples(data_args, tokenizer, LengthLimits(100, 100), "turns", cache_folder=tmp_path / "cache")
    (long,), (short,) = rows.example(0).sequences, rows.example(1).sequences
    parts = np.split(long.token_ids, np.flatnonzero(np.diff(long.response_mask)) + 1)
    assert [tokenizer.decode(part) for part in parts] == [
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n",
        "Two.<|im_end|>",
        "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n",
        "Three.<|im_end|>",
    ]
    assert not long.response_mask[0] and long.response_mask[-1]
    # `Limits.response` applies to the last response, `Limits.prompt` to everything before it.
    before = sum(len(part) for part in parts[:3])
    fits = [LengthLimits(before, 100), LengthLimits(before - 1, 100)]
    assert [
        len(prepare_examples(data_args, tokenizer, each, "turns", cache_folder=tmp_path / "cache")) for each in fits
    ] == [2, 1]
    # For a conversation with a single response, `turns` and `responses` give the same example.
    (single,) = (
        prepare_examples(data_args, tokenizer, LengthLimits(100, 100), "responses", cache_folder=tmp_path / "cache")
        .example(1)
        .sequences
    )
    assert (
        short.token_ids.tolist() == single.token_ids.tolist()
        and short.response_mask.tolist() == single.response_mask.tolist()
    )


def test_conversation_learns_only_last_response_by_default(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_jsonl(
        [{"messages": [*MESSAGES, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Three."}]}]
    )
    sequence = only(path, tmp_path, tokenizer, template="chatml", messages="messages")
    assert tokenizer.decode(sequence.token_ids[sequence.response_mask]) == "Three.<|im_end|>"
    assert "Two." in tokenizer.decode(sequence.token_ids[~sequence.response_mask])


TURNS = [*MESSAGES, {"role": "user", "content": "Sure?"}]
THREE = {"role": "assistant", "content": "Three."}


@pytest.mark.parametrize("kind", ["responses", "turns"])
@pytest.mark.parametrize("completion", ["Three.", [THREE], json.dumps([THREE])])
def test_messages_with_a_response_learn_it_alone(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, kind: Kind, completion: Any
) -> None:
    columns = {"template": "chatml", "messages": "prompt", "response": "completion"}
    path = write_jsonl([{"prompt": TURNS, "completion": completion}, {"prompt": TURNS[:1], "completion": completion}])
    data_args = DataConfig.model_validate({"file_name": path, **columns})
    rows = prepare_examples(data_args, tokenizer, LengthLimits(100, 100), kind, cache_folder=tmp_path / "cache")
    for number, before in enumerate((["One?", "Two.", "Sure?"], ["One?"])):
        (sequence,) = rows.example(number).sequences
        assert tokenizer.decode(sequence.token_ids[sequence.response_mask]) == "Three.<|im_end|>"
        context = str(tokenizer.decode(sequence.token_ids[~sequence.response_mask]))
        assert re.findall(r"\n(.*)<\|im_end\|>", context) == before


@pytest.mark.parametrize(
    ("row", "columns", "remedy"),
    [
        ({"prompt": TURNS, "completion": [THREE]}, {"messages": "prompt"}, "in data_args.response"),
        ({"prompt": MESSAGES, "completion": [THREE]}, {"response": "completion"}, "remove data_args.response"),
        ({"prompt": TURNS, "completion": [THREE, *TURNS]}, {"response": "completion"}, "one message of the assistant"),
    ],
)
def test_remedies_lead_to_rows_that_are_read(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, row: dict, columns: dict, remedy: str
) -> None:
    with pytest.raises(DataError) as caught:
        only(write_jsonl([row]), tmp_path, tokenizer, template="chatml", **{"messages": "prompt", **columns})
    assert caught.value.faults[0].code == "not_allowed" and remedy in caught.value.faults[0].remedy


@pytest.mark.parametrize("named", ["system", "meta.system"])
def test_a_column_of_system_messages_is_refused(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, named: str
) -> None:
    path = write_jsonl([{"q": "One?", "a": "Two.", "system": "", "meta": {"system": "Be brief."}}])
    with pytest.raises(DataError) as caught:
        only(path, tmp_path, tokenizer, template="chatml", prompt="q", response="a", system=named)
    (fault,) = caught.value.faults
    assert fault.code == "contradiction" and f"data_args.system is '{named}'" in fault.problem
    said = only(path, tmp_path, tokenizer, template="chatml", prompt="q", response="a", system="Be a system.")
    assert "Be a system." in tokenizer.decode(said.token_ids)


GREETED = [{"role": "assistant", "content": "Hello."}, *MESSAGES]


@pytest.mark.parametrize("template", ["native", "raw"])
def test_an_unopened_turn_is_refused_or_context(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    columns = {"template": template, "messages": "messages"}

    def prepare(rows: list[dict]) -> ExampleSet:
        data_args = DataConfig.model_validate({"file_name": write_jsonl(rows), **columns})
        return prepare_examples(data_args, tokenizer, LengthLimits(99, 99), "turns", cache_folder=tmp_path / "cache")

    with pytest.raises(DataError) as caught:
        prepare([{"messages": GREETED}])
    (fault,) = caught.value.faults
    assert fault.code == "not_supported" and "opens no turn" in fault.problem
    (sequence,) = prepare([{"messages": [GREETED[0] | {"train": False}, *MESSAGES]}]).example(0).sequences
    assert tokenizer.decode(sequence.token_ids[sequence.response_mask]) == "Two.<|endoftext|>"
    alone = only(write_jsonl([{"messages": GREETED}]), tmp_path, tokenizer, **columns)  # loss_on: response
    assert sequence.token_ids.tolist() == alone.token_ids.tolist()


def test_a_first_turn_of_chatml_is_learnt(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_jsonl([{"messages": GREETED}])
    data_args = DataConfig.model_validate({"file_name": path, "template": "chatml", "messages": "messages"})
    rows = prepare_examples(data_args, tokenizer, LengthLimits(99, 99), "turns", cache_folder=tmp_path / "cache")
    (sequence,) = rows.example(0).sequences
    parts = np.split(sequence.token_ids, np.flatnonzero(np.diff(sequence.response_mask)) + 1)
    said = [
        "<|im_start|>assistant\n",
        "Hello.<|im_end|>",
        "\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert [tokenizer.decode(part) for part in parts] == [*said, "Two.<|im_end|>"]


def test_examples_beyond_either_limit_are_dropped_and_counted(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_jsonl([{"q": "q", "a": "a"}, {"q": "q" * 200, "a": "a"}, {"q": "q", "a": "a" * 200}])
    data_args = DataConfig.model_validate({"file_name": path, "template": "raw", "prompt": "q", "response": "a"})
    examples = prepare_examples(data_args, tokenizer, LengthLimits(20, 20), cache_folder=tmp_path / "cache")
    assert (len(examples), examples.too_long) == (1, {path: 2})
    with pytest.raises(DataError, match="prompt_length 20 .* response_length 1; 3 rows") as caught:
        prepare_examples(data_args, tokenizer, LengthLimits(20, 1), cache_folder=tmp_path / "cache")
    prompt, response = (
        len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("q", f"a{tokenizer.eos_token}")
    )
    (fault,) = caught.value.faults
    assert (fault.code, fault.place) == ("too_large", path)
    assert [int(number) for number in re.findall(r"\d+", fault.remedy)] == [prompt, response]


@pytest.mark.parametrize(
    ("row", "code", "said"),
    [
        ({"messages": MESSAGES[:1]}, "not_allowed", "role 'user'"),
        ({"messages": MESSAGES[1:]}, "missing", "'messages'"),
        ({"messages": [MESSAGES[0], {"role": "assistant", "content": ""}]}, "empty", "item 1 (role 'assistant')"),
    ],
)
def test_bad_examples_are_faults(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, row: dict, code: FaultCode, said: str
) -> None:
    path = write_jsonl([row])
    with pytest.raises(DataError) as caught:
        only(path, tmp_path, tokenizer, template="chatml", messages="messages")
    (fault,) = caught.value.faults
    assert coded([fault]) == [(code, f"{path}:1")] and said in fault.problem


def test_a_missing_response_is_a_fault(write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_jsonl([{"q": "One?"}])
    with pytest.raises(DataError, match="column 'a'") as caught:
        only(path, tmp_path, tokenizer, template="raw", prompt="q", response="a")
    assert coded(caught.value.faults) == [("missing", f"{path}:1")]


USER, YES = {"role": "user", "content": "What is one and one?"}, {"role": "assistant", "content": "The answer is two."}
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
FED = {"role": "tool", "content": "2", "tool_call_id": "call00000"}
LOSES = (
    "{% for m in messages %}{% if m['role'] == 'system' and loop.first %}[system]{{ m['content'] }}{% elif "
    "m['role'] == 'user' "
    "%}"
    "[user]{{ m['content'] }}{% elif m['role'] == 'assistant' %}[assistant]{% if m.tool_calls %}{{ m.tool_calls[0] | "
    "tojson }}{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Writes no second system message, no answer of a tool, no text beside a call, no second call and no thinking."""


def with_template(tokenizer: PreTrainedTokenizerFast, chat_template: str) -> PreTrainedTokenizerFast:
    made = copy.deepcopy(tokenizer)
    made.chat_template = chat_template
    return made


def prepared(
    write_jsonl: Write,
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    row: dict[str, Any],
    kind: Kind = "responses",
    chat_template: str = LOSES,
    **columns: Any,
) -> ExampleSet:
    made = with_template(tokenizer, chat_template)
    columns = {"messages": "messages", **columns, "file_name": write_jsonl([row])}
    return prepare_examples(
        DataConfig.model_validate(columns), made, LengthLimits(500, 500), kind, cache_folder=folder / "cache"
    )


@pytest.mark.parametrize(
    ("messages", "lost"),
    [
        (
            [USER, {"role": "system", "content": "Be brief, please."}, USER, YES],
            ["a system message after the first message"],
        ),
        ([USER, {"role": "system", "content": "Hm"}, USER, YES], ["a system message after the first message"]),
        ([USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, FED, YES], ["a tool's answer"]),
        (
            [USER, {"role": "assistant", "content": "Let us see.", "tool_calls": [CALL]}, FED, YES],
            ["an earlier turn's text beside a tool call", "a tool's answer"],
        ),
        ([{"role": "system", "content": "Be brief, please."}, USER, YES], []),
        ([{**USER, "name": "Ann"}, YES], ["a message's name"]),
        (
            [USER, {**YES, "name": "Ann"}, {**USER, "name": "Benjamin Bunny"}, {**YES, "name": "Ann"}],
            ["a message's name"],
        ),
        ([USER, {"role": "assistant", "content": "<think>So.</think>Yes."}, USER, YES], []),
    ],
)
def test_text_that_the_context_loses_is_counted(
    write_jsonl: Write,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    lost: list[str],
) -> None:
    found = prepared(write_jsonl, tmp_path, tokenizer, {"messages": messages})
    assert list(found.remarks) == [UNWRITTEN.format(place) for place in lost]
    assert [list(counts.values()) for counts in found.remarks.values()] == [[1]] * len(lost)


@pytest.mark.parametrize("kind", ["responses", "turns"])
@pytest.mark.parametrize(
    ("last", "part"),
    [
        ({"content": "Let us see what it is.", "tool_calls": [CALL]}, "the text"),
        ({"content": "So", "tool_calls": [CALL]}, "the text"),
        ({"content": "", "tool_calls": [CALL, CALL]}, "a tool call"),
        ({"content": "<think>One and one make two.</think>The answer is two."}, "the thinking"),
        ({"content": "<think>Hm</think>The answer is two."}, "the thinking"),
    ],
)
def test_assistant_text_lost_by_template_is_fault(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, kind: Kind, last: dict[str, Any], part: str
) -> None:
    with pytest.raises(DataError) as caught:
        prepared(write_jsonl, tmp_path, tokenizer, {"messages": [USER, {"role": "assistant", **last}]}, kind)
    (fault,) = caught.value.faults
    assert fault.code == "not_supported" and f" {part} of " in fault.problem and "message 2" in fault.problem


def test_user_text_lost_by_template_is_fault(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(DataError) as caught:
        prepared(
            write_jsonl,
            tmp_path,
            tokenizer,
            {"messages": [USER, YES]},
            chat_template=LOSES.replace("[user]{{ m['content'] }}", "."),
        )
    (fault,) = caught.value.faults
    assert fault.code == "not_supported" and "the user's message 1" in fault.problem


@pytest.mark.parametrize("kind", ["responses", "turns"])
def test_row_without_learnt_message_is_fault(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, kind: Kind
) -> None:
    with pytest.raises(DataError) as caught:
        prepared(write_jsonl, tmp_path, tokenizer, {"messages": [USER, YES | {"train": False}]}, kind)
    (fault,) = caught.value.faults
    assert fault.code == "no_effect" and "'train': false" in fault.problem


def test_messages_after_last_learnt_turn_are_dropped(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    row = {"messages": [USER, YES, USER, YES | {"train": False}]}
    sequence = prepared(write_jsonl, tmp_path, tokenizer, row, "turns").example(0).sequences[0]
    assert tokenizer.decode(sequence.token_ids) == f"[user]{USER['content']}[assistant]{YES['content']}<|im_end|>"
    assert tokenizer.decode(sequence.token_ids[sequence.response_mask]) == f"{YES['content']}<|im_end|>"


OPENS = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' and shown %}<think>\n</think>{% endif %}"
    "{{ m['content'].split('</think>')[-1] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>\n{{ '</think>' if shown }}{% endif %}"
)
"""Opens the thinking in the prompt, and drops it from every turn."""


def test_responses_continue_a_prompt_that_opens_thinking(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    row = {"messages": [USER, {"role": "assistant", "content": "<think>\nHm</think>Two."}]}
    sequence = prepared(write_jsonl, tmp_path, tokenizer, row, chat_template=OPENS).example(0).sequences[0]
    assert (
        tokenizer.decode(sequence.token_ids[~sequence.response_mask])
        == f"[user]{USER['content']}<|im_end|>[assistant]<think>\n"
    )
    assert tokenizer.decode(sequence.token_ids[sequence.response_mask]) == "Hm</think>Two.<|im_end|>"


def test_pair_shares_prompt_if_one_response_thinks(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    row = {"messages": [USER], "good": "<think>\nHm</think>Two.", "bad": "Two."}
    found = prepared(write_jsonl, tmp_path, tokenizer, row, "pairs", OPENS, chosen="good", rejected="bad")
    learnt = [tokenizer.decode(one.token_ids[one.response_mask]) for one in found.example(0).sequences]
    assert learnt == ["<think>\nHm</think>Two.<|im_end|>", "Two.<|im_end|>"]
    assert [list(counts.values()) for counts in found.remarks.values()] == [[1]], (
        "the response without thinking is said"
    )


@pytest.mark.parametrize(("own", "shown"), [({}, True), ({"shown": False}, False)])
def test_template_arguments_of_row_override_those_of_key(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, own: dict[str, Any], shown: bool
) -> None:
    row = {"messages": [USER, YES], "chat_template_kwargs": own}
    found = prepared(write_jsonl, tmp_path, tokenizer, row, chat_template=OPENS, chat_template_kwargs={"shown": True})
    assert ("</think>" in tokenizer.decode(found.example(0).sequences[0].token_ids)) == shown


def test_template_with_marks_unknown_to_tokenizer_is_fault(write_jsonl: Write, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        prepared(write_jsonl, tmp_path, with_spaces("never"), {"messages": [USER, YES]}, template="chatml")
    (fault,) = caught.value.faults
    assert coded([fault]) == [("unfit", "data_args.template")]
    assert "`native`" in fault.remedy and "chatml" not in fault.remedy


@pytest.mark.parametrize("workers", [1, 2])
def test_rows_are_prepared_by_several_processes(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, workers: int
) -> None:
    row = {"messages": [USER, YES, {"role": "system", "content": "Be brief, please."}, USER, YES]}
    columns = {"file_name": write_jsonl([row] * 4), "messages": "messages", "preprocessing_num_workers": workers}
    made, limits = with_template(tokenizer, LOSES), LengthLimits(500, 500)
    found = prepare_examples(DataConfig.model_validate(columns), made, limits, "turns", cache_folder=tmp_path / "cache")
    assert len(found) == 4 and [list(counts.values()) for counts in found.remarks.values()] == [[4]]


@pytest.mark.parametrize("template", ["native", "chatml"])
def test_template_arguments_that_nothing_reads_are_a_fault(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    with pytest.raises(DataError) as caught:
        prepared(
            write_jsonl,
            tmp_path,
            tokenizer,
            {"messages": [USER, YES]},
            template=template,
            chat_template_kwargs={"thinking": True},
        )
    assert coded(caught.value.faults) == [("unread", "data_args.chat_template_kwargs")]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_token_without_an_embedding_is_a_fault(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, missing: int
) -> None:
    made = copy.deepcopy(tokenizer)
    made.add_tokens(["<new>"], special_tokens=True)
    rows = [{"messages": MESSAGES}, {"messages": [MESSAGES[0], {"role": "assistant", "content": "<new>"}]}]
    columns = DataConfig.model_validate({"file_name": write_jsonl(rows), "messages": "messages"})
    if not missing:
        assert (
            len(prepare_examples(columns, made, LengthLimits(100, 100), cache_folder=tmp_path, embedded=len(made))) == 2
        )
        return
    with pytest.raises(DataError) as caught:
        prepare_examples(columns, made, LengthLimits(100, 100), cache_folder=tmp_path, embedded=len(made) - missing)
    (fault,) = caught.value.faults
    assert fault.code == "out_of_range" and fault.place.endswith("rows.jsonl:2")
    assert f"token {len(made) - 1}," in fault.problem


def with_spaces(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer that puts a space before a text as SentencePiece does: `legacy` (Llama 2, Mistral, Phi-3), or
    as Metaspace.
    """
    characters = [chr(code) for code in range(33, 127)] + ["\u2581", "\n"]
    merges = [("\u2581", "Y"), ("\u2581Y", "e"), ("\u2581Ye", "s"), ("\u2581", "\u2581"), ("Y", "e"), ("Ye", "s")]
    words = dict.fromkeys(["<unk>", "<s>", "</s>", *characters, *(left + right for left, right in merges)])
    backend = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges, unk_token="<unk>"))
    if kind == "legacy":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    backend.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


class InPython(PreTrainedTokenizer):
    """A tokenizer that has only Python code, as some models bring with them: no offsets, and a mask of special tokens
    that is all zeros. It adds BOS before a text and EOS after it.
    """

    def __init__(self, inner: PreTrainedTokenizerFast) -> None:
        self.inner = inner
        super().__init__(bos_token="<s>", eos_token="</s>", unk_token="<unk>")

    @property
    def vocab_size(self) -> int:
        return len(self.inner)

    def get_vocab(self) -> dict[str, int]:
        return self.inner.get_vocab()

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return self.inner.tokenize(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.inner.get_vocab().get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return {number: token for token, number in self.inner.get_vocab().items()}[index]  # raises KeyError

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        start, end = (self._convert_token_to_id(token) for token in ("<s>", "</s>"))
        return [start, *token_ids_0, *(token_ids_1 or []), end]


INSTRUCTS = (
    "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST]{{ m['content'] }}[/INST]"
    "{% else %}SPACE{{ m['content'] }}</s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("between", ["", " "])
@pytest.mark.parametrize("kind", ["legacy", "first", "always", "never", "python"])
@pytest.mark.parametrize("which", ["responses", "turns", "pairs"])
def test_response_tokens_equal_those_of_whole_text(
    write_jsonl: Write, tmp_path: Path, kind: str, which: Kind, between: str
) -> None:
    made: Any = InPython(with_spaces("legacy")) if kind == "python" else with_spaces(kind)
    template = INSTRUCTS.replace("SPACE", between)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}] * 2
    row = {"messages": turns[:-1] if which == "pairs" else turns, "good": "Yes", "bad": "No"}
    columns = {"chosen": "good", "rejected": "bad"} if which == "pairs" else {}
    sequences = prepared(write_jsonl, tmp_path, made, row, which, template, **columns).example(0).sequences
    for sequence, last in zip(sequences, ("Yes", "No"), strict=False):
        whole = f"<s>[INST]Hi[/INST]{between}Yes</s>[INST]Hi[/INST]{between}{last}</s>"
        assert sequence.token_ids.tolist() == made.encode(whole, add_special_tokens=False)
    if which == "pairs":
        encode = answered_encoder(renderer("native", with_template(made, template)), made, False)
        np.testing.assert_array_equal(encode(turns[:-1], "No"), sequences[1].token_ids)


def test_raw_text_without_offsets_is_tokenised_whole(write_jsonl: Write, tmp_path: Path) -> None:
    made: Any = InPython(with_spaces("legacy"))
    path = write_jsonl([{"question": "Hi\nNo:", "solution": " Yes"}])
    found = only(path, tmp_path, made, template="raw", prompt="question", response="solution")
    whole = made.inner.encode("<s>Hi\nNo: Yes</s>", add_special_tokens=False)
    assert found.token_ids.tolist() == whole
    assert found.response_mask.sum() == len(made.inner.tokenize("Yes</s>"))
    assert opening(made) == "<s>"


def test_padding_of_embedding_decodes_to_nothing_without_offsets() -> None:
    made: Any = InPython(with_spaces("legacy"))
    token_ids = made("Yes", add_special_tokens=False)["input_ids"]
    assert ResponseTexts(made)([*token_ids, len(made) + 3]) == made.decode(token_ids) != ""


def test_sentencepiece_model_alone_tokenises_as_its_library(write_jsonl: Write, tmp_path: Path) -> None:
    """Llama 2's folder without tokenizer.json, whose settings ask for the slow tokenizer."""
    out, lines = io.BytesIO(), [f"Human: What is {left} + {right}? Yes\n" for left in range(9) for right in range(9)]
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=out,
        model_type="bpe",
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(out.getvalue())
    settings = {"tokenizer_class": "LlamaTokenizer", "use_fast": False, "legacy": True, "add_bos_token": True}
    settings |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    path = write_jsonl([{"question": "Human: What is 3 + 4?", "solution": " Yes, 7"}])
    made: Any = load_tokenizer(str(folder))
    found = only(path, tmp_path, made, template="raw", prompt="question", response="solution")
    library = SentencePieceProcessor(model_proto=out.getvalue())
    whole = library.encode("Human: What is 3 + 4? Yes, 7")
    assert found.token_ids.tolist() == [library.bos_id(), *whole, library.eos_id()]
    assert found.response_mask.sum() == len(whole) - len(library.encode("Human: What is 3 + 4?")) + 1


@pytest.mark.parametrize(
    ("held_out", "further"),
    [
        ({}, {"shown": True}),
        ({"chat_template_kwargs": {}}, {}),
        ({"chat_template_kwargs": {"a": 1}}, {"a": 1}),
        ({"template": "raw"}, None),
    ],
)
def test_validation_rows_render_like_training_rows(held_out: dict[str, Any], further: dict[str, Any] | None) -> None:
    trained = DataConfig.model_validate({"file_name": "a", "chat_template_kwargs": {"shown": True}})
    assert (
        DataConfig.model_validate({"file_name": "b", **held_out}).rendered_as(trained).chat_template_kwargs == further
    )
    assert DataConfig.model_validate({"file_name": "b"}).rendered_as(None).chat_template_kwargs is None
