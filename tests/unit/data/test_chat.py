"""Chat templates: the text of a prompt, of an example's response, and of every assistant turn of a conversation."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from roll.data.chat import Template, TemplateFault, chatml, qwen2_5, raw, render_example, render_turns, renderer

USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "Yes."}


def test_chatml() -> None:
    assert chatml([SYSTEM, USER], True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chatml([USER, ASSISTANT], False) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"


def test_qwen2_5_adds_its_system_message_only_where_there_is_none() -> None:
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


def test_a_native_template_that_refuses_says_so(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateFault, match="roles must alternate"):
        renderer("native", tokenizer)([USER], True)


@pytest.mark.parametrize("key", ["tool_calls", "reasoning_content"])
@pytest.mark.parametrize("template", ["chatml", "raw", "native"])
def test_what_a_template_would_lose_of_a_message_is_refused(tokenizer: PreTrainedTokenizerFast, template: Template, key: str) -> None:
    with pytest.raises(TemplateFault, match=f"has '{key}', which the template '{template}' does not write"):
        renderer(template, tokenizer)([USER, ASSISTANT | {key: ["add"]}], False)


def test_native_needs_a_template(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="has no chat template"):
        renderer("native", tokenizer)


@pytest.mark.parametrize(
    ("template", "response"),
    [("chatml", "Yes.<|im_end|>"), ("qwen2_5", "Yes.<|im_end|>"), ("raw", "Yes.<|endoftext|>"), ("native", "Yes.<|endoftext|>")],
)
def test_an_example_s_response_ends_its_turn_once(tokenizer: PreTrainedTokenizerFast, template: Template, response: str) -> None:
    render = renderer(template, tokenizer)
    assert render_example([USER, ASSISTANT], render, "<|endoftext|>") == (render([USER], True), response)


def test_eos_is_appended_where_a_native_template_leaves_the_turn_open(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
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
    "<s>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}</s>{% else %}{{ m['content'] }}\n\n{% endif %}{% endfor %}"
)
NO_END = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
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
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, chat_template: str, turns: list[str], system: list[dict[str, str]]
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", chat_template)
    render = renderer("native", tokenizer)
    conversation = [*system, USER, ASSISTANT, AGAIN, LAST]
    pieces = render_turns(conversation, render, "</s>")
    assert pieces[1::2] == turns
    assert "".join(pieces) == "".join(render_example(conversation, render, "</s>")), "nothing is lost or added"
    assert pieces[0] == render([*system, USER], True)


def test_one_turn_is_prompt_and_response() -> None:
    assert render_turns([SYSTEM, USER, ASSISTANT], chatml, "</s>") == list(render_example([SYSTEM, USER, ASSISTANT], chatml, "</s>"))


@pytest.mark.parametrize("conversation", [[USER, THINKS, AGAIN, LAST], [USER, ASSISTANT, AGAIN, THINKS, AGAIN, LAST]])
def test_a_template_that_drops_earlier_thinking_is_refused_where_there_is_some(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, conversation: list[dict[str, str]]
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", DROPS_THINKING)
    number = conversation.index(THINKS) + 1
    with pytest.raises(TemplateFault, match=rf"message {number} of {len(conversation)} differently.*loss_on=response"):
        render_turns(conversation, renderer("native", tokenizer), "</s>")
    assert render_turns([*conversation[: number - 1], THINKS], renderer("native", tokenizer), "</s>")[-1].startswith("<think>")


def test_raw_contents_do_not_say_where_an_earlier_turn_began() -> None:
    with pytest.raises(TemplateFault, match="message 2 of 4"):
        render_turns([USER, ASSISTANT, AGAIN, LAST], raw, "</s>")
