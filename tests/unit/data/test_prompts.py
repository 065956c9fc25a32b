"""Rows become tokenised prompts: faults in rows, the limit on length, reward domains, and the cache of prepared
rows.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from datasets.arrow_writer import ArrowWriter
from transformers import PreTrainedTokenizerFast

from roll.config.schema.model import DataConfig
from roll.config.schema.roles import RewardConfig
from roll.data import tables
from roll.data.prompts import PromptSet, prepare_prompts
from roll.errors import ConfigError, DataError, FaultCode
from tests import limits
from tests.faults import coded

Write = Callable[..., str]


def arguments(file_name: str | Sequence[str], **others: Any) -> DataConfig:
    columns = {} if "messages" in others else {"prompt": "prompt"}
    names = file_name if isinstance(file_name, str) else tuple(file_name)
    return DataConfig.model_validate({"file_name": names, "template": "chatml", **columns, **others})


def two_domains() -> dict[str, RewardConfig]:
    return {
        "math": RewardConfig.model_validate({"tag_included": ("gsm8k", "aime")}),
        "code": RewardConfig.model_validate({}),
    }


def test_rows_become_tokenised_prompts(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, one_domain: dict
) -> None:
    rows = [
        {"prompt": "What is one?", "answer": 1, "when": "2026-01-02"},
        {"prompt": "Two?", "answer": "x", "extra": [1, None]},
    ]
    prompts = prepare_prompts(
        arguments(write_jsonl(rows), system="Count."), tokenizer, 100, one_domain, tmp_path / "cache"
    )
    prompt = prompts.prompt(0, prompt_id=7)
    text = "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\nWhat is one?<|im_end|>\n<|im_start|>assistant\n"
    assert (len(prompts), prompt.prompt_id, prompt.domain, prompt.text) == (2, 7, "math_rule", text)
    assert prompt.token_ids.dtype == np.int32
    assert prompt.token_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(prompt.token_ids) == text
    assert [prompts.prompt(index, 0).row for index in range(2)] == rows
    assert [prompts.prompt(index, 0).place.rpartition(":")[2] for index in range(2)] == ["1", "2"]
    assert prompts.too_long == {}


def test_messages_and_parquet(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, one_domain: dict) -> None:
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": "One?"}]
    datasets.Dataset.from_list([{"messages": messages, "ground_truth": "1"}]).to_parquet(tmp_path / "rows.parquet")
    prompts = prepare_prompts(
        arguments(str(tmp_path / "rows.parquet"), messages="messages", template="native"),
        tokenizer,
        100,
        one_domain,
        tmp_path / "cache",
    )
    prompt = prompts.prompt(0, 0)
    assert prompt.text == "[system]Count.<|endoftext|>\n[user]One?<|endoftext|>\n[assistant]"
    assert prompt.row == {"messages": messages, "ground_truth": "1"}


BAD_PROMPTS: list[tuple[Any, FaultCode, str]] = [
    ('{"prompt": "a"', "malformed", "is not JSON"),
    ("[1]", "malformed", " a list"),
    ({"promt": "a", "answer": 1}, "missing", "'prompt' is missing (did you mean 'promt'?); the row has: promt, answer"),
    ({"prompt": None}, "missing", "'prompt' is null"),
    ({"prompt": 7}, "wrong_type", "'prompt' is a int: 7"),
    ({"prompt": ["a"]}, "wrong_type", "'prompt' is a list: ['a']"),
    ({"prompt": " \n"}, "empty", "'prompt'"),
]
BAD_MESSAGES: list[tuple[Any, FaultCode, str]] = [
    ({"messages": "hello"}, "malformed", "(Expecting value: line 1 column 1 (char 0)): 'hello'"),
    ({"messages": '"hello"'}, "wrong_type", "'messages' is a str: 'hello'"),
    ({"messages": '{"role": "user"}'}, "wrong_type", "'messages' is a dict: {'role': 'user'}"),
    ({"messages": 7}, "wrong_type", "'messages' is a int: 7"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not_supported", "type 'image_url'"),
    ({"messages": []}, "empty", "'messages'"),
    ({"messages": ["hello"]}, "wrong_type", "'messages' item 0 is a str"),
    ({"messages": [{"content": "a"}]}, "not_allowed", "'messages' item 0 has the role None"),
    ({"messages": [{"role": "human", "content": "a"}]}, "not_allowed", "'messages' item 0 has the role 'human'"),
    ({"messages": [{"role": "user", "content": None}]}, "missing", "'messages' item 0 "),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "wrong_type", "'messages' item 0 has a list"),
    ({"messages": [{"role": "user", "content": ""}]}, "empty", "'messages' item 0 (role 'user')"),
    (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        "not_allowed",
        "role 'assistant'",
    ),
]


@pytest.mark.parametrize(("column", "cases"), [("prompt", BAD_PROMPTS), ("messages", BAD_MESSAGES)])
def test_every_bad_row_is_named_before_training(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, one_domain: dict, column: str, cases: list
) -> None:
    good = {"prompt": "fine", "messages": [{"role": "user", "content": "fine"}]}
    path = write_jsonl([good, *(row for row, _, _ in cases), good])
    with pytest.raises(DataError) as caught:
        prepare_prompts(arguments(path, **{column: column}), tokenizer, 100, one_domain, tmp_path / "cache")
    faults = caught.value.faults
    assert coded(faults) == [(code, f"{path}:{number}") for number, (_, code, _) in enumerate(cases, start=2)]
    for fault, (_, _, said) in zip(faults, cases, strict=True):
        assert said in fault.problem
        assert fault.remedy


def test_many_bad_rows_are_counted_by_reason(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, one_domain: dict
) -> None:
    path = write_jsonl([{"prompt": ""}] * 30 + [{"other": 1}] * 5 + [{"prompt": "fine"}])
    with pytest.raises(DataError) as caught:
        prepare_prompts(arguments(path), tokenizer, 100, one_domain, tmp_path / "cache")
    assert len(caught.value.faults) == 21
    *named, counted = caught.value.faults
    assert {fault.code for fault in named} == {"empty"}
    assert (counted.code, counted.place) == ("unusable_rows", path)
    assert re.findall(r"\d+ of \d+|\d+ x '\w+'", counted.problem) == ["35 of 36", "30 x 'prompt'", "5 x 'prompt'"]


def test_fault_common_to_all_rows_is_summarised(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, one_domain: dict
) -> None:
    path = write_jsonl([{"question": "1+1="}] * 30)
    with pytest.raises(DataError) as caught:
        prepare_prompts(arguments(path), tokenizer, 100, one_domain, tmp_path / "cache")
    *named, counted = caught.value.faults
    assert coded(named) == [("missing", f"{path}:{number}") for number in (1, 2, 3)]
    assert counted.code == "unusable_rows" and counted.problem.startswith("30 of 30 ")
    assert "data_args" in counted.remedy


def test_a_row_is_named_by_its_id(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, one_domain: dict
) -> None:
    path = write_jsonl([{"prompt": "", "uid": 17}])
    with pytest.raises(DataError) as caught:
        prepare_prompts(arguments(path, id="uid"), tokenizer, 100, one_domain, tmp_path / "cache")
    assert caught.value.faults[0].place == f"{path}:1 (id 17)"


def test_long_prompts_are_dropped_and_counted_by_file(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, one_domain: dict
) -> None:
    first = write_jsonl([{"prompt": "a" * 10}, {"prompt": "xyz" * 99}, {"prompt": "zyx" * 99}], "first.jsonl")
    second = write_jsonl([{"prompt": "b"}], "second.jsonl")
    third = write_jsonl([{"prompt": "c"}, {"prompt": "c" * 999}], "third.jsonl")
    prompts = prepare_prompts(
        arguments([first, second, third], template="raw"), tokenizer, 60, one_domain, tmp_path / "cache"
    )
    assert prompts.too_long == {first: 2, third: 1}
    assert [prompts.prompt(index, 0).text for index in range(len(prompts))] == ["a" * 10, "b", "c"]


def test_prompt_limit_is_inclusive_and_empty_set_raises(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, one_domain: dict
) -> None:
    path = write_jsonl([{"prompt": "qqqq"}, {"prompt": "zzzz"}])
    shortest, longest = sorted(len(tokenizer(text)["input_ids"]) for text in ("qqqq", "zzzz"))
    assert (
        len(prepare_prompts(arguments(path, template="raw"), tokenizer, longest, one_domain, tmp_path / "cache")) == 2
    )
    with pytest.raises(DataError) as caught:
        prepare_prompts(arguments(path, template="raw"), tokenizer, 1, one_domain, tmp_path / "cache")
    (fault,) = caught.value.faults
    assert (fault.code, fault.place) == ("too_large", path)
    assert "2 prompts" in fault.problem and "prompt_length, 1 " in fault.problem and f" {shortest}," in fault.remedy


def test_tags_route_rows_to_domains(write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_jsonl([{"prompt": "p", "tag": tag} for tag in ("gsm8k", "code", "aime")])
    prompts = prepare_prompts(arguments(path), tokenizer, 100, two_domains(), tmp_path / "cache")
    assert [prompts.prompt(index, 0).domain for index in range(3)] == ["math", "code", "math"]


def test_rows_that_no_domain_takes_are_faults(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_jsonl(
        [{"prompt": "p", "tag": "code"}, {"prompt": "p", "tag": "gsm8"}, {"prompt": "p"}, {"prompt": "", "tag": "what"}]
    )
    with pytest.raises(DataError) as caught:
        prepare_prompts(arguments(path), tokenizer, 100, two_domains(), tmp_path / "cache")
    unknown, untagged, empty = caught.value.faults
    assert coded(caught.value.faults) == [
        ("unknown_name", f"{path}:2"),
        ("missing", f"{path}:3"),
        ("empty", f"{path}:4"),
    ]
    assert "'gsm8' (did you mean 'gsm8k'?)" in unknown.problem
    assert "'tag'" in untagged.problem and "'prompt'" in empty.problem


def test_unknown_tag_is_fault_with_one_domain(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rewards = {"sums": RewardConfig.model_validate({})}
    path = write_jsonl([{"prompt": "p", "tag": "other"}])
    with pytest.raises(DataError, match="'other'") as caught:
        prepare_prompts(arguments(path), tokenizer, 100, rewards, tmp_path / "cache")
    assert coded(caught.value.faults) == [("unknown_name", f"{path}:1")]


def test_tag_claimed_by_two_domains_is_fault(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rewards = {
        "math": RewardConfig.model_validate({"tag_included": ("code",)}),
        "code": RewardConfig.model_validate({}),
    }
    with pytest.raises(ConfigError, match="'code', .* 'math'") as caught:
        prepare_prompts(arguments(write_jsonl([{"prompt": "p"}])), tokenizer, 100, rewards, tmp_path / "cache")
    assert coded(caught.value.faults) == [("duplicate", "rewards.code.tag_included")]


def test_native_without_a_template_is_an_error(
    write_jsonl: Write,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    one_domain: dict,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    data_args = arguments(write_jsonl([{"prompt": "p"}]), template="native")
    with pytest.raises(DataError, match="'native'") as caught:
        prepare_prompts(data_args, tokenizer, 100, one_domain, tmp_path / "cache")
    assert coded(caught.value.faults) == [("unfit", "data_args.template")]


def test_an_empty_file_is_an_error(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, one_domain: dict
) -> None:
    path = write_jsonl([""])
    with pytest.raises(DataError) as caught:
        prepare_prompts(arguments(path), tokenizer, 100, one_domain, tmp_path / "cache")
    assert coded(caught.value.faults) == [("empty", path)]
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"] == []


def test_broken_parquet_file_raises_data_error(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, one_domain: dict
) -> None:
    (path := tmp_path / "rows.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match="parquet file") as caught:
        prepare_prompts(arguments(str(path)), tokenizer, 100, one_domain, tmp_path / "cache")
    assert coded(caught.value.faults) == [("unreadable", str(path))]


def test_a_cache_that_cannot_be_made_is_named(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, one_domain: dict
) -> None:
    (tmp_path / "cache").write_text("a file")
    cache = tmp_path / "cache" / "roll"
    with pytest.raises(DataError, match="HF_DATASETS_CACHE") as caught:
        prepare_prompts(arguments(write_jsonl([{"prompt": "One?"}])), tokenizer, 100, one_domain, cache)
    assert coded(caught.value.faults) == [("not_writable", str(cache))]


def test_a_full_disk_is_named(
    write_jsonl: Write,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    one_domain: dict,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(writer: ArrowWriter) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ArrowWriter, "finalize", full)
    with pytest.raises(DataError, match="No space left") as caught:
        prepare_prompts(arguments(write_jsonl([{"prompt": "One?"}])), tokenizer, 100, one_domain, tmp_path / "cache")
    assert coded(caught.value.faults) == [("not_writable", str(tmp_path / "cache"))]


def test_the_second_preparation_does_not_tokenise(
    write_jsonl: Write,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    one_domain: dict,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_jsonl([{"prompt": f"question {number}"} for number in range(5)])
    first = prepare_prompts(arguments(path), tokenizer, 100, one_domain, tmp_path / "cache")
    calls = []
    monkeypatch.setattr(
        tables, "_build", lambda folder, *others: calls.append(folder) or pytest.fail("tokenised again")
    )
    second = prepare_prompts(arguments(path), tokenizer, 100, one_domain, tmp_path / "cache")
    assert _texts(second) == _texts(first)
    assert len(prepare_prompts(arguments(path), tokenizer, 99, one_domain, tmp_path / "cache")) == 5
    assert calls == []


def test_what_goes_into_a_table_names_it(
    write_jsonl: Write,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    one_domain: dict,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = tmp_path / "cache"
    path = write_jsonl([{"prompt": "one"}])

    def tables_kept() -> int:
        return sum(entry.is_dir() for entry in cache.iterdir())

    prepare_prompts(arguments(path), tokenizer, 100, one_domain, cache)
    prepare_prompts(arguments(path, template="raw"), tokenizer, 100, one_domain, cache)
    assert tables_kept() == 2
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    prepare_prompts(arguments(path), tokenizer, 100, one_domain, cache)
    assert tables_kept() == 3
    Path(path).write_text(json.dumps({"prompt": "changed"}))
    prompts = prepare_prompts(arguments(path, template="raw"), tokenizer, 100, one_domain, cache)
    assert tables_kept() == 4
    assert prompts.prompt(0, 0).text == "changed"


def test_several_tokenising_processes_give_the_same(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, one_domain: dict
) -> None:
    path = write_jsonl([{"prompt": f"question {number}"} for number in range(25)])
    one = prepare_prompts(arguments(path), tokenizer, 100, one_domain, tmp_path / "one")
    two = prepare_prompts(arguments(path, preprocessing_num_workers=2), tokenizer, 100, one_domain, tmp_path / "two")
    assert _texts(one) == _texts(two)
    for index in range(25):
        assert np.array_equal(one.prompt(index, 0).token_ids, two.prompt(index, 0).token_ids)


def _texts(prompts: PromptSet) -> list[str]:
    return [prompts.prompt(index, 0).text for index in range(len(prompts))]


def _prepare_counting_builds(path: str, folder: str, tokenizer: PreTrainedTokenizerFast) -> None:
    build = tables._build

    def counted(*others: Any) -> None:
        (Path(folder) / f"built-{os.getpid()}").touch()
        build(*others)

    tables._build = counted
    prompts = prepare_prompts(
        arguments(path), tokenizer, 100, {"math": RewardConfig.model_validate({})}, Path(folder) / "cache"
    )
    (Path(folder) / f"done-{os.getpid()}").write_text(json.dumps(_texts(prompts)))


def test_concurrent_preparations_build_the_cache_once(
    write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_jsonl([{"prompt": f"question {number}"} for number in range(50)])
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_prepare_counting_builds, args=(path, str(tmp_path), tokenizer)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(limits.PROCESS)
    assert [process.exitcode for process in processes] == [0, 0]
    done = [json.loads(file.read_text()) for file in tmp_path.glob("done-*")]
    assert len(done) == 2 and done[0] == done[1] and len(done[0]) == 50
    assert len(list(tmp_path.glob("built-*"))) == 1


def test_what_a_killed_builder_left_is_cleared(
    write_jsonl: Write,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    one_domain: dict,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_jsonl([{"prompt": "one"}])
    prepare_prompts(arguments(path), tokenizer, 100, one_domain, tmp_path / "cache")
    (folder,) = (entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir())
    folder.rename(folder.with_suffix(".building"))
    prompts = prepare_prompts(arguments(path), tokenizer, 100, one_domain, tmp_path / "cache")
    assert len(prompts) == 1
    assert [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()] == [folder]
