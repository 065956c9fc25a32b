"""Chat templates: the text of a prompt, of an example's response, and of every assistant turn of a conversation."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from roll.data.chat import Template, TemplateFault, chatml, qwen2_5, raw, render_example, render_turns, renderer
from roll.data.native import NativeTemplate

USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "Yes."}


def test_chatml() -> None:
    assert chatml([SYSTEM, USER], True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chatml([USER, ASSISTANT], False) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"


def test_qwen2_5_adds_system_message_only_if_absent() -> None:
    assert qwen2_5([USER], True) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert qwen2_5([SYSTEM, USER], True) == chatml([SYSTEM, USER], True)


def test_raw_adds_nothing() -> None:
    assert raw([USER], True) == "Hi"
    assert raw([SYSTEM, USER], True) == "Be brief.\n\nHi"


def test_native_is_the_tokenizer_s_own(tokenizer: PreTrainedTokenizerFast) -> None:
    assert renderer("native", tokenizer)([USER], True) == "[user]Hi<|endoftext|>\n[assistant]"


def test_a_native_template_that_refuses_says_so(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateFault, match="roles must alternate"):
        renderer("native", tokenizer)([USER], True)


@pytest.mark.parametrize("key", ["tool_calls", "reasoning_content"])
@pytest.mark.parametrize("template", ["chatml", "raw", "native"])
def test_message_key_ignored_by_template_is_refused(
    tokenizer: PreTrainedTokenizerFast, template: Template, key: str
) -> None:
    with pytest.raises(TemplateFault, match=f"'{key}', .* '{template}'"):
        renderer(template, tokenizer)([USER, ASSISTANT | {key: ["add"]}], False)


def test_native_needs_a_template(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="no chat template"):
        renderer("native", tokenizer)


@pytest.mark.parametrize(
    ("template", "response"),
    [
        ("chatml", "Yes.<|im_end|>"),
        ("qwen2_5", "Yes.<|im_end|>"),
        ("raw", "Yes.<|endoftext|>"),
        ("native", "Yes.<|endoftext|>"),
    ],
)
def test_an_example_s_response_ends_its_turn_once(
    tokenizer: PreTrainedTokenizerFast, template: Template, response: str
) -> None:
    render = renderer(template, tokenizer)
    assert render_example([USER, ASSISTANT], render, "<|endoftext|>") == (render([USER], True), response)


def test_native_template_without_end_gets_eos(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tokenizer, "chat_template", "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    )
    prompt, response = render_example([USER, ASSISTANT], renderer("native", tokenizer), "<|endoftext|>")
    assert (prompt, response) == ("user: Hi\n", "assistant: Yes.\n<|endoftext|>")


def test_a_template_that_rewrites_the_prompt_is_refused() -> None:
    with pytest.raises(TemplateFault, match="differently"):
        render_example([USER, ASSISTANT], lambda messages, generate: f"{len(messages)} messages", "</s>")


AGAIN = {"role": "user", "content": "Sure?"}
LAST = {"role": "assistant", "content": "Quite."}
QWEN = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are Qwen.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "<s>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim "
    "}}<|eot_id|>{% "
    "endfor "
    "%}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}</s>{% else %}{{ m['content'] }}\n\n{% endif %}{% endfor %}"
)
NO_END = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt "
    "%}assistant: "
    "{% "
    "endif "
    "%}"
)
DROPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = {"role": "assistant", "content": "<think>Hm.</think>Yes."}


@pytest.mark.parametrize(
    ("chat_template", "turns"),
    [
        (QWEN, ["Yes.<|im_end|>", "Quite.<|im_end|>"]),
        (LLAMA, ["Yes.<|eot_id|>", "Quite.<|eot_id|>"]),
        (MISTRAL, [" Yes.</s>", " Quite.</s>"]),
        (NO_END, ["Yes.", "Quite.\n</s>"]),
        (DROPS_THINKING, ["Yes.<|im_end|>", "Quite.<|im_end|>"]),
    ],
)
@pytest.mark.parametrize("system", [[], [SYSTEM]])
def test_every_turn_of_the_assistant_is_found(
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    chat_template: str,
    turns: list[str],
    system: list[dict[str, str]],
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", chat_template)
    render = renderer("native", tokenizer)
    conversation = [*system, USER, ASSISTANT, AGAIN, LAST]
    pieces = render_turns(conversation, render, "</s>")
    assert pieces[1::2] == turns
    assert "".join(pieces) == "".join(render_example(conversation, render, "</s>")), "nothing is lost or added"
    assert pieces[0] == render([*system, USER], True)


def test_one_turn_is_prompt_and_response() -> None:
    assert render_turns([SYSTEM, USER, ASSISTANT], chatml, "</s>") == list(
        render_example([SYSTEM, USER, ASSISTANT], chatml, "</s>")
    )


def test_raw_template_refuses_several_turns() -> None:
    with pytest.raises(TemplateFault, match="message 2 of 4"):
        render_turns([USER, ASSISTANT, AGAIN, LAST], raw, "</s>")


# Templates that render a turn differently once others follow it, each with one trait of a published family.
HEAD = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
EMPTY_THINKING = (
    HEAD + "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}" + TAIL
)
KEEPS_LAST_THINKING = (
    HEAD + "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ "
    "m['content'] "
    "}}" + TAIL
)
END_IN_NEXT = (
    "{% for m in messages %}<|{{ 'observation' if m['role'] == 'tool' else m['role'] }}|>\n{{ m['content'] }}"
    "{% for call in m.tool_calls or () %}<tool_call>{{ call.function.name }}{{ call.function.arguments | tojson "
    "}}</tool_call>{% "
    "endfor "
    "%}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
EOS_AFTER_LAST = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
RETURNS = (
    "{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}"
    "{{ '<|return|>' if loop.last and m['role'] == 'assistant' and not add_generation_prompt else '<|end|>' }}{% "
    "endfor "
    "%}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
OPENS_THINKING = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'].split('</think>')[-1] }}{{ '<|end|>' if m['role'] == "
    "'assistant' }}{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
MARKS_TURNS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|end|>\n{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKS_ANSWERS = MARKS_TURNS.replace(
    "{% generation %}{{ m['content'] }}<|end|>\n{% endgeneration %}",
    "{{ m['content'].split('=')[0] }}={% generation %}{{ m['content'].split('=')[1] }}{% endgeneration %}<|end|>\n",
)
MOVES_SYSTEM = (
    "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% for m in messages if m['role'] != 'system' %}{% if m['role'] == 'user' %}[INST]{{ system if m == messages | "
    "selectattr('role', "
    "'equalto', 'user') | list | last }}{{ m['content'] }}[/INST]{% else %}{{ m['content'] }}</s>{% endif %}{% "
    "endfor "
    "%}"
)
READS_PARTS = HEAD + "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}" + TAIL
FAMILY_MARKS = (
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|end|>",
    "<|start|>",
    "<|message|>",
    "<|return|>",
    "<|im_end|>",
)
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SAYS_AND_CALLS = {"role": "assistant", "content": "So:", "tool_calls": [CALL]}
FED = {"role": "tool", "content": "3", "tool_call_id": "call00000"}


def learnt_pieces(
    tokenizer: PreTrainedTokenizerFast, chat_template: str, conversation: list[dict[str, Any]]
) -> list[str]:
    """Return the pieces of a conversation with a template, for a tokenizer that has the marks of all families."""
    made = deepcopy(tokenizer)
    made.add_special_tokens({"additional_special_tokens": list(FAMILY_MARKS)})
    made.chat_template = chat_template
    template = renderer("native", made)
    return render_turns(
        conversation, template, "</s>", template.marks, template.spans if template.marks_turns else None
    )


@pytest.mark.parametrize(
    ("chat_template", "conversation", "pieces"),
    [
        (
            EMPTY_THINKING,
            [USER, ASSISTANT, AGAIN, LAST],
            [
                "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
                "<think>\n\n</think>\n\nYes.<|im_end|>",
                "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n",
                "<think>\n\n</think>\n\nQuite.<|im_end|>",
            ],
        ),
        (
            KEEPS_LAST_THINKING,
            [USER, ASSISTANT | {"reasoning_content": "Hm."}, AGAIN, LAST],
            [
                "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
                "<think>\nHm.\n</think>\n\nYes.<|im_end|>",
                "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n",
                "Quite.<|im_end|>",
            ],
        ),
        (
            KEEPS_LAST_THINKING.replace("reasoning_content", "thinking"),
            [USER, ASSISTANT | {"reasoning_content": "Hm."}],
            ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<think>\nHm.\n</think>\n\nYes.<|im_end|>"],
        ),
        (
            DROPS_THINKING,
            [USER, THINKS, AGAIN, LAST],
            [
                "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
                "<think>Hm.</think>Yes.<|im_end|>",
                "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n",
                "Quite.<|im_end|>",
            ],
        ),
        (
            END_IN_NEXT,
            [USER, ASSISTANT, AGAIN, CALLS, FED, LAST],
            [
                "<|user|>\nHi<|assistant|>\n",
                "Yes.<|user|>",
                "\nSure?<|assistant|>\n",
                '<tool_call>add{"x": 1}</tool_call><|observation|>',
                "\n3<|assistant|>\n",
                "Quite.<|user|>",
            ],
        ),
        (
            END_IN_NEXT,
            [USER, CALLS],
            ["<|user|>\nHi<|assistant|>\n", '<tool_call>add{"x": 1}</tool_call><|observation|>'],
        ),
        (
            END_IN_NEXT,
            [USER, SAYS_AND_CALLS],
            ["<|user|>\nHi<|assistant|>\n", 'So:<tool_call>add{"x": 1}</tool_call><|observation|>'],
        ),
        (END_IN_NEXT, [USER, THINKS], ["<|user|>\nHi<|assistant|>\n", "<think>Hm.</think>Yes.<|user|>"]),
        (
            EOS_AFTER_LAST,
            [USER, ASSISTANT, AGAIN, LAST],
            [
                "<|user|>\nHi<|end|>\n<|assistant|>\n",
                "Yes.<|end|>",
                "\n<|user|>\nSure?<|end|>\n<|assistant|>\n",
                "Quite.<|end|>\n<|endoftext|>",
            ],
        ),
        (
            RETURNS,
            [USER, ASSISTANT, AGAIN, LAST],
            [
                "<|start|>user<|message|>Hi<|end|><|start|>assistant",
                "<|message|>Yes.<|end|>",
                "<|start|>user<|message|>Sure?<|end|><|start|>assistant",
                "<|message|>Quite.<|return|>",
            ],
        ),
        (
            OPENS_THINKING,
            [USER, THINKS, AGAIN, LAST],
            [
                "<|user|>Hi<|assistant|><think>\n",
                "Hm.</think>Yes.<|end|>",
                "<|user|>Sure?<|assistant|>",
                "Quite.<|end|>",
            ],
        ),
        (
            OPENS_THINKING,
            [USER, ASSISTANT | {"reasoning_content": "Hm."}],
            ["<|user|>Hi<|assistant|><think>\n", "Hm.\n</think>\n\nYes.<|end|>"],
        ),
        (
            MARKS_TURNS,
            [USER, ASSISTANT, AGAIN, LAST],
            [
                "<|user|>Hi<|end|>\n<|assistant|>",
                "Yes.<|end|>",
                "\n<|user|>Sure?<|end|>\n<|assistant|>",
                "Quite.<|end|>",
            ],
        ),
        (
            MARKS_ANSWERS,
            [USER, {"role": "assistant", "content": "1+1=2"}, AGAIN, {"role": "assistant", "content": "2+2=4"}],
            [
                "<|user|>Hi<|end|>\n<|assistant|>1+1=",
                "2<|end|>",
                "\n<|user|>Sure?<|end|>\n<|assistant|>2+2=",
                "4<|end|>",
            ],
        ),
        (READS_PARTS, [USER, ASSISTANT], ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "Yes.<|im_end|>"]),
    ],
)
def test_each_turn_is_learnt_like_a_last_turn(
    tokenizer: PreTrainedTokenizerFast, chat_template: str, conversation: list[dict[str, Any]], pieces: list[str]
) -> None:
    assert learnt_pieces(tokenizer, chat_template, conversation) == pieces


def test_a_system_message_that_moves_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(TemplateFault, match="message 3 of 5"):
        learnt_pieces(tokenizer, MOVES_SYSTEM, [SYSTEM, USER, ASSISTANT, AGAIN, LAST])
    assert learnt_pieces(tokenizer, MOVES_SYSTEM, [SYSTEM, USER, ASSISTANT])[1] == "Yes.</s>"


def test_turn_split_by_its_answer_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    """As with Gemma 4, which writes the text of a turn after the answer to its call."""
    late = (
        "{% for m in messages %}{% if m['role'] != 'tool' %}<|{{ m['role'] }}|>{% for call in m.tool_calls or () "
        "%}<tool_call>"
        "{{ call.function.arguments | tojson }}{% endfor %}{% if m.tool_calls and not loop.last %}[{{ "
        "messages[loop.index].content }}]"
        "{% endif %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt "
        "%}<|assistant|>{% "
        "endif "
        "%}"
    )
    with pytest.raises(TemplateFault, match="message 2 of 4"):
        learnt_pieces(tokenizer, late, [USER, SAYS_AND_CALLS, FED, LAST])


def test_message_excluded_from_learning_is_context(tokenizer: PreTrainedTokenizerFast) -> None:
    conversation = [USER, ASSISTANT | {"train": False}, AGAIN, LAST]
    assert render_turns(conversation, chatml, "</s>") == [chatml([USER, ASSISTANT, AGAIN], True), "Quite.<|im_end|>"]


def test_marks_that_leave_a_turn_out_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    template = MARKS_TURNS.replace("m['role'] == 'assistant'", "m['role'] == 'assistant' and m['content'] != 'Yes.'")
    with pytest.raises(TemplateFault, match="mark nothing"):
        learnt_pieces(tokenizer, template, [USER, ASSISTANT, AGAIN, LAST])


def test_probe_texts_in_conversation_do_no_harm() -> None:
    conversation = [
        {"role": "user", "content": "Quokka0x Wombat"},
        {"role": "assistant", "content": "Quokka"},
        AGAIN,
        LAST,
    ]
    assert "".join(render_turns(conversation, chatml, "</s>")) == chatml(conversation, False).rstrip()


def test_arguments_are_text_where_a_template_joins_strings(tokenizer: PreTrainedTokenizerFast) -> None:
    joins = END_IN_NEXT.replace("{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}")
    assert learnt_pieces(tokenizer, joins, [USER, CALLS])[1] == '<tool_call>add{"x": 1}</tool_call><|observation|>'


@pytest.mark.parametrize("template", ["chatml", "qwen2_5"])
def test_a_named_template_needs_its_marks(template: Template) -> None:
    plain = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0, "Hi": 1}, "<unk>")), unk_token="<unk>"
    )
    with pytest.raises(ValueError, match=r"<\|im_start\|> is"):
        renderer(template, plain)


def test_a_named_template_begins_as_the_tokenizer_does(tokenizer: PreTrainedTokenizerFast) -> None:
    made = deepcopy(tokenizer)
    made.add_special_tokens({"bos_token": "<s>"})
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", made.convert_tokens_to_ids("<s>"))]
    )
    text = renderer("chatml", made)([USER], True)
    assert text == "<s>" + chatml([USER], True)
    assert made.tokenize(text).count("<s>") == 1


@pytest.mark.parametrize("more", ["<|message|>", "{% if add_generation_prompt %}<|message|>{% endif %}"])
def test_template_that_always_opens_turns_is_refused(tokenizer: PreTrainedTokenizerFast, more: str) -> None:
    opens = (
        "{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endfor "
        "%}<|start|>assistant" + more
    )
    for conversation in ([USER, ASSISTANT], [USER, ASSISTANT, AGAIN, LAST]):
        with pytest.raises(TemplateFault, match="opens a turn"):
            learnt_pieces(tokenizer, opens, conversation)


def test_start_of_next_message_is_not_learnt(tokenizer: PreTrainedTokenizerFast) -> None:
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token if loop.last and m['role'] == "
        "'assistant' "
        "}}{% "
        "endfor "
        "%}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    pieces = ["<|user|>Hi<|assistant|>", "Yes.", "<|user|>Sure?<|assistant|>", "Quite.<|endoftext|>"]
    assert learnt_pieces(tokenizer, template, [USER, ASSISTANT, AGAIN, LAST]) == pieces


@pytest.mark.parametrize(("closing", "end"), [("<|end|>", "<|end|>"), ("", "</s>")])
def test_tool_call_without_turn_end_gets_one(tokenizer: PreTrainedTokenizerFast, closing: str, end: str) -> None:
    template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% for call in m.tool_calls or () %}"
        f"<tool_call>{{{{ call.function.arguments | tojson }}}}</tool_call>{closing}{{% endfor %}}"
        "{% if not m.tool_calls %}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert learnt_pieces(tokenizer, template, [USER, CALLS]) == [
        "[user]Hi<|end|>[assistant]",
        f'<tool_call>{{"x": 1}}</tool_call>{end}',
    ]


@pytest.mark.parametrize("calls", ["add", [1], {"name": "add"}, [{"function": "add"}]])
def test_calls_that_are_no_objects_are_refused(tokenizer: PreTrainedTokenizerFast, calls: Any) -> None:
    with pytest.raises(TemplateFault, match="tool_calls of|function of|no attribute"):
        learnt_pieces(tokenizer, END_IN_NEXT, [USER, ASSISTANT | {"tool_calls": calls}])


def test_a_call_may_name_its_function_itself(tokenizer: PreTrainedTokenizerFast) -> None:
    flat = END_IN_NEXT.replace("call.function.", "call.")
    conversation = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL["function"]]}, FED, LAST]
    assert learnt_pieces(tokenizer, flat, conversation)[1::2] == [
        '<tool_call>add{"x": 1}</tool_call><|observation|>',
        "Quite.<|user|>",
    ]


def test_template_variables_exclude_those_it_sets(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {
        "default": "{%- set mine = 1 %}{% for m in messages %}{%- generation -%}{{ m.thinking }}{% endgeneration %}{% "
        "break "
        "%}{% endfor %}",
        "tool_use": "{{ mine if enable_thinking is defined and 'thinking' in tools }}",
    }
    monkeypatch.setattr(tokenizer, "chat_template", sources)
    assert NativeTemplate(tokenizer).variables == {"messages", "mine", "enable_thinking", "tools"}
    monkeypatch.setattr(tokenizer, "chat_template", sources["default"])
    assert NativeTemplate(tokenizer).variables == {"messages"}
