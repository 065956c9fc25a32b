from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from roll.data.chat import Template, TemplateFault, chatml, qwen2_5, raw, render_example, renderer

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
