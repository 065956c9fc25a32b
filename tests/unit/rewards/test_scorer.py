"""The input of reward models, and the rewards that are made from their scores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.tiny.make_model import END_ID, PAD_ID, build_tokenizer
from roll.config.schema.model import DataConfig
from roll.data.chat import Template, TemplateFault, renderer
from roll.data.examples import LengthLimits, prepare_examples
from roll.models.value import scored_token
from roll.rewards.judges.reward_models import Scorer
from roll.runs.rlvr.reward_models import answered_encoder, message_encoder, question_text, requested_conversation
from roll.types import Ints, Prompt, RewardOutcome, RewardResult

SYSTEM = {"role": "system", "content": "be brief"}
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "1+1="}], "good": "2", "bad": "3"},
    {"messages": [SYSTEM, {"role": "user", "content": "a?"}], "good": "x y ", "bad": ""},
    {
        "messages": [
            {"role": "user", "content": "a?"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c?"},
        ],
        "good": "d\ne",
        "bad": "f",
    },
]


@pytest.mark.parametrize("template", ["chatml", "qwen2_5", "raw"])
def test_scorer_receives_tokens_of_training(template: Template, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    columns = {
        "file_name": str(file),
        "template": template,
        "messages": "messages",
        "chosen": "good",
        "rejected": "bad",
    }
    data_args, tokenizer = DataConfig.model_validate(columns), build_tokenizer()
    trained = prepare_examples(
        data_args, tokenizer, LengthLimits(500, 500), "scored_pairs", cache_folder=tmp_path / "cache"
    )
    encode = answered_encoder(renderer(template, tokenizer), tokenizer, template == "raw")
    assert len(trained) == len(ROWS)
    for index, row in enumerate(ROWS):
        conversation = requested_conversation(row, [data_args])
        for sequence, response in zip(trained.example(index).sequences, (row["good"], row["bad"]), strict=True):
            np.testing.assert_array_equal(encode(conversation, response), sequence.token_ids)


@pytest.mark.parametrize("ending", ["<|im_end|>\n", "<|im_end|>", "<|im_end|>\n\n"])
def test_what_is_scored_is_the_whole_conversation(ending: str) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for one in messages %}{{ '<|im_start|>' + one.role + '\\n' + one.content + '" + ending + "' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ).replace("\n", "\\n")
    encode = answered_encoder(renderer("native", tokenizer), tokenizer, False)
    for conversation, response in (
        (ROWS[0]["messages"], "2"),
        (ROWS[2]["messages"], "d\ne "),
        (ROWS[0]["messages"], ""),
    ):
        whole = [*conversation, {"role": "assistant", "content": response}]
        applied: Any = tokenizer.apply_chat_template(whole, return_dict=False)
        assert encode(conversation, response).tolist() == applied


def test_judge_message_ends_with_an_open_turn() -> None:
    tokenizer = build_tokenizer()
    encode = message_encoder(renderer("chatml", tokenizer), tokenizer, False)
    assert tokenizer.decode(encode("so?").tolist()) == "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(message_encoder(renderer("raw", tokenizer), tokenizer, True)("so?").tolist()) == "so?"


def test_held_out_row_uses_its_own_columns() -> None:
    training = DataConfig.model_validate({"file_name": "a", "messages": "messages"})
    held_out = DataConfig.model_validate({"file_name": "b", "prompt": "problem", "system": "be brief"})
    assert question_text(requested_conversation(ROWS[0], [training, held_out])) == "1+1="
    assert question_text(requested_conversation({"problem": "2+2="}, [training, held_out])) == "2+2="
    assert (
        question_text(requested_conversation(ROWS[2], [training, held_out])) == "user: a?\n\nassistant: b\n\nuser: c?"
    )


def test_score_is_read_at_last_unpadded_token() -> None:
    assert np.flatnonzero(scored_token(np.array([7, 8, END_ID], np.int32), PAD_ID)).tolist() == [2]
    assert np.flatnonzero(scored_token(np.array([7, 8, PAD_ID], np.int32), PAD_ID)).tolist() == [1]


class Lengths:
    """Implements `Classifier`: the score of a sequence is its length."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def scores(self, sequences: Sequence[Ints], shown: Sequence[object]) -> Sequence[float]:
        assert len(shown) == len(sequences)
        self.asked.append(len(sequences))
        return [float(len(tokens)) for tokens in sequences]


def test_what_is_too_long_gets_no_verdict() -> None:
    def encode(prompt: Prompt, response: str) -> tuple[Ints, None]:
        return np.zeros(len(prompt.token_ids) + len(response), np.int32), None

    classifier = Lengths()
    scorer = Scorer(classifier, encode, 6, failed_value=-2.0)
    prompt = Prompt(0, np.zeros(3, np.int32), "", "d", {})
    first, second, third = asyncio.run(scorer.score(prompt, ["ab", "abcd", "abc"]))
    assert (first, third) == (RewardResult(5.0), RewardResult(6.0))
    assert second.outcome is RewardOutcome.UNAVAILABLE and second.value == -2.0 and "7 tokens" in second.note
    asyncio.run(scorer.score(prompt, ["abcdef"]))
    assert classifier.asked == [2]


def test_what_the_template_refuses_gets_no_verdict() -> None:
    def encode(prompt: Prompt, response: str) -> tuple[Ints, None]:
        if not response:
            raise TemplateFault("an empty turn")
        return np.zeros(len(response), np.int32), None

    classifier = Lengths()
    scorer = Scorer(classifier, encode, 6, failed_value=0.0)
    first, second = asyncio.run(scorer.score(Prompt(0, np.zeros(3, np.int32), "", "d", {}), ["", "abc"]))
    assert first.outcome is RewardOutcome.CRASHED and first.note == "an empty turn" and second == RewardResult(3.0)
    assert classifier.asked == [1]
