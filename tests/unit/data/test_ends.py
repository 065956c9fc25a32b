"""Tests of what ends a response."""

import pytest
from transformers import PreTrainedTokenizerBase

from examples.tiny.make_model import build_tokenizer
from roll.config.schema.model import DataConfig, GeneratingConfig
from roll.data.chat import NO_END, EndOfTurn, ends_of
from roll.runs.role_models import sampling_of
from roll.types import Sampling

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LAST_HAS_MORE = (  # as Phi-3
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
NEXT_ENDS = (  # as GLM
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}"
    "{% for c in m.tool_calls %}{{ '<c>' + c.function.arguments.leaf + '</c>' }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
TWO_MARKS = (  # as Cohere
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|said|><|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ '### ' + m.role + '\n' + m.content + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\n' }}{% endif %}"
)


def tokenizer_with(template: str, *marks: str) -> PreTrainedTokenizerBase:
    made = build_tokenizer()
    made.add_special_tokens({"additional_special_tokens": [*marks]})  # pyright: ignore[reportArgumentType]
    made.chat_template = template
    return made


def found(made: PreTrainedTokenizerBase, template: str = "native") -> EndOfTurn:
    return ends_of(DataConfig.model_validate({"file_name": "rows.jsonl", "template": template}), made)


@pytest.mark.parametrize(
    "template, marks, ends",
    [
        (CHATML, ["<|im_start|>", "<|im_end|>"], ["<|im_end|>"]),
        (LAST_HAS_MORE, ["<|user|>", "<|assistant|>", "<|end|>"], ["<|end|>"]),
        (NEXT_ENDS, ["<|user|>", "<|assistant|>", "<|tool|>"], ["<|user|>", "<|tool|>"]),
        (TWO_MARKS, ["<|user|>", "<|assistant|>", "<|said|>", "<|end|>"], ["<|end|>"]),
        (PLAIN, [], []),
    ],
)
def test_templates_end_of_turn_is_found(template: str, marks: list[str], ends: list[str]) -> None:
    made = tokenizer_with(template, *marks)
    assert found(made) == EndOfTurn(tuple(made.get_vocab()[end] for end in ends))


def test_end_of_several_tokens_is_a_text() -> None:
    assert found(tokenizer_with(CHATML.replace("<|im_end|>", "(end)"))) == EndOfTurn((), ("(end)",))


@pytest.mark.parametrize("template", ["chatml", "qwen2_5"])
def test_own_chatml_ends_with_its_mark(template: str) -> None:
    made = tokenizer_with(PLAIN, "<|im_start|>", "<|im_end|>")
    assert found(made, template).token_ids == (made.convert_tokens_to_ids("<|im_end|>"),)


def test_raw_text_marks_no_end() -> None:
    assert (
        found(tokenizer_with(CHATML, "<|im_start|>", "<|im_end|>"), "raw") == ends_of(None, build_tokenizer()) == NO_END
    )


def test_documents_have_no_end_of_turn() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    assert ends_of(DataConfig.model_validate({"file_name": "documents.jsonl", "text": "text"}), tokenizer) == NO_END


def test_sampling_stops_at_ends_unless_ignored() -> None:
    end = EndOfTurn((7, 9), ("[end]",))
    sampling = sampling_of(GeneratingConfig.model_validate({"stop_strings": ("stop",)}), 5, 1, False, end)
    assert (sampling.stop_token_ids, sampling.end_texts, sampling.stop) == ((7, 9), ("[end]",), ("stop",))
    blind = sampling_of(GeneratingConfig.model_validate({"ignore_eos": True}), 5, 1, False, end)
    assert (blind.stop_token_ids, blind.end_texts) == ((), ())


def test_rewards_do_not_see_the_end() -> None:
    sampling = Sampling(5, stop_token_ids=(7,), end_texts=("[end]",))
    assert (
        sampling.without_stop_token([3, 7]),
        sampling.without_stop_token([7, 3]),
        sampling.without_stop_token([]),
    ) == ([3], [7, 3], [])
    assert (sampling.without_end_text("ok[end]"), sampling.without_end_text("ok")) == ("ok", "ok")
