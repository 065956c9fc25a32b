"""Sampling of prompts and examples: epochs, seeds, shares of domains, and resuming."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from roll.config.schema.model import DataConfig
from roll.config.schema.roles import RewardConfig
from roll.data.examples import ExampleSampler
from roll.data.prompts import PromptSampler, PromptSet, prepare_prompts
from roll.errors import DataError, FaultCode
from tests.faults import coded


@pytest.fixture
def prompts(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> PromptSet:
    """Return twelve prompts of the domain `a`, four of `b`, and none of `c`."""
    rows = [{"prompt": f"{tag}{number}", "tag": tag} for tag, count in (("a", 12), ("b", 4)) for number in range(count)]
    return make_prompts(tmp_path, tokenizer, rows, ("a", "b", "c"))


def make_prompts(
    folder: Path, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], domains: Sequence[str]
) -> PromptSet:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    data_args = DataConfig.model_validate({"file_name": str(path), "template": "raw", "prompt": "prompt"})
    rewards = {name: RewardConfig.model_validate({"tag_included": (name[0],)}) for name in domains}
    return prepare_prompts(data_args, tokenizer, 10, rewards, folder / "cache")


def test_set_identity_depends_on_rows_order_and_domains(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "one", "tag": "a", "answer": "1"}, {"prompt": "two", "tag": "b", "answer": "2"}]

    def identity(rows: list[dict[str, str]], domains: Sequence[str] = ("a", "b")) -> str:
        return make_prompts(tmp_path, tokenizer, rows, domains).identity

    same = identity(rows)
    assert same.startswith("2 rows, digest ") and identity(rows) == same
    others = [
        identity(rows[::-1]),
        identity([rows[0], rows[1] | {"answer": "3"}]),
        identity(rows, ("a", "bb")),
        identity(rows[:1]),
    ]
    assert len({same, *others}) == 5


def texts(sampler: PromptSampler, count: int) -> list[str]:
    return [prompt.text for prompt in sampler.draw(count)]


def test_every_epoch_draws_each_prompt_once_reordered(prompts: PromptSet) -> None:
    sampler = PromptSampler(prompts, seed=1)
    first, second = texts(sampler, 16), texts(sampler, 16)
    assert sorted(first) == sorted(second) == sorted(prompts.prompt(index, 0).text for index in range(16))
    assert first != second
    assert sampler.drawn == 32


def test_the_seed_alone_decides(prompts: PromptSet) -> None:
    drawn = texts(PromptSampler(prompts, seed=1), 40)
    one_by_one = PromptSampler(prompts, seed=1)
    assert [texts(one_by_one, 1)[0] for _ in range(40)] == drawn
    assert texts(PromptSampler(prompts, seed=2), 40) != drawn


def test_prompt_ids_count_the_draws_of_the_run(prompts: PromptSet) -> None:
    sampler = PromptSampler(prompts, seed=1)
    assert [prompt.prompt_id for prompt in [*sampler.draw(10), *sampler.draw(30)]] == list(range(40))


@pytest.mark.parametrize("shares", [None, {"a": 0.3, "b": 0.7}])
@pytest.mark.parametrize("before", [0, 7, 16, 37])
def test_a_restored_sampler_continues_exactly(prompts: PromptSet, shares: dict | None, before: int) -> None:
    whole = PromptSampler(prompts, 3, shares)
    expected = [(prompt.prompt_id, prompt.text) for prompt in whole.draw(before + 50)][before:]
    interrupted = PromptSampler(prompts, 3, shares)
    interrupted.draw(before)
    state = json.loads(json.dumps(interrupted.state_dict()))
    restored = PromptSampler(prompts, 3, shares)
    restored.draw(5)
    restored.load_state_dict(state)
    assert [(prompt.prompt_id, prompt.text) for prompt in restored.draw(50)] == expected


def test_domain_shares_hold_at_every_point(prompts: PromptSet) -> None:
    drawn = [prompt.domain for prompt in PromptSampler(prompts, 1, {"a": 0.25, "b": 0.75}).draw(200)]
    for count in range(1, 201):
        assert abs(Counter(drawn[:count])["a"] - 0.25 * count) <= 1
    assert Counter(drawn) == {"a": 50, "b": 150}
    assert [prompt.domain for prompt in PromptSampler(prompts, 1, {"a": 1.0, "b": 3.0}).draw(200)] == drawn


def test_default_domain_shares_are_proportional_to_rows(prompts: PromptSet) -> None:
    drawn = Counter(prompt.domain for prompt in PromptSampler(prompts, 1).draw(160))
    assert drawn == {"a": 120, "b": 40}


def test_a_domain_with_share_0_is_not_drawn(prompts: PromptSet) -> None:
    assert {prompt.domain for prompt in PromptSampler(prompts, 1, {"a": 0.0, "b": 1.0}).draw(20)} == {"b"}


@pytest.mark.parametrize(
    ("shares", "code", "key", "said"),
    [
        ({"a": 0.5, "b": 0.5, "d": 0.1}, "unknown_name", ".d", ""),
        ({"a": 0.5, "b": 0.5, "c": 0.1}, "empty", ".c", "0.1"),
        ({"a": 1.0}, "missing", "", "'b', which has 4 "),
        ({"a": 0.0, "b": 0.0}, "out_of_range", "", "0"),
    ],
)
def test_shares_that_cannot_be_are_errors(
    prompts: PromptSet, shares: dict[str, float], code: FaultCode, key: str, said: str
) -> None:
    with pytest.raises(DataError) as caught:
        PromptSampler(prompts, 1, shares)
    (fault,) = caught.value.faults
    assert coded([fault]) == [(code, f"data_args.domain_interleave_probs{key}")] and said in fault.problem


def test_lessons_are_drawn_and_resumed_the_same_way() -> None:
    whole = ExampleSampler(9, 5).draw(27)
    assert sorted(whole[:9]) == sorted(whole[9:18]) == list(range(9))
    assert whole[:9] != whole[9:18]
    sampler = ExampleSampler(9, 5)
    sampler.draw(13)
    restored = ExampleSampler(9, 5)
    restored.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert restored.ahead(14) == whole[13:]
    assert restored.draw(14) == whole[13:]
    assert restored.state_dict()["stream"]["position"] == 27


def test_the_first_draws_by_hand(prompts: PromptSet) -> None:
    """Each draw goes to the domain that would otherwise lag most behind its share: 0.3 n - drawn against 0.7 n - drawn
    for draw n.
    """
    drawn = [prompt.domain for prompt in PromptSampler(prompts, 1, {"b": 0.3, "a": 0.7}).draw(4)]
    assert drawn == ["a", "b", "a", "a"]
    assert [prompt.domain for prompt in PromptSampler(prompts, 1, {"b": 0.1, "a": 0.9}).draw(4)] == ["a"] * 4
