"""The text of a response keeps the marks of thinking, also where the tokenizer calls them special."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from roll.backend import Rank
from roll.config.schema.model import ModelConfig
from roll.engines.hf.settings import HfGenerateSettings
from roll.engines.hf.strategy import HfGenerate
from roll.engines.vllm.settings import VllmConfig
from roll.models.thinking import ResponseTexts
from roll.rewards.answers import final_text
from roll.rollout.record import TurnEnds
from roll.types import Sampling
from tests import limits
from tests.unit.rollout.build import sampled

END = "<|im_end|>"
FAMILIES = [
    ["<think>", "</think>"],
    ["[THINK]", "[/THINK]"],
    ["<seed:think>", "</seed:think>"],
    ["<|channel>thought\n", "<channel|>"],
    ["<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"],
    ["<|START_THINKING|>", "<|END_THINKING|>"],
    ["<|inner_prefix|>", "<|inner_suffix|>"],
    ["<|begin_of_thought|>", "<|end_of_thought|>"],
    ["<thought>", "</thought>"],
    ["<longcat_think>", "</longcat_think>"],
    ["◁think▷", "◁/think▷"],
]
SPECIAL = [
    *(
        "<think>",
        "</think>",
        "[THINK]",
        "[/THINK]",
        "<seed:think>",
        "</seed:think>",
        "<|channel>",
        "<channel|>",
        "<|channel|>",
        "<|message|>",
    ),
    *(
        "<|end|>",
        "<|start|>",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        "<|inner_prefix|>",
        "<|inner_suffix|>",
        "<|begin_of_thought|>",
    ),
    *(
        "<|end_of_thought|>",
        "<thought>",
        "</thought>",
        "<longcat_think>",
        "</longcat_think>",
        "◁think▷",
        "◁/think▷",
        END,
        "<|tool|>",
    ),
]


def bytewise(special: list[str], plain: list[str] | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, and these tokens."""
    inner = Tokenizer(
        models.BPE(
            vocab={one: index for index, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]
        )
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    inner.add_tokens([AddedToken(one, special=False, normalized=False) for one in plain or []])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[return-value]


@pytest.mark.parametrize(("opened", "closed"), FAMILIES)
def test_marks_that_are_special_tokens_still_end_thinking(opened: str, closed: str) -> None:
    tokenizer = bytewise(SPECIAL)
    written = f"{opened}Well, first, let me see.{closed}Yes{END}"
    text = ResponseTexts(tokenizer)(ids_of(tokenizer, written))
    assert final_text(text) == "Yes"


def test_special_tokens_other_than_thinking_are_dropped() -> None:
    tokenizer = bytewise(SPECIAL)
    texts = ResponseTexts(tokenizer).several(
        [ids_of(tokenizer, f"<think>a€<|tool|></think> b{END}"), [], ids_of(tokenizer, END)]
    )
    assert texts == ["<think>a€</think> b", "", ""]


@pytest.mark.parametrize("plain", [["</think>"], []])
def test_without_special_marks_the_text_is_as_before(plain: list[str]) -> None:
    tokenizer = bytewise([END, "<|tool|>"], plain)
    ids = ids_of(tokenizer, f"a <|tool|></think>b{END}")
    assert ResponseTexts(tokenizer)(ids) == "a </think>b" == tokenizer.decode(ids, skip_special_tokens=True)


def test_turns_are_located_in_a_text_with_marks() -> None:
    tokenizer = bytewise(SPECIAL)
    ids, texts = ids_of(tokenizer, f"ab</think>cd{END}"), ResponseTexts(tokenizer)
    assert TurnEnds(texts)(sampled(ids, text=texts(ids)), [2, 10, 11, 12]).tolist() == [2, 3, 4, 6]


def test_hf_infer_keeps_the_marks() -> None:
    tokenizer = bytewise(SPECIAL)
    engine = HfGenerate(
        HfGenerateSettings("", ModelConfig.model_validate({}), 0), Rank("actor_infer", 0, 1, "", 0, "cpu", limits.START)
    )
    engine._tokenizer, engine._text, engine._model_ends = tokenizer, ResponseTexts(tokenizer), ids_of(tokenizer, END)
    ids = np.array(ids_of(tokenizer, f"[THINK]No[/THINK]Yes{END}"), np.int32)
    assert engine._completion(ids, None, Sampling(20)).text == "[THINK]No[/THINK]Yes"


def test_vllm_keeps_the_marks() -> None:
    from roll.engines.vllm.strategy import VllmGenerate

    tokenizer = bytewise(SPECIAL)
    engine = VllmGenerate(
        cast(Any, SimpleNamespace(returns_routes=False, engine=VllmConfig.model_validate({}))), cast(Any, None)
    )
    engine._texts = ResponseTexts(tokenizer)
    ids = ids_of(tokenizer, f"[THINK]No[/THINK]Yes{END}")
    sample = SimpleNamespace(token_ids=ids, weight_versions=(), logprobs=None, finish_reason="stop")
    [(_, completion)] = asyncio.run(engine._completions([(0, cast(Any, sample), 0)], Sampling(20)))
    assert completion.text == "[THINK]No[/THINK]Yes"
